"""AdamW: what its groups say; torch steps them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

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
