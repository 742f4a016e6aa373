"""Steps of other packages, restated in fp64 from the formulas they publish; shares no code with them or with ours.

What `muonmesh.convert_settings` promises is judged by these here, and by the packages themselves in
`tests/hosts/test_migrating.py`, where they are installed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.reference import adamw

JORDAN = (3.4445, -4.7750, 2.0315)
YOU = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
# Polar Express (arXiv 2505.16932) for five steps, cushion 0.02 and a safety factor of 1.02, as nanochat and
# dion list it; the factor is part of all polynomials but the last, and the matrix is divided by it before the first.
POLAR_EXPRESS_102 = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)

Step = Callable[[Tensor, Tensor, dict[str, Any]], Tensor]


def orthogonal(x: Tensor, polynomials: Sequence[Sequence[float]], divisor: float = 1.0) -> Tensor:
    """The odd quintics on the singular values of x / (divisor · ‖x‖_F)."""
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    s = s / (divisor * s.square().sum().sqrt())
    for a, b, c in polynomials:
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ vh


def average(g: Tensor, state: dict[str, Any], momentum: float, nesterov: bool) -> Tensor:
    """Momentum as an average: m ← μm + (1−μ)g, looked ahead as (1−μ)g + μm."""
    m = state["m"] = momentum * state.get("m", torch.zeros_like(g)) + (1 - momentum) * g
    return (1 - momentum) * g + momentum * m if nesterov else m


def total(g: Tensor, state: dict[str, Any], momentum: float, nesterov: bool) -> Tensor:
    """Momentum as a sum: m ← μm + g, looked ahead as g + μm."""
    m = state["m"] = momentum * state.get("m", torch.zeros_like(g)) + g
    return g + momentum * m if nesterov else m


def torch_muon(
    *,
    lr: float,
    weight_decay: float,
    momentum: float,
    nesterov: bool,
    ns_coefficients: tuple[float, float, float] = JORDAN,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
) -> Step:
    """torch.optim.Muon 2.13, and 2.15's third scale; docs.pytorch.org/docs/2.13/generated/torch.optim.Muon.html."""

    def step(p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
        rows, cols = p.shape
        unclamped = math.sqrt(rows / cols)
        scales = {"match_rms_adamw": 0.2 * math.sqrt(max(rows, cols)), "spectral_unclamped": unclamped}
        ratio = scales.get(str(adjust_lr_fn), max(1.0, unclamped))
        update = orthogonal(average(g, state, momentum, nesterov), [ns_coefficients] * ns_steps)
        return p * (1 - lr * weight_decay) - lr * ratio * update

    return step


def keller_jordan(*, lr: float, weight_decay: float = 0.0, momentum: float = 0.95) -> Step:
    """MuonWithAuxAdam's matrices; kellerjordan.github.io/posts/muon and the README of KellerJordan/Muon.

    DeepSpeed's Muon has the same formula. Always looks ahead.
    """
    return torch_muon(lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=True)


def dion(
    *,
    lr: float,
    mu: float,
    weight_decay: float,
    nesterov: bool,
    adjust_lr: str | None,
    cautious_wd: bool,
    use_polar_express: bool,
) -> Step:
    """microsoft/dion's Muon 0.1.0: README, section on learning-rate scaling, and the class's docstring."""

    def step(p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
        rows, cols = p.shape
        factors = {"spectral_norm": math.sqrt(rows / cols), "rms_norm": 0.2 * math.sqrt(max(rows, cols)), None: 1.0}
        polynomials, divisor = (POLAR_EXPRESS_102, 1.02) if use_polar_express else (YOU, 1.0)
        update = orthogonal(total(g, state, mu, nesterov), polynomials, divisor)
        decays = (p * update >= 0).double() if cautious_wd else 1.0
        return p * (1 - lr * weight_decay * decays) - lr * factors[adjust_lr] * update

    return step


def emerging_optimizers(
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
    nesterov: bool,
    coefficient_type: str,
    num_ns_steps: int,
    scale_mode: str,
    extra_scale_factor: float,
) -> Step:
    """Emerging-Optimizers 0.3's Muon, which Megatron-Core's is too; docstrings of Muon and get_muon_scale_factor."""

    def step(p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
        rows, cols = p.shape
        scale = {
            "shape_scaling": math.sqrt(max(1, rows / cols)),
            "spectral": math.sqrt(max(rows, cols)),
            "unit_rms_norm": math.sqrt(rows / cols),
        }[scale_mode]
        polynomials = {"simple": [JORDAN], "quintic": YOU}[coefficient_type]
        chosen = [polynomials[i % len(polynomials)] for i in range(num_ns_steps)]
        update = orthogonal(average(g, state, momentum, nesterov), chosen)
        return p * (1 - lr * weight_decay) - lr * scale * extra_scale_factor * update

    return step


def adam_half(*, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> Step:
    """AdamW, as each of these packages has it for the rest."""

    def step(p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
        fresh, state["adamw"] = adamw(
            p, g, state.get("adamw", {}), lr=lr, betas=betas, eps=eps, weight_decay=weight_decay
        )
        return fresh

    return step


# ------------------------------------------------------------------ what they save

MATRICES = ("up.weight", "mid.weight")
REST = ("embedding.weight", "up.bias", "head.weight", "head.bias")
MARKS: dict[str, dict[str, Any]] = {
    "keller_jordan": {"use_muon": True},
    "dion": {"mu": 0.9, "algorithm": "muon"},
    "deepspeed": {"use_muon": True, "ns_method": "gram"},
    "emerging_optimizers": {"weight_decay_method": "decoupled"},
    "megatron": {"is_expert_parallel": False},
}
"""What the groups of a package say."""
KELLER_JORDAN = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
ADAMW = {"lr": 0.003, "betas": (0.8, 0.9), "eps": 1e-9, "weight_decay": 0.0}


class Net(nn.Module):
    """A model with two matrices for Muon."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(10, 12, dtype=dtype)
        self.up = nn.Linear(12, 20, dtype=dtype)
        self.mid = nn.Linear(20, 20, bias=False, dtype=dtype)
        self.head = nn.Linear(20, 10, dtype=dtype)


def saved_state(package: str, momenta: Sequence[Tensor], moments: Sequence[tuple[Tensor, Tensor]]) -> Any:
    """Return what a package saves after three steps: of its matrices, and of the rest both moments."""
    of_dion, counts_in_groups = package == "dion", package in ("dion", "megatron")
    momentum, first, second = (
        ("momentum", "momentum", "variance") if of_dion else ("momentum_buffer", "exp_avg", "exp_avg_sq")
    )
    entries: list[dict[str, Any]] = [{momentum: value} for value in momenta]
    for mean, square in moments:
        count = {"step_dev": torch.tensor(3.0)} if of_dion else {} if counts_in_groups else {"step": 3}
        entries.append({first: mean, second: square, **count})  # newer ones of dion count on the device too
    state, numbers = dict(enumerate(entries)), list(range(len(entries)))
    marks = {**MARKS[package], **({"step": 3} if counts_in_groups else {})}
    rest = {**marks, "use_muon": False} if "use_muon" in marks else marks
    groups = [
        {"params": numbers[: len(momenta)], **KELLER_JORDAN, **marks},
        {"params": numbers[len(momenta) :], **ADAMW, **rest},
    ]
    if package == "megatron":  # one state dict for each half, wrapped where weights are half precision
        halves = [{"state": {n: state[n] for n in group["params"]}, "param_groups": [group]} for group in groups]
        return [{"optimizer": halves[0], "grad_scaler": {}}, halves[1]]
    return {"state": state, "param_groups": groups}
