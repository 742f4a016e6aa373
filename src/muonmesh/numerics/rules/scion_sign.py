"""Scion's Sign: the signs of the momentum, for a head or an embedding (Pethick et al., arXiv 2502.07529)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from muonmesh.numerics.rules.muon import MuonRule
from muonmesh.numerics.rules.scion import ScionRule


@dataclass(frozen=True, slots=True)
class ScionSignRule(ScionRule):
    """The signs of the momentum, the paper's recommendation for the last layer, and for one tied to the first.

    With "unit_rms_norm" they are divided by the number of columns of a head, whose largest output then is 1, and are
    taken as they are for an embedding, whose rows then have an RMS of 1.
    """

    def direction(self, gradient: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """Return the signs of Muon's direction; NaN where that is not finite, of which the sign would not tell."""
        direction = MuonRule.direction(self, gradient, state)
        return torch.where(direction.isfinite(), direction.sign(), torch.nan)

    def rms(self, rows: int, cols: int) -> float:
        """Return 1, the RMS of signs."""
        return 1.0

    def own(self, rows: int, cols: int) -> float:
        """Return 1 over the columns of a head, and 1 for an embedding."""
        return 1 / cols if self.layer == "head" else 1.0
