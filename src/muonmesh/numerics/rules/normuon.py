"""NorMuon: Muon with a second moment for each row of the orthogonalized update (Li et al., arXiv 2510.05491)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from muonmesh.numerics.rules.even import frobenius
from muonmesh.numerics.rules.muon import MuonRule
from muonmesh.numerics.rules.rule import KeptAs, State
from muonmesh.numerics.setting import choice, fraction, not_negative, rule_field

NorMuonSide: TypeAlias = Literal["rows", "longer"]
"""The side with second moments in NorMuon: "rows" as in the paper; or "longer", the rows of a tall matrix and the
columns of a wide matrix, as in nanochat and modded-nanogpt."""


@dataclass(frozen=True, slots=True)
class NorMuonRule(MuonRule):
    """The rule "normuon": Muon with a second moment for each output neuron as further state.

    O is the orthogonalized direction, and v has one number for each row: ``v ← β₂ v + (1 − β₂)·mean(O², over the
    row)``, without bias correction, and ``O / (√v + ε)``, scaled back to the Frobenius norm of O (as the authors' code
    does it).

    Attributes:
        beta2: β₂; the key of a group is ``normuon_beta2``.
        eps: ε, ``normuon_eps``.
        side: "rows", or "longer" for the longer side of each matrix; ``normuon_side``.
    """

    never_negative: ClassVar[tuple[str, ...]] = ("row_second_moment", "col_second_moment")

    beta2: float = rule_field("normuon_beta2", fraction(0.95))
    eps: float = rule_field("normuon_eps", not_negative(1e-8))
    side: NorMuonSide = rule_field("normuon_side", choice("rows", NorMuonSide))

    def keeps(self) -> Mapping[str, KeptAs]:
        """Return the momentum and the second moments."""
        kinds: dict[str, KeptAs] = {"momentum_buffer": "momentum", "row_second_moment": "rows"}
        if self.side == "longer":  # one parameter may consist of tall and wide matrices
            kinds["col_second_moment"] = "cols"
        return kinds

    def whole(self, update: Tensor, state: State) -> Tensor:
        """Return the matrices with rows (or columns) of equal running norm."""
        by_cols = self.side == "longer" and update.shape[-1] > update.shape[-2]
        second = state["col_second_moment" if by_cols else "row_second_moment"]
        second.lerp_(update.square().mean(-2 if by_cols else -1, keepdim=True), 1 - self.beta2)
        paced = update / (second.sqrt() + self.eps)
        before, after = frobenius(update), frobenius(paced)
        # A matrix of zeros stays zero.
        return paced.mul_(torch.where(after == 0, 1.0, before / after))
