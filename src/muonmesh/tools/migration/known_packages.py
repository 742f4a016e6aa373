"""Known packages: other Muon packages, each with its settings and their defaults."""

from __future__ import annotations

import inspect
from math import prod, sqrt
from typing import Any

import torch
from torch.optim import Optimizer

from muonmesh.errors import explain_error
from muonmesh.numerics.coefficients import COEFFICIENT_SETS, Polynomial
from muonmesh.numerics.scale import ScaleMode
from muonmesh.tools.migration.package import Halves, Package, Settings
from muonmesh.tools.migration.state_keys import StateKeys

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
    return {each.name: each.default for each in arguments if each.name != "params"}


def _named(polynomial: Polynomial) -> str | list[Polynomial]:
    """Return "simple" for Jordan's polynomial, any other as a sequence."""
    return "simple" if (polynomial,) == COEFFICIENT_SETS["simple"].polynomials else [polynomial]


def _polar_express_102(steps: int) -> list[Polynomial]:
    """Return the first ``steps`` of five polynomials of Polar Express with a safety factor of 1.02.

    nanochat, dion and muonium use these polynomials: arXiv 2505.16932, algorithm 1, with another cushion and safety
    factor than in its listing. These packages divide the matrix by the factor once more; the first polynomial here
    includes this division.
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


def _adjust_dion(group: Settings, halves: Halves) -> None:
    """Set AdamW's decay mode to Muon's decay mode, as in dion."""
    if "adamw" in halves:
        halves["adamw"]["decay_mode"] = "cautious" if group["cautious"] else "full"


def _adjust_muonium(group: Settings, halves: Halves) -> None:
    """Multiply Muon's decay by √max(1, rows/cols), as muonium does; in muonium, leading dims are a batch.

    Raises:
        ValueError: the matrices of the group need different decays.
    """
    shapes = [tuple(parameter.shape) for parameter in group.get("params", ())]
    if group["flatten"]:
        shapes = [(shape[0], prod(shape[1:])) for shape in shapes]
    matrices = {shape[-2:] for shape in shapes if len(shape) > 1}
    factors = sorted({sqrt(max(1.0, rows / cols)) for rows, cols in matrices}) or [1.0]
    if "muon" not in halves:
        return
    if len(factors) > 1 and group["weight_decay"]:
        found = f"a weight decay of {group['weight_decay']} that muonium multiplies by factors of the shape, {factors}"
        write = "Convert the matrices of each shape by themselves, as a group of their own"
        raise ValueError(explain_error("group", found, "one decay for the group", write))
    halves["muon"]["weight_decay"] *= factors[0]


PACKAGES: dict[str, Package] = {
    "adamw": Package(  # torch's AdamW and Adam, and the Adams of DeepSpeed
        _defaults_of(torch.optim.AdamW),
        halves=("adamw",),
        beside=frozenset({"bias_correction"}),  # DeepSpeed's
    ),
    "torch": Package(  # torch's ε needs no counterpart: muonmesh normalizes every nonzero gradient
        _defaults_of(torch.optim.Muon),
        halves=("muon",),
        scales=_TORCHS,
        coefficients=lambda group: _named(tuple(group["ns_coefficients"])),
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
        coefficients=lambda group: _polar_express_102(5) if group["use_polar_express"] else "quintic",
        adjust=_adjust_dion,
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
    ),
    # The fields of an OptimizerConfig; Megatron-Core builds Emerging-Optimizers' Muon from them, always "quintic".
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
        scales=_NVIDIAS,
        coefficients=lambda group: "quintic",
        # In muonmesh, q, k and v are always separate matrices, and matrices are whole under tensor parallelism.
        beside=frozenset({"optimizer", "muon_split_qkv", "muon_fp32_matmul_prec", "muon_tp_mode"}),
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
        coefficients=lambda group: (
            _polar_express_102(group["ns_steps"])
            if group["orthogonalization_strategy"] == "polar_express"
            else "simple"
        ),
        adjust=_adjust_muonium,
        beside=frozenset(
            {
                *("foreach", "fused", "capturable", "betas", "eps", "use_muon"),
                *("fused_adam", "foreach_adam", "batch_size", "has_complex"),
            }
        ),
        state_keys=StateKeys(sums=True, beside=frozenset({"step", "lr_ratio"})),
    ),
}
