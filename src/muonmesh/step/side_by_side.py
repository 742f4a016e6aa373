"""Side by side: folds and applies small equal pieces together, since a CPU copies them faster than it makes calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from muonmesh.comm.elements import Elements, in_buffer
from muonmesh.comm.views import view_in_storage
from muonmesh.layout.piece_table import NOWHERE, PieceTable, Row
from muonmesh.layout.region import row_major
from muonmesh.numerics.rules import parts
from muonmesh.step.parameter_steps import ParameterStep
from muonmesh.step.ready import ReadyParameters

SMALL = 1 << 14
"""Up to this number of elements, a CPU copies a piece beside others; this is cheaper than a few more calls
(measured)."""

_MOST = 1 << 19
"""Largest number of elements of pieces that are taken together, so that they stay in the cache."""


def runs(ready: ReadyParameters, table: PieceTable) -> Iterator[Sequence[Row]]:
    """Yield the rows of a table in their order, with rows that may be taken together in one sequence."""
    for start, stop in table.once(("runs", SMALL), lambda: _runs(ready, table.rows)):
        yield table.rows[start:stop]


def _runs(ready: ReadyParameters, rows: Sequence[Row]) -> list[tuple[int, int]]:
    found, last, numel = list[tuple[int, int]](), None, 0
    for number, row in enumerate(rows):
        shape, group, matrix = row.piece.shape, ready.group(row.assignment), ready.matrix(row.assignment)
        small = row.piece.numel <= SMALL and row.piece.storage_strides == row_major(shape) and row.buffer != NOWHERE
        form = (shape, row.strides, row.buffer, group, matrix.rows, matrix.cols) if small else None  # of one scale
        numel += row.piece.numel
        if form is not None and form == last and numel <= _MOST:
            found[-1] = found[-1][0], number + 1
        else:
            found.append((number, number + 1))
            last, numel = form, row.piece.numel
    return found


class SideBySide:
    """Small pieces of equal shape and group, all of which change in this step, as one tensor for each of their columns.

    Adjacent pieces of one tensor are used where they are. All others are copied side by side, and back afterwards.

    Args:
        rows: The pieces.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows, self._apart = rows, dict[str, list[Tensor]]()
        self._columns: dict[str, Tensor] = {}

    @staticmethod
    def entries(ready: ReadyParameters, rows: Sequence[Row]) -> list[ParameterStep] | None:
        """Return the parameters of rows that can be taken together; None if they cannot be."""
        rule = ready.rule(rows[0].assignment)
        if ready.blocks is not None or rule.stochastic_rounding is not None or rule.asks_for_sums():
            return None
        nonzero, entries = ready.nonzero, [ready.here(row.assignment) for row in rows]
        changes = all([nonzero[row.assignment] is True for row in rows])
        return entries if changes and all([entry.created for entry in entries]) else None

    def add(self, name: str, tensors: Sequence[Tensor | None], *, buffered: bool = False) -> bool:
        """Add a column: for each piece the storage, or the buffer, that it lies in; False if they are not alike."""
        held, rows = [tensor for tensor in tensors if tensor is not None], self._rows
        if len(held) < len(rows) or len({tensor.dtype for tensor in held}) > 1:
            return False
        first = held[0]
        if held[-1] is first:  # they may be adjacent
            starts = [row.start if buffered else row.piece.storage_start for row in rows]
            apart, strides = starts[1] - starts[0], rows[0].strides if buffered else rows[0].piece.storage_strides
            if starts == list(range(starts[0], starts[-1] + 1, apart or 1)) and all([one is first for one in held]):
                shape = len(rows), *rows[0].piece.shape
                self._columns[name] = first.as_strided(shape, (apart, *strides), first.storage_offset() + starts[0])
                return True
        pairs = zip(held, rows, strict=True)
        views = [in_buffer(one, row) if buffered else view_in_storage(one, row.piece) for one, row in pairs]
        self._columns[name], self._apart[name] = parts.side_by_side(name, views), views
        return True

    def add_all(self, name: str, columns: Sequence[Mapping[str, Any]]) -> bool:
        """Add columns that each piece has by key, such as its state; False if they are not alike."""
        keys = columns[0].keys()
        alike = all([column.keys() == keys for column in columns])
        return alike and all([self.add(f"{name} {key}", [column[key] for column in columns]) for key in keys])

    def of(self, name: str) -> Tensor | None:
        """Return a column, (pieces, *shape); None if there is none."""
        return self._columns.get(name)

    def all_of(self, name: str) -> dict[str, Tensor]:
        """Return the columns of `add_all` by key."""
        start = f"{name} "
        return {key.removeprefix(start): column for key, column in self._columns.items() if key.startswith(start)}

    def give_back(self, *names: str) -> None:
        """Copy columns with these first words back to where their pieces lie."""
        for name, views in self._apart.items():
            if name.partition(" ")[0] in names:
                parts.give_back(self._columns[name], views)


def fold_together(ready: ReadyParameters, elements: Elements, rows: Sequence[Row]) -> bool:
    """Fold the gradients of a run and write the directions; False if nothing was done, because the rows differ."""
    entries, one = SideBySide.entries(ready, rows), SideBySide(rows)
    if entries is None or any([entry.momenta is None for entry in entries]):
        return False
    found = (
        one.add("gradient", [entry.gradient for entry in entries])
        and one.add_all("momenta", [entry.momenta or {} for entry in entries])
        and one.add("into", [elements.buffers[row.buffer] for row in rows], buffered=True)
    )
    gradient, into = one.of("gradient"), one.of("into")
    if not found or gradient is None:
        return False
    parts.fold(ready.rule(rows[0].assignment), gradient, one.all_of("momenta"), into=into)
    one.give_back("momenta", "into")
    return True


def apply_together(ready: ReadyParameters, elements: Elements, rows: Sequence[Row]) -> bool:
    """Decay and update the weights of a run; False if nothing was done, because the rows differ."""
    entries, one = SideBySide.entries(ready, rows), SideBySide(rows)
    if entries is None or len({entry.master is None for entry in entries}) > 1:
        return False
    wide = entries[0].master is not None
    found = (
        one.add("weights", [entry.master if wide else entry.weights for entry in entries])
        and (not wide or one.add("rounded", [entry.weights for entry in entries]))
        and one.add_all("beside", [entry.beside for entry in entries])
        and one.add("update", [elements.buffers[row.buffer] for row in rows], buffered=True)
    )
    weights, update = one.of("weights"), one.of("update")
    if not found or weights is None or update is None:
        return False
    number, beside, rounded = rows[0].assignment, one.all_of("beside"), one.of("rounded")
    parts.apply(ready.rule(number), weights, update, beside, scale=ready.scale(number), rounded=rounded)
    one.give_back("weights", "beside", "rounded")
    return True
