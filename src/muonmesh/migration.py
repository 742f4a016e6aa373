"""Moving here: what another optimizer's settings are called with us, and how large they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod, sqrt
from typing import Any, Literal, TypeAlias, get_args

from torch import Tensor
from torch.optim import Optimizer

from muonmesh.errors import explain_error
from muonmesh.numerics.coefficients import Polynomial
from muonmesh.numerics.scale import ScaleMode
from muonmesh.settings import FOREIGN_KEYS

PackageName: TypeAlias = Literal[
    "adamw", "torch", "keller_jordan", "dion", "deepspeed", "emerging_optimizers", "megatron", "muonium"
]
"""The packages that `convert_settings` knows: torch's AdamW and Adam, torch.optim.Muon, and six other packages."""

Settings: TypeAlias = dict[str, Any]
Halves: TypeAlias = dict[str, Settings]
"""Our settings of the halves that a group speaks of: "muon", "adamw" or both."""


def convert_settings(source: PackageName | Optimizer | object, *rest: Any, **settings: Any) -> Settings:
    """Return our settings for a step like that of another optimizer.

    ``from_model(model, **convert_settings(...))`` takes them: those of Muon's half, and under ``"adamw"`` those of
    AdamW's half where the source says anything about it. Settings of one half alone are also keys of a group and
    arguments of `Muon`. What differs between the packages beyond names, and which step is exactly the same, is told in
    docs/migrating.md.

    Args:
        source: An optimizer of torch's AdamW, Adam or Muon, KellerJordan's, dion's, DeepSpeed's or muonium's; or
            Megatron-Core's ``OptimizerConfig``; or the name of a package. A learning rate that a scheduler has changed
            counts as it was before.
        rest: After an optimizer, the one that steps the rest of the model, such as AdamW beside torch's Muon. After a
            name, param groups as that package takes them.
        settings: After a name, what that package's constructor takes (DeepSpeed: the "params" of the configuration's
            optimizer; Megatron: fields of ``OptimizerConfig``). What is left out is that package's default.

    Returns:
        A plain dict. Betas and ε are ``adamw_betas`` and ``adamw_eps``. Vectors never decay with `from_model`.

    Raises:
        TypeError: ``source`` is of no known package, or an optimizer that does not keep its settings.
        ValueError: a setting is unknown, has no counterpart, or differs between groups of one half.
    """
    if isinstance(source, str):
        if source not in _PACKAGES:
            needed = "one of " + ", ".join(map(repr, get_args(PackageName)))
            raise ValueError(explain_error("source", f"{source!r}", needed, 'Write convert_settings("torch", lr=0.02)'))
        for group in rest:
            if not isinstance(group, Mapping):
                needed = f"param groups as {source} takes them"
                raise TypeError(explain_error("rest", f"{type(group).__name__}", needed, "Write a dict"))
        return _merged(source, [_PACKAGES[source].read_group({**settings, **group}) for group in rest or ({},)], source)
    if settings:
        found = f"settings beside an optimizer: {', '.join(settings)}"
        raise ValueError(explain_error("settings", found, "either", "Change what convert_settings returns"))
    owned = [_groups_of(optimizer) for optimizer in (source, *rest)]
    halves = [_PACKAGES[name].read_group(group) for name, groups in owned for group in groups]
    return _merged(type(source).__name__, halves, owned[0][0])


def _merged(where: str, groups: Sequence[Halves], name: str) -> Settings:
    """Return the settings of both halves as arguments of `from_model`."""
    muon = _agreed(f"{where}'s Muon groups", [halves["muon"] for halves in groups if "muon" in halves], name)
    adamw = _agreed(f"{where}'s AdamW groups", [halves["adamw"] for halves in groups if "adamw" in halves], name)
    return {**muon, "adamw": adamw} if muon and adamw else muon or adamw


