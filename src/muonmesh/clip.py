"""Clipping by norm for an optimizer of two halves, of which only one cares for magnitudes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from muonmesh.comm.exchange import Exchange
from muonmesh.comm.storage import gradient_of, local_of, partial_axes, reduced
from muonmesh.planning import Member

ClipPolicy = Literal["adamw_only", "all", "separate"]

_HALVES = ("muon", "adamw")


@dataclass(frozen=True)
class GradNorms:
    """Norms of the gradients before clipping, over all shards, every element counted once.

    ``float(norms)`` and ``norms.item()`` are the total, as in loops written for torch's function; reading never
    communicates, so one rank alone may log.

    Attributes:
        total: 0-d fp64 tensor, norm of all gradients; None if it was not asked for.
        muon: Norm of the Muon groups' gradients; None likewise.
        adamw: Norm of the AdamW groups' gradients; None likewise.
    """

    total: Tensor | None
    muon: Tensor | None
    adamw: Tensor | None

    def item(self) -> float:
        """Return the total norm."""
        return float(self)

    def __float__(self) -> float:
        """Return the total norm; nan if it was not asked for."""
        return math.nan if self.total is None else float(self.total)


def clip_gradients(
    members: Sequence[Member],
    groups: Sequence[Mapping[str, Any]],
    exchange: Exchange,
    device: torch.device,
    max_norm: float,
    *,
    policy: ClipPolicy,
    norms: bool,
) -> GradNorms:
    """Implement `Muon.clip_grad_norm_`: one pass over the gradients, one all-reduce of one fp64 vector.

    Squares and sums are fp64 and the coefficient is rounded once: with fp32 sums it differs between shardings.
    """
    if not isinstance(max_norm, (int, float)) or isinstance(max_norm, bool) or not max_norm >= 0:
        raise ValueError(f"max_norm: found {max_norm!r}; needed a number of at least 0, or inf to measure only")
    if policy not in ("adamw_only", "all", "separate"):
        raise ValueError(f'policy: found {policy!r}; needed "adamw_only", "all" or "separate"')
    measured = _HALVES if norms or policy != "adamw_only" else ("adamw",)
    present = {half for half in measured if any(group["algorithm"] == half for group in groups)}
    squares = torch.zeros(len(_HALVES), dtype=torch.float64, device=device)
    for member in members:
        half = groups[member.group]["algorithm"]
        gradient = gradient_of(member.name, member.tensor) if half in present else None
        if gradient is None:
            continue
        if any(axes := partial_axes(gradient)):
            gradient = reduced(member.tensor, gradient, axes)
        for part in member.storage.parts(gradient):
            squares[_HALVES.index(half)] += part.double().square().sum() / member.storage.copies
    if present:
        exchange.reduce_sums(squares)
    muon, adamw = squares.sqrt().unbind()
    total = squares.sum().sqrt()
    limits = {"adamw_only": (None, adamw), "all": (total, total), "separate": (muon, adamw)}[policy]
    for group in groups:
        norm = limits[_HALVES.index(group["algorithm"])]
        if norm is not None:
            _scale([parameter.grad for parameter in group["params"]], norm, max_norm)
    whole = set(measured) == set(_HALVES)
    return GradNorms(total if whole else None, muon if whole else None, adamw)


def _scale(gradients: Sequence[Tensor | None], norm: Tensor, max_norm: float) -> None:
    """Multiply gradients by min(1, max_norm / norm), as torch's function does, without a host synchronisation."""
    if norm.device.type == "cpu" and bool(norm <= max_norm):
        return
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        if gradient is not None:
            # Multiplied in fp64 would be slower and round the same: the coefficient has been rounded once.
            local_of(gradient).mul_(coefficient.to(torch.promote_types(gradient.dtype, torch.float32)))
