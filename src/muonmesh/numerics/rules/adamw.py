"""AdamW: what its groups say; torch steps them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from muonmesh.numerics.rules.rule import Hyperparameters


@dataclass(frozen=True, slots=True)
class AdamWRule(Hyperparameters):
    """AdamW (arXiv 1711.05101): ε in its denominator makes it feel the scale of its gradients.

    Attributes:
        betas: Decay rates of the moments.
        eps: ε.
    """

    keys: ClassVar[Mapping[str, str]] = {"betas": "adamw_betas", "eps": "adamw_eps"}

    betas: tuple[float, float]
    eps: float


def step_count(value: float | Tensor) -> Tensor:
    """Return a count of AdamW's steps as torch keeps it: fp32, 0-d, memory of its own; a number goes to the host."""
    if isinstance(value, Tensor):
        return value.detach().to(torch.float32, copy=True).reshape(())
    return torch.tensor(float(value), dtype=torch.float32, device="cpu")