def _agreed(where: str, groups: list[Settings], name: str) -> Settings:
    """Return the one set of settings that all groups of a half have."""
    decaying = [group for group in groups if not group.pop("exempt", False)]
    groups = decaying or groups  # vectors that do not decay: so they are with us, whatever the other groups say
    for key in groups[0] if groups else ():
        values = {str(group.get(key)): None for group in groups}
        if len(values) > 1:
            found, needed = f"{key} {' and '.join(values)}", "one for all of them"
            write = 'Convert each group by itself: {"params": group["params"], "algorithm": "muon" or "adamw", '
            raise ValueError(explain_error(where, found, needed, f'{write}**convert_settings("{name}", group)}}'))
    return groups[0] if groups else {}


# ---------------------------------------------------------------- what the packages' settings mean


@dataclass(frozen=True)
class Package:
    """What one package calls its settings.

    Attributes:
        defaults: The settings that change a step, with the package's defaults.
        read: Translates a group with all of them.
        without: Settings that change a step in a way that we have no counterpart for, with the values that do not.
        beside: Settings that change no step: how it is run, or where.
    """

    defaults: Mapping[str, Any]
    read: Callable[[Mapping[str, Any]], Halves]
    without: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    beside: frozenset[str] = frozenset()

    def read_group(self, given: Mapping[str, Any]) -> Halves:
        """Translate a group, or settings alone.

        Raises:
            ValueError: a key is unknown, or its value has no counterpart.
        """
        for key, value in given.items():
            if key in self.without:
                if not any(value is fine or value == fine for fine in self.without[key]):
                    needed = " or ".join(map(repr, self.without[key]))
                    write = _INSTEAD.get(key, "Leave it out")
                    raise ValueError(explain_error(key, f"{value!r}, for which we have no counterpart", needed, write))
            elif key not in self.defaults and key not in self.beside and key not in _COMMON | FOREIGN_KEYS:
                known = ", ".join(self.defaults)
                raise ValueError(explain_error("settings", f"{key!r}", f"some of {known}", "Correct or remove it"))
        rate = given.get("initial_lr", given.get("lr", self.defaults["lr"]))
        halves = self.read({**self.defaults, **given, "lr": float(rate) if isinstance(rate, Tensor) else rate})
        shapes = [tuple(parameter.shape) for parameter in given.get("params", ())]
        vectors = bool(shapes) and all(sum(size > 1 for size in shape) <= 1 for shape in shapes)
        for half in halves.values():
            if vectors and half["weight_decay"] == 0:
                half["exempt"] = True
        return halves


_COMMON = frozenset({"params", "param_names", "name"})

_INSTEAD = {
    "split_sizes": 'Leave it out and write overrides={name: {"matrices": ("rows", ...)}} for from_model',
    "num_heads": 'Leave it out and write overrides={name: {"matrices": ("heads", n, dim)}} for from_model',
    "maximize": "Leave it out and negate the loss",
    "use_gram_newton_schulz": "Leave it out: ns_method does this, with its own restarts",
    "coefficient_type": 'Write coefficient_type="quintic", or set ns_coefficients afterwards',
    "weight_decay_method": "Leave it out: our decay is decoupled",
    "decoupled_weight_decay": "Leave it out: our decay is decoupled",
    "adam_w_mode": "Leave it out: our decay is decoupled",
    "algorithm": 'Convert the settings of its Muon, and write rule="normuon" for from_model if that is meant',
}


def _adamw_half(group: Mapping[str, Any]) -> Settings:
    return {
        "lr": group["lr"],
        "weight_decay": group["weight_decay"],
        "decay_mode": "full",
        "adamw_betas": tuple(group["betas"]),
        "adamw_eps": group["eps"],
    }


def _muon_half(
    group: Mapping[str, Any],
    *,
    momentum: float,
    nesterov: bool,
    scale_mode: ScaleMode,
    coefficients: str | list[Polynomial],
    steps: int,
    extra_scale_factor: float = 1.0,
    cautious: bool = False,
) -> Settings:
    return {
        "lr": group["lr"],
        "momentum": momentum,
        "nesterov": nesterov,
        "weight_decay": group["weight_decay"],
        "decay_mode": "cautious" if cautious else "full",
        "scale_mode": scale_mode,
        "extra_scale_factor": extra_scale_factor,
        "ns_coefficients": coefficients,
        "ns_steps": steps,
    }


