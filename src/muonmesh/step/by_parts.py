"""ByParts: folds and applies rows of a table by the parts of their rules, on every device.

On a CPU each thread takes one piece after the other, so that a piece stays in the cache; and small equal pieces are
taken together, since a CPU copies them faster than it makes calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from muonmesh.comm.views import Elements, in_buffer
from muonmesh.layout.piece_table import NOWHERE, PieceTable, Row, evenly
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

    def _run(self, task: Callable[[Run], None], table: PieceTable, rows: Sequence[Row]) -> None:
        """Run a task for some rows of a table: small equal rows together, all others one by one."""
        if rows is table.rows and self._squares is None:
            runs: Sequence[Run] = table.once(("runs", SMALL), lambda: _runs(self._ready, rows))
        else:
            runs = [Run((row,)) for row in rows]
        if len(runs) == 1:
            task(runs[0])
        else:
            run_all([partial(task, run) for run in runs], device=self._ready.device)

    def _fold(self, elements: Elements, folded: bool, run: Run) -> None:
        ones = [self._ready.of(row.assignment) for row in run.rows]
        rows: Sequence[Row] = run.rows
        if len(rows) > 1 and not folded and _change(ones):
            if run.joined is not None:
                rows, ones = (run.joined,), ones[:1]
            elif _fold_together(elements, rows, ones):
                return
        for row, one in zip(rows, ones, strict=True):
            into = elements.view(row)
            if one.entry.momenta is not None:
                folds = not folded and one.nonzero is not False
                if folds or into is not None:
                    state = one.momenta(row.piece)
                    parts.fold(one.kind.rule, one.gradient(row.piece), state, active=one.mask, into=into, folds=folds)
            elif into is not None:  # without state no gradient has ever been folded in, so the direction is zero
                into.zero_()

    def _apply(self, elements: Elements, run: Run) -> None:
        ones = [self._ready.of(row.assignment) for row in run.rows]
        rows: Sequence[Row] = run.rows
        if len(rows) > 1 and ones[0].kind.rounds_to_nearest and _change(ones):
            if run.joined is not None:
                rows, ones = (run.joined,), ones[:1]
            elif _apply_together(elements, rows, ones):
                return
        for row, one in zip(rows, ones, strict=True):
            if one.changes:
                self._apply_one(row, one, elements)

    def _apply_one(self, row: Row, one: MatrixStep, elements: Elements) -> None:
        update, weights, member = elements.view(row), one.weights(row.piece), one.entry.member
        assert update is not None
        sums, told = self._sums(row.assignment) if one.kind.sums else ((), None)
        squares: list[Tensor] | None = None if self._squares is None else []
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
        if self._squares is not None and squares is not None:
            self._squares.add(member.group, torch.stack(squares).sum() / member.storage.copies)


# ---------------------------------------------------------------- small equal pieces together


class Run(NamedTuple):
    """Rows that may be taken together.

    Attributes:
        rows: Small rows of equal form, one after the other in a table; or any row.
        joined: All of them as one row, if they lie evenly in one parameter.
    """

    rows: tuple[Row, ...]
    joined: Row | None = None


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
        if form is not None and form == last and numel <= _MOST:
            found[-1].append(row)
        else:
            found.append([row])
            last, numel = form, row.piece.numel
    return [Run(tuple(some), evenly(some)) for some in found]


def _change(ones: Sequence[MatrixStep]) -> bool:
    """Whether all of some matrices of one rule change, each by itself, as the CPU knows."""
    return not ones[0].kind.sums and all([one.changes and one.mask is None for one in ones])


def _fold_together(elements: Elements, rows: Sequence[Row], ones: Sequence[MatrixStep]) -> bool:
    """Fold the gradients of a run, and write the directions; False if nothing was done, because the rows differ."""
    state = _by_key([one.momenta(row.piece) for row, one in zip(rows, ones, strict=True)])
    gradients = [one.gradient(row.piece) for row, one in zip(rows, ones, strict=True)]
    if state is None or not _alike(gradients):
        return False
    into = [in_buffer(elements.buffers[row.buffer], row) for row in rows]
    held = {key: parts.side_by_side(f"momenta {key}", views) for key, views in state.items()}
    directions = parts.side_by_side("into", into)
    parts.fold(ones[0].kind.rule, parts.side_by_side("gradient", gradients), held, into=directions)
    for key, views in state.items():
        parts.give_back(held[key], views)
    parts.give_back(directions, into)
    return True


def _apply_together(elements: Elements, rows: Sequence[Row], ones: Sequence[MatrixStep]) -> bool:
    """Decay and update the weights of a run; False if nothing was done, because the rows differ."""
    first = ones[0]
    views = [one.weights(row.piece) for row, one in zip(rows, ones, strict=True)]
    weights, rounded = [each.values for each in views], [each.rounded for each in views if each.rounded is not None]
    state = _by_key([each.beside for each in views])
    if state is None or not _alike(weights) or (rounded and (len(rounded) < len(rows) or not _alike(rounded))):
        return False
    values = parts.side_by_side("weights", weights)
    low = parts.side_by_side("rounded", rounded) if rounded else None
    beside = {key: parts.side_by_side(f"beside {key}", some) for key, some in state.items()}
    update = parts.side_by_side("update", [in_buffer(elements.buffers[row.buffer], row) for row in rows])
    parts.apply(first.kind.rule, values, update, beside, scale=first.kind.scale, rounded=low)
    parts.give_back(values, weights)
    if low is not None:
        parts.give_back(low, rounded)
    for key, some in state.items():
        parts.give_back(beside[key], some)
    return True


def _by_key(states: Sequence[Mapping[str, Tensor]]) -> dict[str, list[Tensor]] | None:
    """Return tensors that each piece has by key, such as its state, in a list for each key; None if they differ."""
    if any([state.keys() != states[0].keys() for state in states]):
        return None
    found = {key: [state[key] for state in states] for key in states[0]}
    return found if all([_alike(some) for some in found.values()]) else None


def _alike(tensors: Sequence[Tensor]) -> bool:
    return len({tensor.dtype for tensor in tensors}) == 1
