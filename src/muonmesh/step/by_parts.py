"""ByParts: folds and applies rows of a table by the parts of their rules, on every device.

On a CPU each thread takes one piece after the other, so that a piece stays in the cache; and small equal pieces are
taken together, since a CPU copies them faster than it makes calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from muonmesh.comm.elements import Elements, in_buffer
from muonmesh.comm.views import view_in_storage
from muonmesh.layout.piece_table import NOWHERE, PieceTable, Row
from muonmesh.layout.region import row_major
from muonmesh.numerics.kernels.threads import run_all
from muonmesh.numerics.rules import parts
from muonmesh.step.columns import MatrixStep
from muonmesh.step.ready import ReadyParameters
from muonmesh.step.update_squares import UpdateSquares

SMALL = 1 << 14
"""Up to this number of elements, a CPU copies a piece beside others; this is cheaper than a few more calls
(measured)."""

_MOST = 1 << 19
"""Largest number of elements of pieces that are taken together, so that they stay in the cache."""


class ByParts:
    """Folds and applies rows by the parts of their rules.

    Args:
        ready: The parameters of the step.
        sums: Returns what a rule has added up over a matrix (`RuleSums.found`).
        squares: Adds up the squares of the updates; None if no metrics are wanted.
    """

    def __init__(
        self,
        ready: ReadyParameters,
        sums: Callable[[int], tuple[tuple[Tensor, ...], Mapping[str, Tensor]]],
        squares: UpdateSquares | None,
    ) -> None:
        self._ready, self._sums, self._squares = ready, sums, squares

    def fold(self, elements: Elements, rows: Sequence[Row], *, folded: bool) -> None:
        """Fold the gradients of rows into their momenta, and write the directions.

        Args:
            elements: The table with its buffers.
            rows: Rows of the table.
            folded: Whether gradients have been folded, so that only directions are written.
        """
        self._run(partial(self._fold, elements, folded), elements.table, rows)

    def apply(self, elements: Elements, rows: Sequence[Row]) -> None:
        """Decay and update the weights of rows."""
        self._run(partial(self._apply, elements), elements.table, rows)

    def _run(self, task: Callable[[Sequence[Row]], None], table: PieceTable, rows: Sequence[Row]) -> None:
        """Run a task for some rows of a table: small equal rows together, all others one by one."""
        if rows is table.rows and self._squares is None:
            some: Sequence[Sequence[Row]] = table.once(("runs", SMALL), lambda: _runs(self._ready, rows))
        else:
            some = [(row,) for row in rows]
        if len(some) == 1:
            task(some[0])
        else:
            run_all([partial(task, each) for each in some], device=self._ready.device)

    def _fold(self, elements: Elements, folded: bool, rows: Sequence[Row]) -> None:
        ones = [self._ready.of(row.assignment) for row in rows]
        if len(rows) > 1 and not folded and _fold_together(elements, rows, ones):
            return
        for row, one in zip(rows, ones, strict=True):
            into = elements.view(row)
            if one.entry.momenta is not None:
                folds = not folded and one.nonzero is not False
                if folds or into is not None:
                    state = one.momenta(row.piece)
                    parts.fold(one.rule, one.gradient(row.piece), state, active=one.mask, into=into, folds=folds)
            elif into is not None:  # without state no gradient has ever been folded in, so the direction is zero
                into.zero_()

    def _apply(self, elements: Elements, rows: Sequence[Row]) -> None:
        ones = [self._ready.of(row.assignment) for row in rows]
        if len(rows) > 1 and _apply_together(elements, rows, ones):
            return
        for row, one in zip(rows, ones, strict=True):
            if one.changes:
                self._apply_one(row, one, elements)

    def _apply_one(self, row: Row, one: MatrixStep, elements: Elements) -> None:
        update, weights, member = elements.view(row), one.weights(row.piece), one.entry.member
        assert update is not None
        sums, told = self._sums(row.assignment)
        squares: list[Tensor] | None = None if self._squares is None else []
        parts.apply(
            *(one.rule, weights.values, update, weights.beside),
            scale=one.scale,
            active=one.mask,
            sums=sums,
            told=told,
            squares=squares,
            rounded=weights.rounded,
        )
        if weights.write is not None:
            weights.write()
        if self._squares is not None and squares is not None:
            self._squares.add(member.group, torch.stack(squares).sum() / member.storage.copies)


# ---------------------------------------------------------------- small equal pieces together


def _runs(ready: ReadyParameters, rows: Sequence[Row]) -> list[Sequence[Row]]:
    """Return rows in their order, with those that may be taken together in one sequence."""
    found, last, numel = list[list[Row]](), None, 0
    for row in rows:
        shape, one = row.piece.shape, ready.find(row.assignment)
        small = row.piece.numel <= SMALL and row.piece.storage_strides == row_major(shape) and row.buffer != NOWHERE
        form = None
        if small and one is not None:  # of one scale
            form = shape, row.strides, row.buffer, one.entry.member.group, one.matrix.rows, one.matrix.cols
        numel += row.piece.numel
        if form is not None and form == last and numel <= _MOST:
            found[-1].append(row)
        else:
            found.append([row])
            last, numel = form, row.piece.numel
    return [tuple(some) for some in found]


class SideBySide:
    """Small pieces of equal shape and group, all of which change in this step, as one tensor for each of their columns.

    Adjacent pieces of one tensor are used where they are. All others are copied side by side, and back afterwards.

    Args:
        rows: The pieces.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows, self._apart = rows, dict[str, list[Tensor]]()
        self._columns: dict[str, Tensor] = {}

    def add(self, name: str, tensors: Sequence[Any], *, buffered: bool = False) -> bool:
        """Add a column: for each piece the storage, or the buffer, that it lies in; False if they are not alike."""
        rows, first = self._rows, tensors[0]
        if not all([isinstance(tensor, Tensor) for tensor in tensors]) or len({t.dtype for t in tensors}) > 1:
            return False
        if tensors[-1] is first:  # they may be adjacent
            starts = [row.start if buffered else row.piece.storage_start for row in rows]
            apart, strides = starts[1] - starts[0], rows[0].strides if buffered else rows[0].piece.storage_strides
            if starts == list(range(starts[0], starts[-1] + 1, apart or 1)) and all([one is first for one in tensors]):
                shape = len(rows), *rows[0].piece.shape
                self._columns[name] = first.as_strided(shape, (apart, *strides), first.storage_offset() + starts[0])
                return True
        pairs = zip(tensors, rows, strict=True)
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


