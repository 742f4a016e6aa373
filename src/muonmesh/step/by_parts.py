"""ByParts: folds and applies rows of a table by the parts of their rules, and finds gradients of zero; on every device.

On a CPU each thread takes one piece after the other, so that a piece stays in the cache; and small equal pieces are
taken together, since a CPU copies them faster than it makes calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from muonmesh.comm.views import Elements, view_in_storage
from muonmesh.layout.piece_table import NOWHERE, PieceTable, Row, evenly
from muonmesh.layout.region import row_major
from muonmesh.numerics.kernels.memory import upload
from muonmesh.numerics.kernels.threads import run_all
from muonmesh.numerics.rules import parts
from muonmesh.step.parameter_steps import ParameterStep
from muonmesh.step.ready import Kind, MatrixStep, ReadyParameters, WeightViews

SMALL = 1 << 14
"""Up to this number of elements, a CPU copies a piece beside others; this is cheaper than a few more calls
(measured)."""

_MOST = 1 << 19
"""Largest number of elements of pieces that are taken together, so that they stay in the cache."""


_PROBE = 64
"""Number of elements of a gradient that are checked first for being exactly zero; nearly always enough."""

_RUNS, _ROWS, _ROUNDED = "runs", "rows of matrices", "/rounded"

Sums = Callable[[int], tuple[tuple[Tensor, ...], Mapping[str, Tensor]]]
"""The type of `RuleSums.sums_of`."""


def nonzero_on_host(table: PieceTable, gradients: Sequence[Tensor | None], matrices: int) -> list[bool]:
    """Return for each matrix whether its gradient has an element that is not zero, or is NaN.

    The first elements of each matrix are looked at, of many matrices at once, and only then all others.

    Args:
        table: The pieces of all gradients on this rank.
        gradients: The gradients in the order of the plan.
        matrices: The number of matrices.
    """
    found = [False] * matrices
    rows_of: dict[int, list[Row]] = table.kept.get(_ROWS) or table.once(_ROWS, lambda: _rows_of(table))
    probes: dict[tuple[int, torch.dtype], tuple[list[int], list[Tensor]]] = {}
    for number, (first, *_) in rows_of.items():
        if (gradient := gradients[first.parameter]) is not None:  # all rows of a matrix are of one parameter
            count, strides = min(first.piece.shape[-1], _PROBE), first.piece.storage_strides[-1:]
            numbers, views = probes.setdefault((count, gradient.dtype), ([], []))
            numbers.append(number)
            start = gradient.storage_offset() + first.piece.storage_start
            views.append(gradient.as_strided((count,), strides, start))
    for numbers, views in probes.values():
        probed = views[0].any().unsqueeze(0) if len(views) == 1 else torch.stack(views).any(1)
        for number, any_nonzero in zip(numbers, probed.tolist(), strict=True):
            found[number] = any_nonzero or any(_has_nonzero(row, gradients[row.parameter]) for row in rows_of[number])
    return found


def _rows_of(table: PieceTable) -> dict[int, list[Row]]:
    found: dict[int, list[Row]] = {}
    for row in table.rows:
        found.setdefault(row.assignment, []).append(row)
    return found


def _has_nonzero(row: Row, gradient: Tensor | None) -> bool:
    return gradient is not None and bool(view_in_storage(gradient, row.piece).any())


def mark_nonzero(rows: Sequence[Row], gradients: Sequence[Tensor | None], found: Tensor) -> None:
    """Count rows on the device whose gradient has an element that is not zero, or is NaN.

    Args:
        rows: The rows.
        gradients: The gradients in the order of the plan.
        found: int32 (matrices,), to which rows add. With uint8, 256 rows of one matrix would add up to none.
    """
    pairs = [(row, g) for row in rows if row.piece.numel and (g := gradients[row.parameter]) is not None]
    if pairs:
        norms = torch._foreach_norm([view_in_storage(gradient, row.piece) for row, gradient in pairs], float("inf"))
        numbers = upload([row.assignment for row, _ in pairs], dtype=torch.int64, device=found.device)
        found.index_add_(0, numbers, (torch.stack(norms) != 0).to(torch.int32))


class ByParts:
    """Folds and applies rows by the parts of their rules.

    Args:
        ready: The parameters of the step.
    """

    def __init__(self, ready: ReadyParameters) -> None:
        self._ready = ready
        # Views of rows in tensors that last as long as this object, by the identity of the row.
        self._momenta: dict[int, Mapping[str, Tensor]] = {}
        self._weights: dict[int, WeightViews] = {}

    def fold(self, elements: Elements, rows: Sequence[Row], *, folded: bool) -> None:
        """Fold the gradients of rows into their momenta, and write the directions.

        Args:
            elements: The table with its buffers.
            rows: Rows of the table.
            folded: Whether gradients have been folded, so that only directions are written.
        """
        self._run(partial(self._fold, elements, folded), elements.table, rows)

    def apply(self, elements: Elements, rows: Sequence[Row], sums: Sums) -> None:
        """Decay and update the weights of rows.

        Args:
            elements: The table with its buffers.
            rows: Rows of the table.
            sums: Returns what a rule has added up over a matrix (`RuleSums.sums_of`).
        """
        self._run(partial(self._apply, elements, sums), elements.table, rows)

    def _run(self, task: Callable[[Run], None], table: PieceTable, rows: Sequence[Row]) -> None:
        """Run a task for some rows of a table: small equal rows together, all others one by one."""
        if rows is table.rows and self._ready.squares is None:
            runs: Sequence[Run] = table.kept.get(_RUNS) or table.once(_RUNS, lambda: _runs(self._ready, rows))
        else:
            runs = [Run((row,)) for row in rows]
        if len(runs) == 1:
            task(runs[0])
        else:
            run_all([partial(task, run) for run in runs], device=self._ready.device)

    def _fold(self, elements: Elements, folded: bool, run: Run) -> None:
        first = self._ready.of(run.rows[0].assignment)
        if not folded and (entries := self._changing(run, first)):
            if run.joined is not None:
                self._fold_one(run.joined, first, elements, folds=True)
                return
            if _fold_together(elements, run, entries, first.kind):
                return
        for row in run.rows:
            one = first if row is run.rows[0] else self._ready.of(row.assignment)
            self._fold_one(row, one, elements, folds=not folded and one.nonzero is not False)

    def _fold_one(self, row: Row, one: MatrixStep, elements: Elements, *, folds: bool) -> None:
        into, entry = elements.view(row), one.entry
        if entry.momenta is None:
            if into is not None:  # without state no gradient has ever been folded in, so the direction is zero
                into.zero_()
        elif folds or into is not None:
            assert entry.gradient is not None
            if (state := self._momenta.get(id(row))) is None:
                state = one.momenta(row.piece)
                if self._ready.codec is None:
                    self._momenta[id(row)] = state
            gradient = view_in_storage(entry.gradient, row.piece)
            parts.fold(one.kind.rule, gradient, state, active=one.mask, into=into, folds=folds)

    def _apply(self, elements: Elements, sums: Sums, run: Run) -> None:
        first = self._ready.of(run.rows[0].assignment)
        if first.kind.rounds_to_nearest and (entries := self._changing(run, first)):
            if run.joined is not None:
                self._apply_one(run.joined, first, elements, sums)
                return
            if _apply_together(elements, run, entries, first.kind):
                return
        for row in run.rows:
            one = first if row is run.rows[0] else self._ready.of(row.assignment)
            if one.changes:
                self._apply_one(row, one, elements, sums)

    def _changing(self, run: Run, first: MatrixStep) -> list[ParameterStep]:
        """Return the parameters of rows that may be taken together: all change, each by itself, as the CPU knows."""
        nonzero, entries = self._ready.nonzero, self._ready.entries
        if len(run.rows) == 1 or isinstance(nonzero, Tensor) or first.kind.sums:
            return []
        if not all([nonzero[row.assignment] for row in run.rows]):
            return []
        if run.joined is not None:
            return [first.entry] if first.changes else []
        found = [entry for row in run.rows if (entry := entries[row.parameter]) is not None and entry.created]
        return found if len(found) == len(run.rows) else []

    def _apply_one(self, row: Row, one: MatrixStep, elements: Elements, of: Sums) -> None:
        update, member = elements.view(row), one.entry.member
        assert update is not None
        if (weights := self._weights.get(id(row))) is None:
            weights = one.weights(row.piece)
            if self._ready.codec is None and weights.write is None:
                self._weights[id(row)] = weights
        sums, told = of(row.assignment) if one.kind.sums else ((), None)
        squares: list[Tensor] | None = None if self._ready.squares is None else []
        parts.apply(
            *(one.kind.rule, weights.values, update, weights.beside),
            scale=one.kind.scale,
            active=one.mask,
            sums=sums,
            told=told,
            squares=squares,
            rounded=weights.rounded,
        )
        if weights.write is not None:
            weights.write()
        if self._ready.squares is not None and squares is not None:
            total = torch.stack(squares).sum() / member.storage.copies
            self._ready.squares.setdefault(member.group, []).append(total)  # by any thread


# ---------------------------------------------------------------- small equal pieces together


class Run(NamedTuple):
    """Rows that may be taken together.

    Attributes:
        rows: Small rows of equal form, one after the other in a table and evenly in a buffer; or any row.
        joined: All of them as one row, if they lie evenly in one parameter.
    """

    rows: tuple[Row, ...]
    joined: Row | None = None

    def buffered(self, elements: Elements) -> Tensor:
        """Return a view of several rows in their buffer, (rows, *shape)."""
        first, second, *_ = self.rows
        buffer, apart = elements.buffers[first.buffer], second.start - first.start
        shape = len(self.rows), *first.piece.shape
        return buffer.as_strided(shape, (apart, *first.strides), buffer.storage_offset() + first.start)


def _runs(ready: ReadyParameters, rows: Sequence[Row]) -> list[Run]:
    """Return rows in their order, with those that may be taken together in one run."""
    found, last, numel = list[list[Row]](), None, 0
    for row in rows:
        shape, one = row.piece.shape, ready.find(row.assignment)
        small = row.piece.numel <= SMALL and row.piece.storage_strides == row_major(shape) and row.buffer != NOWHERE
        form = None
        if small and one is not None:  # of one scale
            form = shape, row.strides, row.buffer, one.entry.member.group, one.matrix.rows, one.matrix.cols
        numel += row.piece.numel
        if form is not None and form == last and numel <= _MOST and _follows(row, found[-1]):
            found[-1].append(row)
        else:
            found.append([row])
            last, numel = form, row.piece.numel
    return [Run(tuple(some), evenly(some)) for some in found]


def _follows(row: Row, run: Sequence[Row]) -> bool:
    """Whether a row lies as far behind the last row of a run, in their buffer, as that behind the row before it."""
    apart = row.start - run[-1].start
    return apart > 0 and (len(run) == 1 or apart == run[-1].start - run[-2].start)


def _fold_together(elements: Elements, run: Run, entries: Sequence[ParameterStep], kind: Kind) -> bool:
    """Fold the gradients of a run, and write the directions; False if nothing was done, because the rows differ."""
    momenta = [entry.momenta or {} for entry in entries]
    columns = _side_by_side(run, {"": [entry.gradient for entry in entries]}, momenta)
    if columns is None:
        return False
    gradient, _ = columns.pop("")
    parts.fold(kind.rule, gradient, {key: copies for key, (copies, _) in columns.items()}, into=run.buffered(elements))
    for column in columns.values():
        parts.give_back(*column)
    return True


def _apply_together(elements: Elements, run: Run, entries: Sequence[ParameterStep], kind: Kind) -> bool:
    """Decay and update the weights of a run; False if nothing was done, because the rows differ."""
    weights: dict[str, Sequence[object]] = {"": [entry.weights for entry in entries]}
    masters = [entry.master for entry in entries]
    if masters[0] is not None:
        weights = {"": masters, _ROUNDED: weights[""]}
    elif any([master is not None for master in masters]):
        return False
    columns = _side_by_side(run, weights, [entry.beside for entry in entries])
    if columns is None:
        return False
    beside = {key: copies for key, (copies, _) in columns.items()}
    values, rounded = beside.pop(""), beside.pop(_ROUNDED, None)
    parts.apply(kind.rule, values, run.buffered(elements), beside, scale=kind.scale, rounded=rounded)
    for column in columns.values():
        parts.give_back(*column)
    return True


def _side_by_side(
    run: Run, columns: Mapping[str, Sequence[object]], states: Sequence[Mapping[str, object]]
) -> dict[str, tuple[Tensor, list[Tensor]]] | None:
    """Return copies of what the rows of a run have, in one tensor for each key, with the views that were copied.

    Args:
        run: The rows.
        columns: By key, something of each row.
        states: More of each row, by key.

    Returns:
        None if the rows do not have tensors by the same keys, of one dtype for each.
    """
    keys, found = states[0].keys(), dict[str, list[Tensor]]()
    if not all([state.keys() == keys for state in states]):
        return None
    for key, values in {**columns, **{key: [state[key] for state in states] for key in keys}}.items():
        found[key] = [
            view_in_storage(tensor, row.piece)
            for tensor, row in zip(values, run.rows, strict=True)
            if isinstance(tensor, Tensor)
        ]
        if len(found[key]) < len(run.rows) or len({view.dtype for view in found[key]}) > 1:
            return None
    return {key: (parts.side_by_side(key, views), views) for key, views in found.items()}
