"""Muon: momentum, orthogonalized (K. Jordan et al. 2024, https://kellerjordan.github.io/posts/muon)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from muonmesh.numerics.rules.parts import spare
from muonmesh.numerics.rules.rule import KeptAs, Rule, State


@cache
def _largest_denormal(dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    return info.tiny * (1 - info.eps)


@dataclass(frozen=True, slots=True)
class MuonRule(Rule):
    """The rule "muon", which orthogonalizes the momentum.

    Attributes:
        lr: Learning rate; times the update scale it is the spectral norm of one step.
        momentum: μ of the running mean ``m ← lerp(m, g, 1 − μ)``.
        nesterov: Whether the direction is ``lerp(g, m, μ)`` rather than ``m``.
    """

    scale_invariant: ClassVar[bool] = True

    momentum: float
    nesterov: bool

    def keeps(self) -> Mapping[str, KeptAs]:
        """Return the state of the rule: the momentum."""
        return {"momentum_buffer": "momentum"}

    def fold(self, gradient: Tensor, state: State) -> None:
        """Fold a gradient into the momentum: ``m ← lerp(m, g, 1 − μ)``, denormals flushed to zero."""
        momentum = state["momentum_buffer"]
        same = gradient if gradient.dtype == momentum.dtype else gradient.to(momentum.dtype)
        momentum.lerp_(same, 1 - self.momentum)
        # Denormal momentum costs a hundred times the time of a normal one on CPUs and carries no direction.
        torch.hardshrink(momentum, _largest_denormal(momentum.dtype), out=momentum)

    def direction(self, gradient: Tensor, state: State) -> Tensor:
        """Return ``lerp(g, m, μ)`` with Nesterov, else the momentum."""
        momentum = state["momentum_buffer"]
        if not self.nesterov:
            return momentum
        into = spare(gradient, momentum.dtype)
        same = gradient if gradient.dtype == momentum.dtype else into.copy_(gradient)
        return torch.lerp(same, momentum, self.momentum, out=into)
