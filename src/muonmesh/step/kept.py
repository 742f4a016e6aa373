"""KeptState: what rules keep by row, column or matrix, stored beside the parameters and changed by the owners."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from muonmesh.comm.storage import local_of
from muonmesh.layout import Piece
from muonmesh.step.ready import ReadyParameters
from muonmesh.step.slots import view_in_storage


class KeptState:
    """`muonmesh.comm.work.CompanionState` of one step.

    Args:
        ready: The parameters of the step.

    Attributes:
        owned: What is kept of the matrices that this rank owns, by assignment and key.
    """

    def __init__(self, ready: ReadyParameters) -> None:
        self._ready = ready
        self.owned: Mapping[int, Mapping[str, Tensor]] = {}

    def read(self, assignment: int, key: str, piece: Piece, into: Tensor) -> None:
        """Write what is kept of a matrix; zeros if there is no state here."""
        slot = self._ready.slot(assignment)
        assert slot is not None
        self._ready.create(self._ready.plan.assignments[assignment].parameter, slot)  # and take no more than these
        if slot.created:
            into.copy_(view_in_storage(local_of(slot.state[key]), piece))
        else:
            into.zero_()

    def take(self, kept: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Take what is kept of the matrices that this rank owns."""
        self.owned = kept

    def write(self, assignment: int, key: str, piece: Piece, numbers: Tensor) -> None:
        """Keep the numbers that `Rule.whole` has changed, unless the matrix is left alone."""
        flag, slot = self._ready.nonzero[assignment], self._ready.slot(assignment)
        assert slot is not None
        if flag is False or not slot.created:
            return
        kept = view_in_storage(local_of(slot.state[key]), piece)
        kept.copy_(numbers if flag is True else torch.where(flag, numbers, kept))
