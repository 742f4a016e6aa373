"""Scion's RowNorm: normalizes each row, for a head or an embedding (Pethick et al., arXiv 2502.07529)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from muonmesh.numerics.rules.even import unit
from muonmesh.numerics.rules.rule import State
from muonmesh.numerics.rules.scion import ScionRule


@dataclass(frozen=True, slots=True)
class ScionRowNormRule(ScionRule):
    """The rule "scion_row_norm": each row of the momentum, which belongs to one token, is divided by its norm.

    With "unit_rms_norm", a row of a head has the norm 1/√cols, so that its largest output is 1 (the authors' RowNorm).
    A row of an embedding has an RMS of 1 (their ColNorm of the transposed weight, as torch stores it). A row of zeros,
    as for a token without a gradient so far, stays zero. There is no ε.
    """

    def whole(self, update: Tensor, state: State) -> Tensor:
        """Return the matrices with rows of norm 1."""
        return unit(update, -1)

    def sizes(self, cols: int) -> tuple[float, float, float]:
        """Return the RMS of rows of norm 1, 1/√cols for a head, and √cols for an embedding."""
        return 1 / math.sqrt(cols), 1 / math.sqrt(cols), math.sqrt(cols)
