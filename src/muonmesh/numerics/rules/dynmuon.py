"""DynMuon: Muon with a power of the momentum's singular values in the update (Wu et al., arXiv 2605.17109)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from muonmesh.numerics.rules.even import frobenius, over
from muonmesh.numerics.rules.muon import MuonRule
from muonmesh.numerics.rules.rule import State
from muonmesh.numerics.scale import StepSize
from muonmesh.numerics.setting import number, rule_field


@dataclass(frozen=True, slots=True)
class DynMuonRule(MuonRule):
    """The rule "dynmuon": the update is about U·Σᵖ·Vᵀ for a momentum UΣVᵀ. The only state is the momentum.

    With X = M/‖M‖_F, E = X·Xᵀ − I and δ = p/2, the orthogonalized M is multiplied by
    ``I + δ·E + ½·δ·(δ − 1)·E²``, the Taylor series of (X·Xᵀ)^δ, and by sᵖ. s is the norm of the momentum that sums
    gradients, ‖M‖_F/(1 − μ), since the authors sum and Muon here averages. X·Xᵀ is that of the shorter side.

    The authors let p fall to −0.25 early in training: see `power_at`. Because of sᵖ, the step depends on the scale of
    gradients: for p = −0.25, gradients that are 16 times larger halve the step.

    From KellerJordan/modded-nanogpt at f411b3d3, records/track_3_optimization/results/20260519_dynmuon/
    train_gpt_simple_dynmuon.py: the update lines 226 to 275, momentum 278 to 290, p 468 to 473. Their ε of 1e-7, added
    to the norm, is left out.

    Attributes:
        power: p, ``dynmuon_power``; 0 is Muon.
    """

    scale_invariant: ClassVar[bool] = False
    sees_direction: ClassVar[bool] = True

    power: float = rule_field("dynmuon_power", number(-0.25, lambda value: -1 <= value <= 1, "a number from -1 to 1"))

    def whole(self, update: Tensor, state: State) -> Tensor:
        """Return the orthogonalized matrices times the power of the singular values of their directions."""
        x = state["direction"]
        largest = x.abs().amax((-2, -1), keepdim=True)
        x = over(x, largest)  # so that no square vanishes
        norm = frobenius(x)
        x = over(x, norm)
        tall, half = x.shape[-2] > x.shape[-1], self.power / 2
        gram = x.mT @ x if tall else x @ x.mT
        eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        gram.sub_(eye)
        series = eye.add(gram, alpha=half).add(gram @ gram, alpha=half * (half - 1) / 2)
        size = norm * largest / (1 - self.momentum)
        shaped = update @ series if tall else series @ update
        return shaped * torch.where(size == 0, 1.0, size).pow(self.power)

    def flops(self, rows: int, cols: int) -> int:
        """Return the operations of two products with the matrix and of the square of a Gram matrix."""
        m, n = min(rows, cols), max(rows, cols)
        return 4 * m * m * n + 2 * m**3

    def step_size(self, rows: int, cols: int) -> StepSize:
        """Return NaN, because the step depends on the size of the gradients."""
        return StepSize(float("nan"), float("nan"))


def power_at(
    progress: float, *, first: float = 0.25, last: float = -0.25, middle: float = 0.04, width: float = 0.04
) -> float:
    """Return DynMuon's p, which falls from ``first`` to ``last`` along a sigmoid.

    Args:
        progress: The fraction of all steps that have been taken, 0 to 1.
        first: The value of p at the beginning.
        last: The value of p at the end.
        middle: The progress at which p is in the middle between the two.
        width: The width of the sigmoid: within this progress, p moves about a quarter of the way from the middle.
    """
    return last + (first - last) / (1 + math.exp((progress - middle) / width))