_JORDAN = (3.4445, -4.7750, 2.0315)


def _named(polynomial: Sequence[float]) -> str | list[Polynomial]:
    """Return "simple" for Jordan's polynomial, any other as a sequence."""
    return "simple" if tuple(polynomial) == _JORDAN else [tuple(polynomial)]


def _polar_express_102(steps: int) -> list[Polynomial]:
    """Return Polar Express for five steps with a safety factor of 1.02, as nanochat, dion and muonium run it.

    arXiv 2505.16932, algorithm 1, with another cushion and safety factor than in its listing. These packages divide
    the matrix by the factor once more, which is written into the first polynomial here.
    """
    polynomials: list[Polynomial] = [
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ]
    first = tuple(value / 1.02 ** (2 * power + 1) for power, value in enumerate(polynomials[0]))
    return [first, *polynomials[1:]][:steps]


def _read_adamw(group: Mapping[str, Any]) -> Halves:
    if not group["decoupled_weight_decay"] and group["weight_decay"]:
        found, needed = f"{group['weight_decay']} that is not decoupled", "decoupled decay, AdamW's, or 0"
        raise ValueError(explain_error("weight_decay", found, needed, "Convert an AdamW with the decay that you want"))
    # One learning rate serves both halves when Muon's step has the RMS of AdamW's (Moonlight, arXiv 2502.16982).
    return {"adamw": {**_adamw_half(group), "scale_mode": "match_rms_adamw"}}


def _read_torch(group: Mapping[str, Any]) -> Halves:
    mode: ScaleMode = "match_rms_adamw" if group["adjust_lr_fn"] == "match_rms_adamw" else "original"
    return {
        "muon": _muon_half(
            group,
            momentum=group["momentum"],
            nesterov=group["nesterov"],
            scale_mode=mode,
            coefficients=_named(group["ns_coefficients"]),
            steps=group["ns_steps"],
        )
    }


def _jordan_half(group: Mapping[str, Any]) -> Settings:
    momentum = group["momentum"]
    return _muon_half(group, momentum=momentum, nesterov=True, scale_mode="original", coefficients="simple", steps=5)


def _read_keller_jordan(group: Mapping[str, Any]) -> Halves:
    if group["use_muon"]:
        return {"muon": _jordan_half({**group, "lr": 0.02 if group["lr"] is None else group["lr"]})}
    return {"adamw": _adamw_half({**group, "lr": 3e-4 if group["lr"] is None else group["lr"]})}


def _read_deepspeed(group: Mapping[str, Any]) -> Halves:
    """Read a group of the optimizer, or the configuration, which speaks of both halves."""

    def rate(key: str, default: float) -> Any:
        own = group[key] if group[key] is not None else group["lr"]
        return default if own is None else own

    muon = {"muon": _jordan_half({**group, "lr": rate("muon_lr", 0.02)})}
    adamw = {"adamw": _adamw_half({**group, "lr": rate("adam_lr", 3e-4)})}
    return {**muon, **adamw} if group["use_muon"] is None else muon if group["use_muon"] else adamw


