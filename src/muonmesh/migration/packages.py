"""Packages: those that are known, and whose an optimizer or a group is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

from torch.optim import Optimizer

from muonmesh.errors import explain_error
from muonmesh.migration import adamw, deepspeed, dion, emerging_optimizers, keller_jordan, megatron, muonium, torch_muon
from muonmesh.migration.package import Package, Settings

PackageName: TypeAlias = Literal[
    "adamw", "torch", "keller_jordan", "dion", "deepspeed", "emerging_optimizers", "megatron", "muonium"
]
"""The packages that `convert_settings` knows: torch's AdamW and Adam, torch.optim.Muon, and six other packages."""

PACKAGES: dict[str, Package] = {
    "adamw": adamw.PACKAGE,
    "torch": torch_muon.PACKAGE,
    "keller_jordan": keller_jordan.PACKAGE,
    "dion": dion.PACKAGE,
    "deepspeed": deepspeed.PACKAGE,
    "emerging_optimizers": emerging_optimizers.PACKAGE,
    "megatron": megatron.PACKAGE,
    "muonium": muonium.PACKAGE,
}


def groups_of(source: object) -> tuple[PackageName, list[Settings]]:
    """Return whose optimizer it is, and its groups with what it keeps outside of them.

    Raises:
        TypeError: it is nobody's that is known, or keeps its settings where they cannot be read.
    """
    for kind in type(source).__mro__:
        package, name = kind.__module__.split(".")[0], kind.__name__
        if package == "megatron" and name == "OptimizerConfig":
            fields = {*PACKAGES["megatron"].defaults, "decoupled_weight_decay"}
            return "megatron", [{key: getattr(source, key) for key in fields if hasattr(source, key)}]
        if not isinstance(source, Optimizer):
            continue
        groups: list[Settings] = [dict(group) for group in source.param_groups]
        match package, name:
            case ("torch", "AdamW") | ("torch", "Adam"):
                return "adamw", groups
            case ("deepspeed", "FusedAdam") | ("deepspeed", "DeepSpeedCPUAdam"):
                decoupled = bool(getattr(source, "adam_w_mode", True))
                return "adamw", [{**group, "decoupled_weight_decay": decoupled} for group in groups]
            case ("torch", "Muon"):
                return "torch", groups
            case ("muon", "SingleDeviceMuon" | "Muon" | "MuonWithAuxAdam" | "SingleDeviceMuonWithAuxAdam"):
                return "keller_jordan", groups
            case ("deepspeed", "SingleDeviceMuon" | "Muon" | "MuonWithAuxAdam" | "SingleDeviceMuonWithAuxAdam"):
                mode = bool(getattr(source, "adam_w_mode", True))
                return "deepspeed", [{"use_muon": True, **group, "adam_w_mode": mode} for group in groups]
            case ("muonium", "Muon"):
                return "muonium", groups
            case ("dion", "Muon"):
                polar = getattr(getattr(source, "_newton_schulz_func", None), "__name__", "")
                known = {"polar_express": True, "polar_express_triton": True}
                known |= {"zeropower_via_newtonschulz5": False, "newton_schulz_triton": False}
                if polar in known:
                    return "dion", [{**group, "use_polar_express": known[polar]} for group in groups]
    found = f"{type(source).__module__}.{type(source).__name__}"
    names = ", ".join(map(repr, get_args(PackageName)))
    write = f"Write convert_settings(name, lr=..., ...) with the settings that you gave it; the names are {names}"
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
"""Keys that the groups of one package have and those of the packages below it do not."""


def package_of(groups: Sequence[Mapping[str, Any]]) -> PackageName:
    """Return whose saved groups these are.

    Raises:
        ValueError: they have no key that only one package has.
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
    write = (
        'Write convert(source, optimizer, package="keller_jordan"), or whose it is; state of muonmesh needs no convert'
    )
    raise ValueError(explain_error("source", found, needed, write))
