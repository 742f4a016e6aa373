"""Hyperball, or MuonH: Muon on the sphere of matrices of one norm (Wen et al., arXiv 2606.16899)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from muonmesh.numerics.rules.muon import MuonRule
from muonmesh.numerics.rules.rule import KeptAs
from muonmesh.numerics.scale import StepSize


@dataclass(frozen=True, slots=True)
class HyperballRule(MuonRule):
    """Muon whose weights keep the Frobenius norm that they begin with, one number a matrix beside the momentum.

    With N(X) = X/‖X‖_F and U the orthogonalized direction: ``W ← R·N(W − η·R·N(U))``, where R = ‖W₀‖_F before the first
    step. R is kept: a step so small that it changes the norm by less than the weights' rounding would else let it drift
    for ever.

    η is lr times ``extra_scale_factor``: the length of a step relative to that of the weights. ``scale_mode`` does not
    change a step of given length, and there is no decay, whatever ``weight_decay`` is: both would only change the norm.

    Weights that are all zero have no direction and no norm. They take a plain step of Muon, with its ``scale_mode``,
    and keep the norm that it gives them; the optimizer says so once.
    """

    unsuited_warning: ClassVar[str] = (
        "weights that are all zero, which have no norm to keep under hyperball; it takes a plain Muon step, and keeps "
        "the norm that this step has, however small its learning rate was. Needed: weights with a norm. Initialize "
        'them, or write overrides={{"{name}": "normuon"}}, or another rule that lets weights grow'
    )

    def keeps(self) -> Mapping[str, KeptAs]:
        """Return the momentum and the initial norms."""
        return {"momentum_buffer": "momentum", "initial_norm": "matrix"}

    def summands(
        self, weights: Tensor, update: Tensor, size: float | Tensor, state: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        """Return what adds up to ‖W‖², ⟨W, U⟩ and ‖U‖²."""
        w, u = weights.double(), update.double()
        return w.square(), w * u, u.square()

    def unsuited(self, sums: tuple[Tensor, ...]) -> Tensor:
        """Return whether the weights have no norm."""
        return sums[0] == 0

    def apply_with(
        self,
        weights: Tensor,
        update: Tensor,
        size: float | Tensor,
        state: Mapping[str, Tensor],
        sums: tuple[Tensor, ...],
    ) -> None:
        """Step along the update, and back to the initial norm."""
        ww, wu, uu = sums
        kept = state["initial_norm"]
        radius = torch.where(kept > 0, kept, ww.sqrt())
        # An update of zeros has no direction, and moves nothing.
        step = torch.where(uu == 0, 0.0, self.lr * self.extra_scale_factor * radius / uu.sqrt())
        after = ww - 2 * step * wu + step * step * uu
        # Neither have weights in the centre, before the step or after it.
        plain = ww == 0
        back = torch.where(plain | (after <= 0), 1.0, radius / after.sqrt())
        weights.sub_(update.mul_(torch.where(plain, size, step))).mul_(back)

    def keep(self, state: Mapping[str, Tensor], sums: tuple[Tensor, ...]) -> None:
        """Keep the norm of the weights before their first step; of weights without one, before the next."""
        norm = state["initial_norm"]
        norm.copy_(torch.where(norm > 0, norm, sums[0].sqrt()))

    def step_size(self, rows: int, cols: int) -> StepSize:
        """Return nothing known: the step is as large as the weights are."""
        return StepSize(float("nan"), float("nan"))