def _read_dion(group: Mapping[str, Any]) -> Halves:
    modes: dict[str | None, ScaleMode] = {"spectral_norm": "unit_rms_norm", "rms_norm": "match_rms_adamw", None: "none"}
    if group["adjust_lr"] not in modes:
        needed = "one of " + ", ".join(map(repr, modes))
        raise ValueError(explain_error("adjust_lr", f"{group['adjust_lr']!r}", needed, 'Write "rms_norm"'))
    cautious = bool(group["cautious_wd"])
    muon = _muon_half(
        group,
        momentum=group["mu"],
        nesterov=group["nesterov"],
        scale_mode=modes[group["adjust_lr"]],
        coefficients=_polar_express_102(5) if group["use_polar_express"] else "quintic",
        steps=5,
        cautious=cautious,
    )
    betas = (group.get("beta1", group["betas"][0]), group.get("beta2", group["betas"][1]))
    adamw = _adamw_half({**group, "betas": betas, "eps": group["epsilon"]})
    adamw["decay_mode"] = muon["decay_mode"]
    halves = {"muon": muon, "adamw": adamw}
    return halves if group["algorithm"] is None else {group["algorithm"]: halves[group["algorithm"]]}


def _read_emerging(group: Mapping[str, Any]) -> Halves:
    modes: dict[str, ScaleMode] = {
        "shape_scaling": "original",
        "spectral": "spectral",
        "unit_rms_norm": "unit_rms_norm",
    }
    if group["scale_mode"] not in modes:
        needed = "one of " + ", ".join(map(repr, modes))
        raise ValueError(explain_error("scale_mode", f"{group['scale_mode']!r}", needed, 'Write "spectral"'))
    return {
        "muon": _muon_half(
            group,
            momentum=group["momentum"],
            nesterov=group["nesterov"],
            scale_mode=modes[group["scale_mode"]],
            coefficients=group["coefficient_type"],
            steps=group["num_ns_steps"],
            extra_scale_factor=group["extra_scale_factor"],
        )
    }


def _read_megatron(group: Mapping[str, Any]) -> Halves:
    """Read an OptimizerConfig's fields; Megatron-Core builds Emerging-Optimizers' Muon from them, always "quintic"."""
    muon = _read_emerging(
        {
            **group,
            "momentum": group["muon_momentum"],
            "nesterov": group["muon_use_nesterov"],
            "coefficient_type": "quintic",
            "num_ns_steps": group["muon_num_ns_steps"],
            "scale_mode": group["muon_scale_mode"],
            "extra_scale_factor": group["muon_extra_scale_factor"],
        }
    )
    betas = (group["adam_beta1"], group["adam_beta2"])
    return {**muon, "adamw": _adamw_half({**group, "betas": betas, "eps": group["adam_eps"]})}


def _read_muonium(group: Mapping[str, Any]) -> Halves:
    decay = group["wd"]
    # muonium multiplies the decay by √max(1, rows/cols) as it does the update; its leading dims are a batch.
    shapes = [tuple(parameter.shape) for parameter in group.get("params", ())]
    if group["flatten"]:
        shapes = [(shape[0], prod(shape[1:])) for shape in shapes]
    matrices = {shape[-2:] for shape in shapes if len(shape) > 1}
    factors = sorted({sqrt(max(1.0, rows / cols)) for rows, cols in matrices}) or [1.0]
    polar = group["orthogonalization_strategy"] == "polar_express"
    betas = group.get("betas", group["adam_betas"])
    adamw = _adamw_half({**group, "weight_decay": decay, "betas": betas, "eps": group.get("eps", group["adam_eps"])})
    algorithm = group["algorithm"]
    if algorithm == "adamw":
        return {"adamw": adamw}
    if len(factors) > 1 and decay:
        found = f"a weight decay of {decay} that muonium multiplies by factors of the shape, {factors}"
        write = "Convert the matrices of each shape by themselves, as a group of their own"
        raise ValueError(explain_error("group", found, "one decay for the group", write))
    muon = _muon_half(
        {**group, "weight_decay": decay * factors[0]},
        momentum=group["momentum"],
        nesterov=group["nesterov"],
        scale_mode="original",
        coefficients=_polar_express_102(group["ns_steps"]) if polar else "simple",
        steps=group["ns_steps"],
        cautious=bool(group["use_cautious_wd"]),
    )
    return {"muon": muon} if algorithm == "muon" else {"muon": muon, "adamw": adamw}


_OFF = (None, False)
_SWITCHES = frozenset({"foreach", "fused", "capturable"})

