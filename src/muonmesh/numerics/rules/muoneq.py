"""MuonEq: Muon that normalizes rows or columns before the orthogonalization (Chang et al., arXiv 2603.28254)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

from muonmesh.numerics.rules.even import norm, over, unit
from muonmesh.numerics.rules.muon import MuonRule
from muonmesh.numerics.rules.rule import State
from muonmesh.numerics.setting import choice, rule_field

MuonEqSides: TypeAlias = Literal["rows", "cols", "both"]
"""The sides that MuonEq normalizes: the paper's R (the default), C, and RC (both, by their norms before the change)."""


@dataclass(frozen=True, slots=True)
class MuonEqRule(MuonRule):
    """The rule "muoneq": Muon that normalizes rows or columns of the direction before the orthogonalization.

    The only state is the momentum. With X the m × n direction and D the diagonal matrix of its rows' norms,
    ``D⁻¹·X·‖X‖_F/√m`` is orthogonalized: all rows get the same norm, the root mean square of their norms. The factor
    ‖X‖_F/√m is left out, because orthogonalization ignores the scale of a matrix. For "both", ``D⁻¹·X·C⁻¹`` with the
    norms C of the columns of X is orthogonalized. A row of zeros stays zero. There is no ε, which would suppress small
    gradients.

    Attributes:
        sides: The sides to normalize; the key of a group is ``muoneq_sides``.
    """

    sides: MuonEqSides = rule_field("muoneq_sides", choice("rows", MuonEqSides))

    def balance(self, direction: Tensor, state: State) -> Tensor:
        """Return the directions with rows, or columns, divided by their norms."""
        if self.sides != "both":
            return unit(direction, -1 if self.sides == "rows" else -2)
        scaled = over(direction, direction.abs().amax((-2, -1), keepdim=True))
        return over(unit(scaled, -1), norm(scaled, -2))