def _change(ones: Sequence[MatrixStep]) -> bool:
    """Whether all of some matrices of one rule change, each by itself, as the CPU knows."""
    return not ones[0].rule.asks_for_sums() and all([one.nonzero is True and one.entry.created for one in ones])


def _fold_together(elements: Elements, rows: Sequence[Row], ones: Sequence[MatrixStep]) -> bool:
    """Fold the gradients of a run and write the directions; False if nothing was done, because the rows differ."""
    side = SideBySide(rows)
    found = (
        _change(ones)
        and side.add_all("momenta", [one.entry.momenta or {} for one in ones])
        and side.add("gradient", [one.entry.gradient for one in ones])
        and side.add("into", [elements.buffers[row.buffer] for row in rows], buffered=True)
    )
    gradient, into = side.of("gradient"), side.of("into")
    if not found or gradient is None:
        return False
    parts.fold(ones[0].rule, gradient, side.all_of("momenta"), into=into)
    side.give_back("momenta", "into")
    return True


def _apply_together(elements: Elements, rows: Sequence[Row], ones: Sequence[MatrixStep]) -> bool:
    """Decay and update the weights of a run; False if nothing was done, because the rows differ."""
    side, first, entries = SideBySide(rows), ones[0], [one.entry for one in ones]
    wide = first.entry.master is not None
    alike = _change(ones) and first.rounds_to_nearest and all([(e.master is not None) == wide for e in entries])
    found = (
        alike
        and side.add("weights", [entry.master if wide else entry.weights for entry in entries])
        and (not wide or side.add("rounded", [entry.weights for entry in entries]))
        and side.add_all("beside", [entry.beside for entry in entries])
        and side.add("update", [elements.buffers[row.buffer] for row in rows], buffered=True)
    )
    weights, update = side.of("weights"), side.of("update")
    if not found or weights is None or update is None:
        return False
    rounded = side.of("rounded")
    parts.apply(first.rule, weights, update, side.all_of("beside"), scale=first.scale, rounded=rounded)
    side.give_back("weights", "beside", "rounded")
    return True
