"""Packages: the known packages, and the package of an optimizer or of param groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

from torch.optim import Optimizer

from muonmesh.errors import explain_error
from muonmesh.tools.migration.known_packages import PACKAGES
from muonmesh.tools.migration.package import Settings

__all__ = ["PACKAGES", "PackageName", "groups_of", "package_of"]

PackageName: TypeAlias = Literal[
    "adamw", "torch", "keller_jordan", "dion", "deepspeed", "emerging_optimizers", "megatron", "muonium"
]
"""The packages that `convert_settings` knows: torch's AdamW and Adam, torch.optim.Muon, and six other packages."""

_JORDANS = ("SingleDeviceMuon", "Muon", "MuonWithAuxAdam", "SingleDeviceMuonWithAuxAdam")

_CLASSES: dict[str, dict[str, PackageName]] = {
    "torch": {"AdamW": "adamw", "Adam": "adamw", "Muon": "torch"},
    "deepspeed": {"FusedAdam": "adamw", "DeepSpeedCPUAdam": "adamw", **dict.fromkeys(_JORDANS, "deepspeed")},
    "muon": dict.fromkeys(_JORDANS, "keller_jordan"),
    "muonium": {"Muon": "muonium"},
    "dion": {"Muon": "dion"},
    "megatron": {"OptimizerConfig": "megatron"},
}
"""The package name of each known optimizer class, by its top-level module and its class name."""

_DIONS_ITERATIONS = {
    "polar_express": True,
    "polar_express_triton": True,
    "zeropower_via_newtonschulz5": False,
    "newton_schulz_triton": False,
}
"""dion's orthogonalization functions by name, and whether each runs Polar Express."""


def groups_of(source: object) -> tuple[PackageName, list[Settings]]:
    """Return the package of an optimizer, and its groups, with settings added that it keeps outside of its groups.

    Raises:
        TypeError: the optimizer belongs to no known package, or its settings cannot be read.
    """
    for kind in type(source).__mro__:
        package = kind.__module__.split(".")[0]
        name = _CLASSES.get(package, {}).get(kind.__name__)
        if name == "megatron":
            fields = {*PACKAGES["megatron"].defaults, "decoupled_weight_decay"}
            return name, [{key: getattr(source, key) for key in fields if hasattr(source, key)}]
        if name is None or not isinstance(source, Optimizer):
            continue
        outside: Settings = {}
        if package == "deepspeed":
            outside = {"adam_w_mode": bool(getattr(source, "adam_w_mode", True))}
        if name == "dion":
            iteration = getattr(getattr(source, "_newton_schulz_func", None), "__name__", "")
            if iteration not in _DIONS_ITERATIONS:
                continue
            outside = {"use_polar_express": _DIONS_ITERATIONS[iteration]}
        default = {"use_muon": True} if name == "deepspeed" else {}
        return name, [{**default, **group, **outside} for group in source.param_groups]
    found = f"{type(source).__module__}.{type(source).__name__}"
    names = ", ".join(map(repr, get_args(PackageName)))
    write = "Write convert_settings(name, lr=..., ...) with the settings that you gave it, and "
    write += f"convert(source.state_dict(), optimizer, package=name); the names are {names}"
    if any(kind.__module__.startswith("muonmesh.") for kind in type(source).__mro__):
        write = "There is nothing to convert: write optimizer.load_state_dict(source.state_dict())"
    needed = "an optimizer that keeps its settings in its groups, of a package that is known"
    raise TypeError(explain_error("source", found, needed, write))


_MARKS: dict[str, PackageName] = {
    "mu": "dion",
    "wd": "muonium",
    "adjust_lr_fn": "torch",
    "ns_method": "deepspeed",
    "is_expert_parallel": "megatron",
    "use_muon": "keller_jordan",
    "use_nesterov": "emerging_optimizers",
    "weight_decay_method": "emerging_optimizers",
}
"""Keys by which the package of a group is found. The first match counts: packages further down lack the keys above."""


def package_of(groups: Sequence[Mapping[str, Any]]) -> PackageName:
    """Return the package that saved these groups.

    Raises:
        ValueError: the groups have no key that identifies a package.
    """
    keys = {key for group in groups for key in group}
    if "scale_mode" not in keys:
        for mark, name in _MARKS.items():
            if mark in keys:
                return name
        if "betas" in keys and "momentum" not in keys:
            return "adamw"
    found = f"groups with {', '.join(sorted(map(str, keys)))}"
    needed = "groups by which the package is known, or its name: " + ", ".join(map(repr, get_args(PackageName)))
    write = 'Write convert(source, optimizer, package="keller_jordan"), or whose it is; state of muonmesh needs no '
    write += "convert"
    raise ValueError(explain_error("source", found, needed, write))
