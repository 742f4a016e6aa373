"""Muon+: Muon whose orthogonalized rows and columns are brought to one norm (Zhang et al., arXiv 2602.21545)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

from muonmesh.numerics.rules.even import frobenius, over, unit
from muonmesh.numerics.rules.muon import MuonRule
from muonmesh.numerics.setting import choice, rule_field

MuonPlusSides: TypeAlias = Literal["row", "col", "row_col", "col_row"]
"""What Muon+ brings to one norm, in this order: the names of the authors' code."""


@dataclass(frozen=True, slots=True)
class MuonPlusRule(MuonRule):
    """Muon that evens out the orthogonalized direction; it keeps nothing but the momentum.

    With O the m × n result: each column is divided by its norm, then each row by its own ("col_row"), and the whole is
    scaled to the Frobenius norm √min(m, n) of an orthogonal matrix. After that comes Muon's scale. The authors leave
    out this last scaling, so their rates hold √(m/min(m, n)) times as much for rows, √(n/min(m, n)) for columns. A row
    of zeros stays one; there is no ε.

    Attributes:
        sides: What is evened out, ``muon_plus_sides``.
    """

    sides: MuonPlusSides = rule_field("muon_plus_sides", choice("col_row", MuonPlusSides))

    def whole(self, update: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """Return the matrices evened out, of Frobenius norm √min(rows, cols)."""
        for side in self.sides.split("_"):
            update = unit(update, -1 if side == "row" else -2)
        return over(update, frobenius(update)).mul_(math.sqrt(min(update.shape[-2:])))
