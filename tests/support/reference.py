"""The oracle: Muon and AdamW on whole tensors in fp64, in one process, written from the papers.

Shares no code with the package. Muon: K. Jordan 2024 (https://kellerjordan.github.io/posts/muon/), with the
momentum as an average and decoupled decay (Moonlight, arXiv 2502.16982). AdamW: Loshchilov & Hutter
(arXiv 1711.05101).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

SCALES = {
    "original": lambda rows, cols: math.sqrt(max(1, rows / cols)),
    "shape_scaling": lambda rows, cols: math.sqrt(max(1, rows / cols)),
    "match_rms_adamw": lambda rows, cols: 0.2 * math.sqrt(max(rows, cols)),
    "spectral": lambda rows, cols: math.sqrt(max(rows, cols)),
    "unit_rms_norm": lambda rows, cols: math.sqrt(rows / cols),
    "none": lambda rows, cols: 1.0,
}


def split(x: Tensor, spec: Any) -> list[Tensor]:
    """The matrices (each out × in) that the `matrices` entry `spec` makes of the parameter `x`."""
    entry: Any = (spec,) if isinstance(spec, str) else spec
    kind, *rest = entry
    match kind:
        case "whole" if x.ndim == 2:
            return [x]
        case "flatten":  # (out, ...) -> out × everything else
            return split(x.reshape(x.shape[0], -1), rest[0] if rest else "whole")
        case "rows" | "cols" if sum(rest) == x.shape[kind == "cols"]:
            return list(x.split(rest, dim=int(kind == "cols")))
        case "heads":  # n equal blocks of the axis
            n, dim = rest
            assert x.shape[dim] % n == 0
            return list(x.split(x.shape[dim] // n, dim=dim))
        case "interleaved":  # k matrices take turns along the axis, in runs of `block` or of the lengths given for k
            runs, dim, block = (*rest, 1)[:3]
            runs = [block] * runs if isinstance(runs, int) else list(runs)
            assert x.shape[dim] % sum(runs) == 0
            turns = x.unflatten(dim, (-1, sum(runs)))
            return [part.flatten(dim, dim + 1) for part in turns.split(runs, dim=dim + 1)]
        case "transposed":  # stored in × out
            return split(x.mT, rest[0] if rest else "whole")
        case "stack":  # leading dims are a batch
            inner = rest[0] if rest else "whole"
            return [m for y in x.reshape(-1, *x.shape[-2:]) for m in split(y, inner)]
    raise AssertionError(f"{spec!r} does not fit shape {tuple(x.shape)}")


def polar(x: Tensor, coefficients: list[tuple[float, ...]]) -> Tensor:
    """The odd polynomials a·σ + b·σ³ + c·σ⁵ + …, one tuple a step, on the singular values of x / ‖x‖_F."""
    norm = torch.linalg.matrix_norm(x)
    if norm == 0:
        return torch.zeros_like(x)
    u, s, vh = torch.linalg.svd(x / norm, full_matrices=False)
    for step in coefficients:
        s = sum(c * s ** (2 * i + 1) for i, c in enumerate(step))
    return (u * s) @ vh


def muon(
    p: Tensor,
    g: Tensor | None,
    state: dict[str, Tensor],
    *,
    lr: float,
    coefficients: list[tuple[float, ...]],
    matrices: Any = None,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.1,
    scale_mode: str = "match_rms_adamw",
    extra_scale_factor: float = 1.0,
    cautious: bool = False,
    normuon: dict[str, Any] | None = None,
    adamuon: dict[str, Any] | None = None,
    hyperball: bool = False,
    muoneq: str | None = None,
    muon_plus: str | None = None,
    dynmuon: float | None = None,
    scion: tuple[str, str] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """One Muon step of one parameter. A matrix without a non-zero gradient keeps weights and momentum.

    `cautious` decays only where update and weight agree in sign: x ← x − η(u + λ·1[u·x ≥ 0]·x) (arXiv 2510.12402).
    `normuon` is {"beta2", "eps", "longer"} for NorMuon (arXiv 2510.05491, as its authors' code rescales).
    `adamuon` is {"beta2", "eps"} for AdaMuon (arXiv 2507.11005, algorithm 1), whose update has an RMS of 0.2 · lr.
    `hyperball` is MuonH (arXiv 2606.16899): W ← R·N(W − η·R·N(U)); a plain step where W is zero.
    `muoneq` is "rows", "cols" or "both" (arXiv 2603.28254, R, C and RC). `muon_plus` is "row" and "col" joined by "_"
    (arXiv 2602.21545), scaled back to ‖O‖_F = √min(m, n). `dynmuon` is p of U·Σᵖ·Vᵀ (arXiv 2605.17109), by the authors'
    series of second order in Σ²/‖M‖² − 1 and of the momentum that sums gradients. `scion` is ("sign" or "rows", "head"
    or "embedding") for the other layers of Scion (arXiv 2502.07529), whose update has Scion's norm 1.
    """
    spec = matrices if matrices is not None else {2: "whole", 3: "stack"}[p.ndim]
    p, m = p.clone(), state.get("momentum", torch.zeros_like(p)).clone()
    if g is None:
        return p, state
    moments = [m.clone() for m in state.get("moments", [])]  # of NorMuon, for each matrix
    second = state.get("second", torch.zeros_like(p)).clone()  # of AdaMuon
    radii = list(state.get("radii", []))  # of Hyperball, for each matrix
    for number, at in enumerate(split(torch.arange(p.numel()).reshape(p.shape), spec)):  # flat indices of one matrix
        if normuon is not None and len(moments) <= number:
            tall = not normuon["longer"] or at.shape[0] >= at.shape[1]
            moments.append(p.new_zeros((at.shape[0], 1) if tall else (1, at.shape[1])))
        grad, w, buf = g.flatten()[at], p.view(-1), m.view(-1)
        if grad.count_nonzero() == 0:
            continue
        buf[at] = momentum * buf[at] + (1 - momentum) * grad
        direction = (1 - momentum) * grad + momentum * buf[at] if nesterov else buf[at]
        scale = SCALES[scale_mode](*at.shape) * extra_scale_factor
        if len(radii) <= number:
            radii.append(torch.tensor(0.0, dtype=torch.float64))
        if muoneq is not None:
            rows, cols = direction.norm(dim=1, keepdim=True), direction.norm(dim=0, keepdim=True)
            direction = direction / (1.0 if muoneq == "cols" else rows) / (1.0 if muoneq == "rows" else cols)
        update = polar(direction if adamuon is None else direction.sign(), coefficients)
        if dynmuon is not None:
            u, s, _ = torch.linalg.svd(direction, full_matrices=False)
            away, power = (s / s.norm()) ** 2 - 1, dynmuon / 2
            series = 1 + power * away + power * (power - 1) / 2 * away**2
            update = (u * series) @ u.T @ update * (s.norm() / (1 - momentum)) ** dynmuon
        if muon_plus is not None:
            for side in muon_plus.split("_"):
                update = update / update.norm(dim=1 if side == "row" else 0, keepdim=True)
            update = update * math.sqrt(min(update.shape)) / update.norm()
        if scion is not None:
            kind, layer = scion
            update = direction.sign() if kind == "sign" else direction / direction.norm(dim=1, keepdim=True)
            n = at.shape[1]
            norms = {"sign": {"head": 1 / n, "embedding": 1.0}, "rows": {"head": n**-0.5, "embedding": n**0.5}}
            scale = norms[kind][layer] * extra_scale_factor
        if normuon is not None:
            mean = (update**2).mean(dim=1 if moments[number].shape[1] == 1 else 0, keepdim=True)
            moments[number] = normuon["beta2"] * moments[number] + (1 - normuon["beta2"]) * mean
            even = update / (moments[number].sqrt() + normuon["eps"])
            update = even * (update.norm() / even.norm())
        if adamuon is not None:
            second.view(-1)[at] = adamuon["beta2"] * second.view(-1)[at] + (1 - adamuon["beta2"]) * update**2
            even = update / (second.view(-1)[at].sqrt() + adamuon["eps"])
            update, scale = even * (math.sqrt(even.numel()) / even.norm()), 0.2
        if hyperball and w[at].norm() > 0:
            radii[number] = radii[number] if radii[number] > 0 else w[at].norm()
            moved = w[at] - lr * extra_scale_factor * radii[number] * update / update.norm()
            w[at] = radii[number] * moved / moved.norm()
            continue
        decays = (update * w[at] >= 0).double() if cautious else 1.0
        w[at] = w[at] * (1 - lr * weight_decay * decays) - lr * scale * update
    new_state = {"momentum": m, "second": second, "radii": radii}
    return p, new_state | ({"moments": moments} if normuon is not None else {})


def adamw(
    p: Tensor,
    g: Tensor | None,
    state: dict[str, Tensor],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    cautious: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """One AdamW step of one parameter; without a gradient nothing happens."""
    if g is None:
        return p.clone(), state
    zero = torch.zeros_like(p)
    step = state.get("step", torch.zeros((), dtype=torch.float64)) + 1
    m = betas[0] * state.get("exp_avg", zero) + (1 - betas[0]) * g
    v = betas[1] * state.get("exp_avg_sq", zero) + (1 - betas[1]) * g * g
    update = (m / (1 - betas[0] ** step)) / ((v / (1 - betas[1] ** step)).sqrt() + eps)
    decays = (update * p >= 0).double() if cautious else 1.0
    return p * (1 - lr * weight_decay * decays) - lr * update, {"step": step, "exp_avg": m, "exp_avg_sq": v}


def reference_step(
    params: dict[str, Tensor],
    grads: dict[str, Tensor | None],
    state: dict[str, dict[str, Tensor]],
    settings: dict[str, dict[str, Any]],
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """One optimizer step on dicts keyed by parameter name; returns new params and state, writes nothing.

    `settings[name]` holds "algorithm" ("muon" | "adamw") and the keyword arguments of that function. Start
    with state = {}. Everything is computed in fp64, whatever the dtypes given.
    """
    update = {"muon": muon, "adamw": adamw}
    results = {}
    for name, p in params.items():
        options = dict(settings[name])
        step, g = update[options.pop("algorithm")], grads.get(name)
        results[name] = step(p.double(), None if g is None else g.double(), state.get(name, {}), **options)
    return {name: r[0] for name, r in results.items()}, {name: r[1] for name, r in results.items()}
