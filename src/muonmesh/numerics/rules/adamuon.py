"""AdaMuon: Muon with a second moment for each element of the orthogonalized update (Si et al., arXiv 2507.11005)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from muonmesh.numerics.rules.muon import MuonRule
from muonmesh.numerics.rules.rule import KeptAs, State
from muonmesh.numerics.setting import fraction, not_negative, rule_field


@dataclass(frozen=True, slots=True)
class AdaMuonRule(MuonRule):
    """The rule "adamuon": Muon of the momentum's signs, with a second moment for each element as further state.

    O are the orthogonalized signs, and v has one number for each element: ``v ← β₂ v + (1 − β₂)·O²``, without bias
    correction. ``Ô = O / (√v + ε)`` is scaled by one number so that its Frobenius norm over the whole m × n matrix is
    √min(m, n), as for an orthogonal matrix. Then Muon's scale is applied; with "match_rms_adamw" the step has RMS
    0.2·lr, as in the paper.

    ``nesterov`` works as in Muon; the paper takes the signs of the momentum itself (``nesterov=False``).

    Attributes:
        beta2: β₂, in the paper the same number as the momentum; the key of a group is ``adamuon_beta2``.
        eps: ε, ``adamuon_eps``.
    """

    never_negative: ClassVar[tuple[str, ...]] = ("second_moment",)

    beta2: float = rule_field("adamuon_beta2", fraction(0.95))
    eps: float = rule_field("adamuon_eps", not_negative(1e-8))

    def keeps(self) -> Mapping[str, KeptAs]:
        """Return the momentum and the second moments."""
        return {"momentum_buffer": "momentum", "second_moment": "weights"}

    def direction(self, gradient: Tensor, state: State) -> Tensor:
        """Return the signs of Muon's direction; NaN for elements that are not finite, which a sign would hide."""
        direction = MuonRule.direction(self, gradient, state)
        return torch.where(direction.isfinite(), direction.sign(), torch.nan)

    def scale(self, rows: int, cols: int) -> float:
        """Return Muon's scale times √min(rows, cols), the norm of an orthogonal matrix; `apply` divides by Ô's."""
        return MuonRule.scale(self, rows, cols) * math.sqrt(min(rows, cols))

    def summands(self, weights: Tensor, update: Tensor, size: float | Tensor, state: State) -> tuple[Tensor, ...]:
        """Return the squares of Ô."""
        _, paced = self._paced(update, state)
        return (paced.double().square(),)

    def apply(
        self, weights: Tensor, update: Tensor, size: float | Tensor, state: State, sums: tuple[Tensor, ...] = ()
    ) -> None:
        """Decay and update weights by Ô over its Frobenius norm, and keep v."""
        second, paced = self._paced(update, state)
        state["second_moment"].copy_(second)
        update.copy_(paced)
        (squares,) = sums
        # A matrix of zeros stays zero.
        MuonRule.apply(self, weights, update, size * torch.where(squares == 0, 0.0, 1 / squares.sqrt()), state)

    def _paced(self, update: Tensor, state: State) -> tuple[Tensor, Tensor]:
        """Return the new v and Ô, in the update's dtype."""
        stored = state["second_moment"]
        second = stored.to(torch.promote_types(stored.dtype, update.dtype))
        second = second.lerp(update.to(second.dtype).square(), 1 - self.beta2)
        return second, update / (second.sqrt() + self.eps).to(update.dtype)
