"""Scion's Sign: the signs of the momentum, for a head or an embedding (Pethick et al., arXiv 2502.07529)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from muonmesh.numerics.rules.muon import MuonRule
from muonmesh.numerics.rules.rule import State
from muonmesh.numerics.rules.scion import ScionRule


@dataclass(frozen=True, slots=True)
class ScionSignRule(ScionRule):
    """The rule "scion_sign": the signs of the momentum, as the paper recommends for the last layer, even if it is tied.

    With "unit_rms_norm", the signs are divided by the number of columns of a head, so that its largest output is 1. For
    an embedding they are not divided, so that its rows have an RMS of 1.
    """

    def direction(self, gradient: Tensor, state: State) -> Tensor:
        """Return the signs of Muon's direction; NaN for elements that are not finite, which a sign would hide."""
        direction = MuonRule.direction(self, gradient, state)
        return torch.where(direction.isfinite(), direction.sign(), torch.nan)

    def sizes(self, cols: int) -> tuple[float, float, float]:
        """Return 1, the RMS of signs, 1/cols for a head, and 1 for an embedding."""
        return 1.0, 1 / cols, 1.0
