"""Packages: the other Muon packages that are known, and the translation of their settings to muonmesh."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch.optim import Optimizer

from muonmesh.errors import about, explain_error, warn
from muonmesh.numerics.coefficients import COEFFICIENT_SETS, Polynomial
from muonmesh.numerics.scale import ScaleMode
from muonmesh.settings import FOREIGN_KEYS
from muonmesh.tools.migration.package import COMMON, WITHOUT, Package, Settings, StateKeys, plain

_TORCHS: dict[str | None, ScaleMode] = {
    None: "original",
    "original": "original",
    "match_rms_adamw": "match_rms_adamw",
    "spectral_unclamped": "unit_rms_norm",  # since torch 2.14
}
_DIONS: dict[str | None, ScaleMode] = {"spectral_norm": "unit_rms_norm", "rms_norm": "match_rms_adamw", None: "none"}
_NVIDIAS: dict[str | None, ScaleMode] = {
    "shape_scaling": "original",
    "spectral": "spectral",
    "unit_rms_norm": "unit_rms_norm",
}
_JORDANS = {"muon": 0.02, "adamw": 3e-4}


def _defaults_of(optimizer: type[Optimizer]) -> dict[str, Any]:
    """Return the settings of one of torch's optimizers with their defaults."""
    arguments = inspect.signature(optimizer).parameters.values()
    return {argument.name: argument.default for argument in arguments if argument.name != "params"}


def _named(polynomial: Polynomial) -> str | list[Polynomial]:
    """Return "simple" for Jordan's polynomial, any other as a sequence."""
    return "simple" if (polynomial,) == COEFFICIENT_SETS["simple"].polynomials else [polynomial]


def _polar_express_102() -> list[Polynomial]:
    """Return five polynomials of Polar Express with a safety factor of 1.02.

    nanochat and dion use these polynomials: arXiv 2505.16932, algorithm 1, with another cushion and safety factor than
    in its listing. These packages divide the matrix by the factor once more; the first polynomial here includes this
    division.
    """
    first = (8.156554524902461, -22.48329292557795, 15.878769915207462)
    return [
        tuple(value / 1.02 ** (2 * power + 1) for power, value in enumerate(first)),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ]


PACKAGES: dict[str, Package] = {
    "adamw": Package(  # torch's AdamW and Adam, and the Adams of DeepSpeed
        _defaults_of(torch.optim.AdamW),
        halves=("adamw",),
        beside=frozenset({"bias_correction", "step"}),  # DeepSpeed's and Megatron's
        state_keys=StateKeys(mark="ns_coefficients"),
    ),
    "torch": Package(  # torch's ε needs no counterpart: muonmesh normalizes every nonzero gradient
        _defaults_of(torch.optim.Muon),
        halves=("muon",),
        scales=_TORCHS,
        coefficients=lambda group: _named(tuple(group["ns_coefficients"])),
        state_keys=StateKeys(mark="ns_coefficients"),  # KellerJordan's of 2024, which sums, has all others
    ),
    "keller_jordan": Package(  # KellerJordan/Muon, `muon-optimizer` 0.1.0
        {
            "lr": None,
            "momentum": 0.95,
            "weight_decay": 0.0,
            "betas": (0.9, 0.95),
            "eps": 1e-10,
            "use_muon": True,
        },
        halves=("adamw",),  # unless use_muon is set
        rates=_JORDANS,
        sorts=True,
    ),
    "dion": Package(  # microsoft/dion 0.1.0
        {
            "lr": 0.01,
            "mu": 0.95,
            "betas": (0.9, 0.95),
            "weight_decay": 0.01,
            "cautious_wd": False,
            "epsilon": 1e-8,
            "nesterov": False,
            "adjust_lr": "spectral_norm",
            "use_polar_express": True,
            "algorithm": None,
        },
        scales=_DIONS,
        coefficients=lambda group: _polar_express_102() if group["use_polar_express"] else "quintic",
        cautious_adamw=True,
        beside=frozenset({"distributed_mesh", "flatten", "use_triton", "step", "beta1", "beta2"}),
        state_keys=StateKeys("momentum", sums=True, factor="mu", first="momentum", second="variance", count="step_dev"),
    ),
    "deepspeed": Package(  # DeepSpeed 0.19: a group of the optimizer, or the configuration for Muon and AdamW together
        {
            "lr": None,
            "muon_lr": None,
            "adam_lr": None,
            "momentum": 0.95,
            "weight_decay": 0.0,
            "betas": (0.9, 0.95),
            "eps": 1e-10,
            "use_muon": None,
        },
        rates=_JORDANS,
        beside=frozenset({"ns_method", "torch_adam", "fp32_optimizer_states", "bias_correction"}),
        sorts=True,
    ),
    "emerging_optimizers": Package(  # Emerging-Optimizers 0.3
        {
            "lr": 3e-4,
            "momentum": 0.95,
            "weight_decay": 0.01,
            "nesterov": False,
            "coefficient_type": "quintic",
            "num_ns_steps": 5,
            "scale_mode": "spectral",
            "extra_scale_factor": 1.0,
        },
        halves=("muon",),
        scales=_NVIDIAS,
        coefficients=lambda group: group["coefficient_type"],
        beside=frozenset({"fp32_matmul_prec", "use_syrk"}),
        keeps_settings=False,
    ),
    # The fields of an OptimizerConfig; Megatron-Core builds Emerging-Optimizers' Muon from them.
    "megatron": Package(  # Megatron-Core 0.16, which is always "quintic" and says muon_use_nesterov, and 0.19
        {
            "lr": None,
            "weight_decay": 0.01,
            "adam_beta1": 0.9,
            "adam_beta2": 0.999,
            "adam_eps": 1e-8,
            "muon_momentum": 0.95,
            "muon_use_nesterov": False,
            "muon_nesterov": False,
            "muon_coefficient_type": "quintic",
            "muon_num_ns_steps": 5,
            "muon_scale_mode": "spectral",
            "muon_extra_scale_factor": 1.0,
        },
        scales=_NVIDIAS,
        coefficients=lambda group: group["coefficient_type"],
        # In muonmesh, matrices are whole under tensor parallelism.
        beside=frozenset({"muon_fp32_matmul_prec", "muon_tp_mode"}),
        keeps_settings=False,
    ),
}


