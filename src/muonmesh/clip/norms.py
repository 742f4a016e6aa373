"""Norms: what a call of `Muon.clip_grad_norm_` returns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class GradNorms:
    """Norms of the gradients before clipping, over all shards, every element counted once.

    ``float(norms)`` and ``norms.item()`` are the total, as in loops written for torch's function; reading never
    communicates, so one rank alone may log. On CUDA reading waits for the device.

    Attributes:
        total: 0-d fp64 tensor, norm of all gradients; None if it was not asked for.
        muon: Norm of the gradients of Muon's half, the groups whose rule is scale-invariant; None likewise.
        adamw: Norm of the others': AdamW's, and those of rules that feel the scale of gradients; None likewise.
        skipped: 0-d bool tensor, whether the next ``step`` changes nothing.
        apart: The norms of gradients that the others leave out, by name: `GradientSource.norms_apart`, of what was
            measured.
    """

    total: Tensor | None
    muon: Tensor | None
    adamw: Tensor | None
    skipped: Tensor
    apart: Mapping[str, Tensor] = field(default_factory=dict)

    def item(self) -> float:
        """Return the total norm."""
        return float(self)

    def __float__(self) -> float:
        """Return the total norm; nan if it was not asked for."""
        return math.nan if self.total is None else float(self.total)

    def __format__(self, spec: str) -> str:
        """Return the total norm as text."""
        return format(float(self), spec)
