"""Rules: what one step does to momentum and weights, element by element.

Everything here is elementwise, so a rank computes it for what it stores and gets the bits one process gets.
Only operations whose vector tails round as their vector bodies do are used: ``lerp``, ``mul``, ``sub``, casts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from muonmesh.numerics.coefficients import Coefficients
from muonmesh.numerics.kernels.memory import scratch
from muonmesh.numerics.newton_schulz import Method
from muonmesh.numerics.scale import ScaleMode

_CACHED = 1 << 19
"""Elements a CPU works on at a time, so that the operations of one rule find them in its cache. With fewer, threads
wait for each other's turn to call the next operation: at 1 << 16 two take 2.7 times as long [measured]."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A param group's hyperparameters, snapshotted for one step.

    Attributes:
        scale_invariant: Whether the update stays the same when all gradients are multiplied by one number. Then
            clipping them by their norm makes no step smaller. The gradients of a rule without this are always clipped.
        lr: Learning rate, a number or a 0-d tensor.
        weight_decay: Decoupled: ``p ← p·(1 − lr·weight_decay)``.
    """

    scale_invariant: ClassVar[bool] = False

    lr: float | Tensor
    weight_decay: float

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Rule:
        """Snapshot a group."""
        return cls(_rate(group), group["weight_decay"])


def _rate(group: Mapping[str, Any]) -> float | Tensor:
    """The learning rate; a tensor without dims, for one with a dim would have weights computed in its own dtype."""
    lr: float | Tensor = group["lr"]
    return lr.reshape(()) if isinstance(lr, Tensor) else lr


@dataclass(frozen=True, slots=True)
class AdamWRule(Rule):
    """AdamW (arXiv 1711.05101): ε in its denominator makes it feel the scale of its gradients.

    Attributes:
        betas: Decay rates of the moments.
        eps: ε.
    """

    betas: tuple[float, float]
    eps: float

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> AdamWRule:
        """Snapshot a group."""
        beta1, beta2 = group["adamw_betas"]
        return cls(_rate(group), group["weight_decay"], (beta1, beta2), group["adamw_eps"])


@dataclass(frozen=True, slots=True)
class MuonRule(Rule):
    """Momentum, orthogonalised.

    Attributes:
        lr: Learning rate; times the update scale it is the spectral norm of one step.
        momentum: μ of the running mean ``m ← lerp(m, g, 1 − μ)``.
        nesterov: Whether the direction is ``lerp(g, m, μ)`` rather than ``m``.
        scale_mode: See `update_scale`.
        extra_scale_factor: Multiplies the scale.
        coefficients: Coefficient set, see `orthogonalize`.
        steps: Newton–Schulz steps.
        method: See `orthogonalize`.
    """

    scale_invariant: ClassVar[bool] = True

    momentum: float
    nesterov: bool
    scale_mode: ScaleMode
    extra_scale_factor: float
    coefficients: Coefficients
    steps: int
    method: Method

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> MuonRule:
        """Snapshot a group."""
        return cls(
            lr=_rate(group),
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            nesterov=group["nesterov"],
            scale_mode=group["scale_mode"],
            extra_scale_factor=group["extra_scale_factor"],
            coefficients=group["ns_coefficients"],
            steps=group["ns_steps"],
            method=group["ns_method"],
        )


RULES: dict[str, type[Rule]] = {"muon": MuonRule, "adamw": AdamWRule}
"""The rule of each ``algorithm`` of a group."""


def update_momentum(
    momentum: Tensor, gradient: Tensor, rule: MuonRule, *, active: Tensor | None = None, into: Tensor | None = None
) -> None:
    """Fold a gradient into the momentum in place: ``m ← lerp(m, g, 1 − μ)``, denormals flushed to zero.

    Args:
        momentum: Any shape, written.
        gradient: Same shape, any real dtype, read only.
        rule: Gives μ.
        active: 0-d bool tensor; where it is false nothing changes. None means true.
        into: If given, the direction is written there too, as `write_direction` does.
    """
    # Denormal momentum costs a hundred times the time of a normal one on CPUs and carries no direction.
    info = torch.finfo(momentum.dtype)
    denormal = info.tiny * (1 - info.eps)
    flat = None if into is None else _flat(into)
    for m, g, *out in _in_cache(momentum, gradient, *(() if flat is None else (flat,))):
        fresh = m if active is None else m.clone()
        fresh.lerp_(g.to(m.dtype), 1 - rule.momentum)
        torch.ops.aten.hardshrink.out(fresh, denormal, out=fresh)
        if active is not None:
            m.copy_(torch.where(active, fresh, m))
        if out:
            _direction(m, g, rule, out[0])
    if into is not None and flat is not None:
        _unflatten(flat, into)


def write_direction(momentum: Tensor, gradient: Tensor, rule: MuonRule, into: Tensor) -> None:
    """Write the direction, which is orthogonalised later: ``lerp(g, m, μ)`` with Nesterov, else the momentum.

    Args:
        momentum: Any shape, read only.
        gradient: Same shape, any real dtype, read only.
        rule: Gives μ.
        into: Same shape, any real dtype and strides, written; rounded to from the momentum's dtype.
    """
    flat = _flat(into)
    for m, g, out in _in_cache(momentum, gradient, flat):
        _direction(m, g, rule, out)
    _unflatten(flat, into)


def _direction(m: Tensor, g: Tensor, rule: MuonRule, out: Tensor) -> None:
    if not rule.nesterov:
        out.copy_(m)
        return
    direction = _spare(g, m.dtype)
    same = g if g.dtype == m.dtype else direction.copy_(g)
    out.copy_(torch.lerp(same, m, rule.momentum, out=direction))


def _flat(into: Tensor) -> Tensor:
    """Return contiguous memory to write first: torch transposes fast only within one dtype, so cast before."""
    if into.is_contiguous():
        return into
    return scratch("direction", into.shape, dtype=into.dtype, device=into.device)


def _unflatten(flat: Tensor, into: Tensor) -> None:
    if flat is into:
        return
    if into.ndim == 2:  # torch transposes fast only into contiguous memory
        into, flat = into.mT, flat.mT
    into.copy_(flat)


def apply_update(
    parameter: Tensor, update: Tensor, rule: MuonRule, *, scale: float, active: Tensor | None = None
) -> None:
    """Write ``p ← p·(1 − lr·wd) − lr·scale·u`` in place, computed in fp32 or wider and rounded once.

    Args:
        parameter: Any shape, written.
        update: Same shape, any real dtype, read only.
        rule: Gives learning rate and decay.
        scale: Update scale of the *whole* matrix that the update is a part of.
        active: 0-d bool tensor; where it is false nothing changes. None means true.
    """
    keep, factor = 1 - rule.lr * rule.weight_decay, rule.lr * scale
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    for p, u in _in_cache(parameter, update):
        step = _spare(u, dtype).copy_(u).mul_(factor)
        fresh = p if active is None and p.dtype == dtype else p.to(dtype, copy=True)
        if rule.weight_decay:
            fresh.mul_(keep)
        fresh.sub_(step)
        if active is not None:
            p.copy_(torch.where(active, fresh.to(p.dtype), p))
        elif fresh is not p:
            p.copy_(fresh)


def _spare(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return uninitialised memory of a tensor's shape; if small, the thread's own, so that it costs no page faults."""
    if like.numel() > _CACHED:
        return torch.empty_like(like, dtype=dtype)
    return scratch("rule", like.shape, dtype=dtype, device=like.device)


def _in_cache(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tensors in cache-sized parts on a CPU, where memory is the limit, and whole elsewhere."""
    first = tensors[0]
    if first.device.type != "cpu" or first.numel() <= _CACHED or not all(t.is_contiguous() for t in tensors):
        yield tensors
    else:
        yield from zip(*(torch.split(t.view(-1), _CACHED) for t in tensors), strict=True)
