"""MuonEq: Muon of directions whose rows have been brought to one norm (Chang et al., arXiv 2603.28254)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

from muonmesh.numerics.rules.even import norm, over, unit
from muonmesh.numerics.rules.muon import MuonRule
from muonmesh.numerics.setting import choice, rule_field

MuonEqSides: TypeAlias = Literal["rows", "cols", "both"]
"""What MuonEq brings to one norm: the paper's R, its default; C; and RC, by the norms of both before the change."""


@dataclass(frozen=True, slots=True)
class MuonEqRule(MuonRule):
    """Muon that equilibrates the direction before it is orthogonalized; it keeps nothing but the momentum.

    With X the m × n direction and D the diagonal matrix of its rows' norms, ``D⁻¹·X·‖X‖_F/√m`` is orthogonalized, whose
    rows all have the norm that they had on average. As orthogonalizing does not see the scale of a matrix, the factor
    ‖X‖_F/√m is left out. For "both", ``D⁻¹·X·C⁻¹`` with the norms C of the columns of X. A row of zeros stays one, and
    there is no ε, which would swallow small gradients.

    Attributes:
        sides: What is brought to one norm, ``muoneq_sides``.
    """

    sides: MuonEqSides = rule_field("muoneq_sides", choice("rows", MuonEqSides))

    def balance(self, direction: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """Return the directions with their rows, or columns, of norm 1."""
        if self.sides != "both":
            return unit(direction, -1 if self.sides == "rows" else -2)
        scaled = over(direction, direction.abs().amax((-2, -1), keepdim=True))
        return over(unit(scaled, -1), norm(scaled, -2))