def foreign_setting(package: str, group: Mapping[str, Any], *, has_momentum: bool) -> str | None:
    """Return what shows that a saved group is another package's, or None.

    Args:
        package: The package that is said to have saved the group.
        group: The group.
        has_momentum: Whether the group has the momentum of Muon, and not only the moments of AdamW, which are the same
            in all packages.
    """
    known = PACKAGES[package]
    every = {plain(key) for other in PACKAGES.values() for key in other.defaults}
    names = ("adamw", "torch" if package == "adamw" else package)  # torch's two go by either name
    own = {plain(key) for name in names for key in (*PACKAGES[name].defaults, *PACKAGES[name].beside)}
    own |= {"algorithm", "use_muon"}  # which also mark groups of a user's own
    if has_momentum:
        if known.state_keys.mark is not None and known.state_keys.mark not in group:
            return f"no setting {known.state_keys.mark!r}"
        if not known.keeps_settings:
            own -= {plain(key) for key in known.defaults} - {"lr", "momentum", "weight_decay", "betas", "eps"}
        strangers = (
            key for key in group if key not in COMMON | FOREIGN_KEYS | WITHOUT.keys() and plain(key) not in own
        )
    else:
        strangers = (key for key in group if plain(key) in every - own)
    found = next(strangers, None)
    return None if found is None else f"the setting {found!r}"


PackageName: TypeAlias = Literal[
    "adamw", "torch", "keller_jordan", "dion", "deepspeed", "emerging_optimizers", "megatron"
]
"""The packages that `convert_settings` knows: torch's AdamW and Adam, torch.optim.Muon, and five other packages."""

_JORDAN_CLASSES = ("SingleDeviceMuon", "Muon", "MuonWithAuxAdam", "SingleDeviceMuonWithAuxAdam")

