"""Hyperball, or MuonH: Muon for weights of constant Frobenius norm (Wen et al., arXiv 2606.16899)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from muonmesh.numerics.rules.muon import MuonRule
from muonmesh.numerics.rules.rule import KeptAs, State
from muonmesh.numerics.scale import StepSize


@dataclass(frozen=True, slots=True)
class HyperballRule(MuonRule):
    """The rule "hyperball": Muon whose weights keep their initial Frobenius norm.

    The state is the momentum and one number for each matrix. With N(X) = X/‖X‖_F and U the orthogonalized direction:
    ``W ← R·N(W − η·R·N(U))``, where R = ‖W₀‖_F before the first step. R is stored, because otherwise the norm would
    drift forever if steps change it by less than the weights' rounding.

    η is lr times ``extra_scale_factor``: the length of a step relative to the norm of the weights. ``scale_mode`` does
    not change a step of given length, and ``weight_decay`` has no effect, because both would only change the norm.

    Weights that are all zero have no direction and no norm. They take a plain step of Muon with its ``scale_mode``, and
    keep the norm that this step gives them. The optimizer warns of them once.
    """

    unsuited_warning: ClassVar[str] = (
        "weights that are all zero, which have no norm to keep under hyperball; it takes a plain Muon step, and keeps "
        "the norm that this step has, however small its learning rate was. Needed: weights with a norm. Initialize "
        'them, or write overrides={{"{name}": "normuon"}}, or another rule that lets weights grow'
    )

    def keeps(self) -> Mapping[str, KeptAs]:
        """Return the momentum and the initial norms."""
        return {"momentum_buffer": "momentum", "initial_norm": "matrix"}

    def summands(self, weights: Tensor, update: Tensor, size: float | Tensor, state: State) -> tuple[Tensor, ...]:
        """Return the summands of ‖W‖², ⟨W, U⟩ and ‖U‖²."""
        w, u = weights.double(), update.double()
        return w.square(), w * u, u.square()

    def unsuited(self, sums: tuple[Tensor, ...]) -> Tensor:
        """Return whether the weights are all zero and so have no norm."""
        return sums[0] == 0

    def apply(
        self, weights: Tensor, update: Tensor, size: float | Tensor, state: State, sums: tuple[Tensor, ...] = ()
    ) -> None:
        """Step along the update, and scale the weights back to their initial norm."""
        ww, wu, uu = sums
        initial = state["initial_norm"]
        radius = torch.where(initial > 0, initial, ww.sqrt())
        # An update of zeros has no direction, so it changes nothing.
        step = torch.where(uu == 0, 0.0, self.lr * self.extra_scale_factor * radius / uu.sqrt())
        after = ww - 2 * step * wu + step * step * uu
        # Weights of zeros, before or after the step, have no direction either.
        plain = ww == 0
        back = torch.where(plain | (after <= 0), 1.0, radius / after.sqrt())
        weights.sub_(update.mul_(torch.where(plain, size, step))).mul_(back)

    def keep(self, state: State, sums: tuple[Tensor, ...]) -> None:
        """Store the norm of the weights before their first step; for weights of zeros, before a later step."""
        norm = state["initial_norm"]
        norm.copy_(torch.where(norm > 0, norm, sums[0].sqrt()))

    def step_size(self, rows: int, cols: int) -> StepSize:
        """Return NaN, because the size of the step depends on the size of the weights."""
        return StepSize(float("nan"), float("nan"))
