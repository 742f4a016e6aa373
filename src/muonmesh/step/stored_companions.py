"""StoredCompanions: numbers that rules keep by row, column or matrix. Ranks store them; owners alone change them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from muonmesh.comm.storage import local_of
from muonmesh.layout import Piece
from muonmesh.layout.companion import size_of
from muonmesh.step.parameter_steps import view_in_storage
from muonmesh.step.ready import ReadyParameters


class StoredCompanions:
    """The companions (numbers by row, column or matrix) of one step: where `CompanionExchange` reads and writes them.

    Implements `muonmesh.comm.work.CompanionState`.

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
        entry = self._ready.entry(assignment)
        assert entry is not None
        self._ready.create(self._ready.plan.assignments[assignment].parameter, entry)  # and take no more than these
        if entry.created:
            into.copy_(view_in_storage(local_of(entry.state[key]), piece))
        else:
            into.zero_()

    def take(self, kept: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Take what is kept of the matrices that this rank owns."""
        self.owned = kept

    @contextmanager
    def of(self, assignment: int) -> Iterator[dict[str, Tensor]]:
        """Give what is kept of a matrix that this rank owns to a part of its rule, which writes it in place.

        What travels is left as it was by `write` where the matrix is left alone; what lives here, when this ends.
        """
        matrix, flag = self._ready.matrix(assignment), self._ready.nonzero[assignment]
        entry = self._ready.entry(assignment)
        assert entry is not None
        given, here = {}, dict[str, Tensor]()
        for key, state_layout in entry.state_layouts.items():
            if state_layout.companion is None:
                continue
            size = (1, *size_of(state_layout.kept_as, matrix.rows, matrix.cols))
            if not state_layout.companion.at_owner:
                given[key] = self.owned[assignment][key].view(size)
            elif entry.created:
                start = state_layout.companion.starts[matrix.index]
                view = entry.state[key][start : start + math.prod(size)].view(size)
                # The bits of products depend on the address modulo 64 bytes, and that on what else this rank owns.
                if flag is True and view.data_ptr() % 64 == 0:
                    given[key] = view
                else:
                    here[key], given[key] = view, view.clone()
            else:
                given[key] = torch.zeros(size, dtype=self._ready.precision.carried, device=self._ready.device)
        yield given
        for key, kept in here.items():
            if isinstance(flag, Tensor):
                kept.copy_(torch.where(flag, given[key], kept))
            elif flag:
                kept.copy_(given[key])

    def write(self, assignment: int, key: str, piece: Piece, numbers: Tensor) -> None:
        """Keep the numbers that `Rule.whole` has changed, unless the matrix is left alone."""
        flag, entry = self._ready.nonzero[assignment], self._ready.entry(assignment)
        assert entry is not None
        if flag is False or not entry.created:
            return
        kept = view_in_storage(local_of(entry.state[key]), piece)
        kept.copy_(numbers if flag is True else torch.where(flag, numbers, kept))
