"""Muon+: Muon with rows or columns of the orthogonalized update normalized (Zhang et al., arXiv 2602.21545)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

from muonmesh.numerics.rules.even import frobenius, over, unit
from muonmesh.numerics.rules.muon import MuonRule
from muonmesh.numerics.rules.rule import State
from muonmesh.numerics.setting import choice, rule_field

MuonPlusSides: TypeAlias = Literal["row", "col", "row_col", "col_row"]
"""The sides that Muon+ normalizes, in this order; the names are those of the authors' code."""


@dataclass(frozen=True, slots=True)
class MuonPlusRule(MuonRule):
    """The rule "muon_plus": Muon that normalizes rows or columns of the orthogonalized direction. Its state is Muon's.

    For "col_row", each column of the m × n result is divided by its norm, and then each row by its norm. The matrix is
    then scaled to the Frobenius norm √min(m, n) of an orthogonal matrix, and Muon's scale is applied. The authors leave
    out the scaling to √min(m, n). So their learning rates correspond to rates √(m/min(m, n)) times as large here for
    rows, and √(n/min(m, n)) times for columns. A row of zeros stays zero; there is no ε.

    Attributes:
        sides: The sides to normalize; the key of a group is ``muon_plus_sides``.
    """

    sides: MuonPlusSides = rule_field("muon_plus_sides", choice("col_row", MuonPlusSides))

    def whole(self, update: Tensor, state: State) -> Tensor:
        """Return the normalized matrices, with Frobenius norm √min(rows, cols)."""
        for side in self.sides.split("_"):
            update = unit(update, -1 if side == "row" else -2)
        return over(update, frobenius(update)).mul_(math.sqrt(min(update.shape[-2:])))