_PACKAGES: dict[str, Package] = {
    "adamw": Package(
        {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "decoupled_weight_decay": True},
        _read_adamw,
        {"amsgrad": _OFF, "maximize": _OFF, "differentiable": _OFF},
        # The last is that of DeepSpeed's FusedAdam and DeepSpeedCPUAdam.
        _SWITCHES | {"bias_correction"},
    ),
    "torch": Package(  # torch 2.13
        {
            "lr": 1e-3,
            "weight_decay": 0.1,
            "momentum": 0.95,
            "nesterov": True,
            "ns_coefficients": _JORDAN,
            "ns_steps": 5,
            "adjust_lr_fn": None,
        },
        _read_torch,
        {"adjust_lr_fn": (None, "original", "match_rms_adamw")},
        frozenset({"eps"}),  # ours has none: no gradient is too small
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
        _read_keller_jordan,
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
        _read_dion,
        {
            "algorithm": (None, "muon", "adamw"),
            "use_gram_newton_schulz": _OFF,
            "newton_schulz_func": _OFF,
            "split_sizes": _OFF,
            "num_heads": _OFF,
        },
        frozenset({"distributed_mesh", "flatten", "use_triton", "step", "beta1", "beta2"}),
    ),
    "deepspeed": Package(  # DeepSpeed 0.19
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
        _read_deepspeed,
        {"adam_w_mode": (True,)},
        frozenset({"ns_method", "torch_adam", "fp32_optimizer_states", "bias_correction"}),
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
        _read_emerging,
        {
            "weight_decay_method": ("decoupled",),
            "coefficient_type": ("simple", "quintic", "polar_express", "cans", "deepseekv4"),
        },
        frozenset({"fp32_matmul_prec", "use_syrk"}),
    ),
    "megatron": Package(  # Megatron-Core 0.16
        {
            "lr": None,
            "weight_decay": 0.01,
            "adam_beta1": 0.9,
            "adam_beta2": 0.999,
            "adam_eps": 1e-8,
            "muon_momentum": 0.95,
            "muon_use_nesterov": False,
            "muon_num_ns_steps": 5,
            "muon_scale_mode": "spectral",
            "muon_extra_scale_factor": 1.0,
        },
        _read_megatron,
        {"decoupled_weight_decay": (True,)},
        # q, k and v are matrices of their own with us, and a matrix is whole under tensor parallelism.
        frozenset({"optimizer", "muon_split_qkv", "muon_fp32_matmul_prec", "muon_tp_mode"}),
    ),
    "muonium": Package(  # muonium 0.2.0
        {
            "lr": 1e-3,
            "wd": 0.1,
            "use_cautious_wd": True,
            "momentum": 0.95,
            "nesterov": True,
            "ns_steps": 5,
            "orthogonalization_strategy": "polar_express",
            "adam_betas": (0.9, 0.95),
            "adam_eps": 1e-8,
            "algorithm": None,
            "flatten": False,
        },
        _read_muonium,
        {
            "algorithm": (None, "muon", "adamw"),
            "maximize": _OFF,
            "amsgrad": _OFF,
            "is_adamw": (True,),
            "decoupled_weight_decay": (True,),
            "split_sizes": _OFF,
            "differentiable": _OFF,
        },
        _SWITCHES | {"betas", "eps", "use_muon", "fused_adam", "foreach_adam", "batch_size", "has_complex"},
    ),
}


# ---------------------------------------------------------------- optimizers


def _groups_of(source: object) -> tuple[PackageName, list[Settings]]:
    """Return whose optimizer it is, and its groups with what it keeps outside of them.

    Raises:
        TypeError: it is nobody's that is known, or keeps its settings where they cannot be read.
    """
    for kind in type(source).__mro__:
        package, name = kind.__module__.split(".")[0], kind.__name__
        if package == "megatron" and name == "OptimizerConfig":
            fields = {*_PACKAGES["megatron"].defaults, "decoupled_weight_decay"}
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