_CLASSES: dict[str, dict[str, PackageName]] = {
    "torch": {"AdamW": "adamw", "Adam": "adamw", "Muon": "torch"},
    "deepspeed": {"FusedAdam": "adamw", "DeepSpeedCPUAdam": "adamw", **dict.fromkeys(_JORDAN_CLASSES, "deepspeed")},
    "muon": dict.fromkeys(_JORDAN_CLASSES, "keller_jordan"),
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


def _has_heads(group: Mapping[str, Any]) -> bool:
    """Return whether DeepSpeed's Muon orthogonalizes each head of a weight by itself, which it writes on the weight."""
    return any(getattr(parameter, "muon_num_heads", None) is not None for parameter in group["params"])


def groups_of(source: object) -> tuple[PackageName, list[Settings]]:
    """Return the package of an optimizer, and its groups, with settings added that it keeps outside of its groups.

    Raises:
        TypeError: the optimizer belongs to no known package, or its settings cannot be read.
    """
    for kind in type(source).__mro__:
        package = kind.__module__.split(".")[0]
        name = _CLASSES.get(package, {}).get(kind.__name__)
        if name == "megatron":
            without = {"decoupled_weight_decay", "optimizer", "muon_scalar_optimizer", "muon_split_qkv"}
            fields = without | PACKAGES["megatron"].defaults.keys()
            return name, [{key: getattr(source, key) for key in fields if hasattr(source, key)}]
        if name is None or not isinstance(source, Optimizer) or not issubclass(kind, Optimizer):
            continue
        if inspect.unwrap(type(source).step) is not inspect.unwrap(kind.step):
            continue  # a subclass with another step, such as composer's DecoupledAdamW, whose decay is another
        outside: Settings = {}
        if package == "deepspeed":
            outside = {"adam_w_mode": bool(getattr(source, "adam_w_mode", True))}
        if name == "dion":
            iteration = getattr(getattr(source, "_newton_schulz_func", None), "__name__", "")
            if iteration not in _DIONS_ITERATIONS:
                continue
            outside = {"use_polar_express": _DIONS_ITERATIONS[iteration]}
        groups = [{**group, **outside} for group in source.param_groups]
        if name == "deepspeed":
            groups = [{"use_muon": True, "per_head_muon": _has_heads(group), **group} for group in groups]
        return name, groups
    fault = f"{type(source).__module__}.{type(source).__name__}"
    names = ", ".join(map(repr, get_args(PackageName)))
    write = "Write convert_settings(name, lr=..., ...) with the settings that you gave it, and "
    write += f"convert(source.state_dict(), optimizer, package=name); the names are {names}"
    if any(kind.__module__.startswith("muonmesh.") for kind in type(source).__mro__):
        write = "There is nothing to convert: write optimizer.load_state_dict(source.state_dict())"
    needed = "an optimizer that keeps its settings in its groups, of a package that is known"
    raise TypeError(explain_error("source", fault, needed, write))


def convert_settings(source: PackageName | Optimizer | object, *rest: Any, **settings: Any) -> Settings:
    """Return settings of muonmesh for the step of another optimizer.

    Pass them to ``from_model(model, **convert_settings(...))``. They are Muon's settings, and under ``"adamw"`` AdamW's
    settings, if the source has any. Settings of Muon alone or AdamW alone are also keys of a param group and arguments
    of `Muon`. docs/migrating.md says which steps are exactly the same, and what differs between the packages.

    Args:
        source: An optimizer of torch's AdamW, Adam or Muon, KellerJordan's, dion's or DeepSpeed's; or
            Megatron-Core's ``OptimizerConfig``; or the name of a package. If a scheduler has changed a learning rate,
            the initial value counts.
        rest: If ``source`` is an optimizer, the optimizer of all other parameters, such as AdamW next to torch's Muon.
            If ``source`` is a name, param groups as that package takes them.
        settings: If ``source`` is a name, the arguments of that package's constructor (DeepSpeed: the "params" of the
            configuration's optimizer; Megatron: fields of ``OptimizerConfig``). A missing argument takes that package's
            default.

    Returns:
        A plain dict. Betas and ε are ``adamw_betas`` and ``adamw_eps``. Vectors never decay with `from_model`.

    Raises:
        TypeError: ``source`` belongs to no known package, or is an optimizer that does not store its settings.
        ValueError: a setting is unknown, has no counterpart, or differs between groups of Muon or between groups of
            AdamW.
    """
    if isinstance(source, str):
        if source not in PACKAGES:
            needed = "one of " + ", ".join(map(repr, get_args(PackageName)))
            raise ValueError(explain_error("source", f"{source!r}", needed, 'Write convert_settings("torch", lr=0.02)'))
        for group in rest:
            if not isinstance(group, Mapping):
                needed = f"param groups as {source} takes them"
                raise TypeError(explain_error("rest", f"{type(group).__name__}", needed, "Write a dict"))
        return _merged(source, [(source, {**settings, **group}) for group in rest or ({},)])
    if settings:
        fault = f"settings beside an optimizer: {', '.join(settings)}"
        raise ValueError(explain_error("settings", fault, "either", "Change what convert_settings returns"))
    owned = [groups_of(optimizer) for optimizer in (source, *rest)]
    merged = _merged(type(source).__name__, [(name, group) for name, groups in owned for group in groups])
    if "adamw_eps" not in merged.get("adamw", merged):
        message = "from_model takes these settings, learning rate included, for AdamW too. Write "
        warn(about(type(source).__name__, f"{message}convert_settings(muon, adamw), with the optimizer of the rest"))
    return merged


def _merged(subject: str, groups: Sequence[tuple[str, Settings]]) -> Settings:
    """Return the settings for Muon and AdamW of groups, each with its package, as arguments of `from_model`."""
    halves = [(name, PACKAGES[name].read_group(group)) for name, group in groups]
    muon = _agreed(f"{subject}'s Muon groups", [(name, half["muon"]) for name, half in halves if "muon" in half])
    adamw = _agreed(f"{subject}'s AdamW groups", [(name, half["adamw"]) for name, half in halves if "adamw" in half])
    return {**muon, "adamw": adamw} if muon and adamw else muon or adamw


def _agreed(subject: str, named_groups: Sequence[tuple[str, Settings]]) -> Settings:
    """Return the settings that all groups of one algorithm, each with its package, have in common.

    Raises:
        ValueError: the groups have different settings.
    """
    groups = [group for _, group in named_groups]
    decaying = [group for group in groups if not group.pop("exempt", False)] or groups
    for key in groups[0] if groups else ():
        # Groups of vectors without decay need no setting of it: vectors never decay in muonmesh.
        comparable = decaying if key in ("weight_decay", "decay_mode") else groups
        values = {str(group.get(key)): None for group in comparable}
        if len(values) > 1:
            fault, needed = f"{key} {' and '.join(values)}", "one for all of them"
            write = 'Convert each group by itself: {"params": group["params"], "algorithm": "muon" or "adamw", '
            write += f'**convert_settings("{named_groups[0][0]}", group)}}. If a group has matrices and vectors, '
            write += "convert one group, and pass the settings of the others as from_model(..., overrides={...})"
            raise ValueError(explain_error(subject, fault, needed, write))
    return decaying[0] if groups else {}
