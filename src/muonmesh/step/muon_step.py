"""MuonStep: the step of Muon's parameters: the work on matrices before, between and after the transfers.

One kernel takes all rows of a table if it can (`ByKernel`). The parts of rules take the others, on every device. On a
CPU each thread takes one piece after the other, so that a piece stays in the cache; and small equal pieces are taken
together, since a CPU copies them faster than it makes calls.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from muonmesh.comm.step_callbacks import LocalBatch, StepCallbacks
from muonmesh.comm.views import Elements, view_in_storage
from muonmesh.layout.piece_table import NOWHERE, PieceTable, Row, evenly
from muonmesh.layout.region import row_major
from muonmesh.numerics.kernels.recording import run_again
from muonmesh.numerics.kernels.threads import run_all
from muonmesh.numerics.kernels.triton_launch import is_watched
from muonmesh.numerics.rules import parts
from muonmesh.step.by_kernel import ByKernel, Repeatable
from muonmesh.step.int8_momentum import Int8Codec
from muonmesh.step.offload import DeviceCopies, Offload
from muonmesh.step.parameter_steps import Kind, MatrixStep, ParameterStep, WeightViews
from muonmesh.step.parameters import ReadyParameters
from muonmesh.step.planning import Planned
from muonmesh.step.stored_factored import RuleSums, StoredFactored

SMALL = 1 << 14
"""Up to this number of elements, a CPU copies a piece beside others; this is cheaper than a few more calls
(measured)."""

_MOST = 1 << 19
"""Largest number of elements of pieces that are taken together, so that they stay in the cache."""

_RUNS, _ROUNDED = "runs", "/rounded"

NAMES = {
    "prepare": "gradients into matrices",
    "compute": "orthogonalization",
    "finalize": "updates into weights",
    "step_elementwise": "AdamW and other elementwise rules",
}
"""The parts of a step, and their names in the profile after the prefix "muonmesh: "."""

Take = Callable[[Row, MatrixStep], None]
"""Folds or applies one row."""

Together = Callable[["Run", Sequence[ParameterStep], Kind], bool]
"""Folds or applies all rows of a run; returns False if nothing was done, because the rows differ."""


class MuonStep(StepCallbacks):
    """The step of Muon's parameters: reads, computes and writes for the exchange (`StepCallbacks`).

    Pieces are views of the local storage, read as a contiguous array. If a storage is not contiguous, the step works on
    a contiguous copy.

    Args:
        planned: The plan.
        ready: The parameters of the step. While they last, the same object takes one step after the other.
        offload: Copies state from CPU memory and back; None if state is on the device of the parameters.

    Attributes:
        ready: The parameters of the step.
        factored_states: State of rules by row, column or matrix.
        summands: The sums that rules take over matrices.
    """

    factored_states: StoredFactored
    summands: RuleSums

    def __init__(self, planned: Planned, ready: ReadyParameters, offload: Offload | None = None) -> None:
        if ready.precision.int8:
            ready.codec = Int8Codec(planned.blocks, ready.find)
        elif offload is not None:
            ready.codec = DeviceCopies(offload, planned, ready.entries)
        self.ready, self._by_kernel = ready, ByKernel.where_usable(ready)
        self._elementwise: Sequence[Callable[[], None]] = ()
        self._recordings: dict[Hashable, Any] = {}
        self._places: dict[LocalBatch, tuple[list[int], Repeatable | None, object]] = {}
        # Views of rows in tensors that last as long as this object, by the identity of the row.
        self._momenta: dict[int, Mapping[str, Tensor]] = {}
        self._weights: dict[int, WeightViews] = {}

    def begin(self, elementwise: Sequence[Callable[[], None]]) -> None:
        """Begin a step of parameters that are ready.

        Args:
            elementwise: One function for each group of an elementwise rule, such as AdamW's; called while the first
                matrices travel.
        """
        self._elementwise, factored_states = elementwise, StoredFactored(self.ready)
        self.factored_states, self.summands = factored_states, RuleSums(self.ready, factored_states)
        if self._by_kernel is not None:
            self._by_kernel.begin()

    def step_elementwise(self) -> None:
        """Step the parameters of elementwise rules, such as AdamW's parameters."""
        for step_group in self._elementwise:
            step_group()

    def prepare(self, assignments: Sequence[int], elements: Elements, ahead: Sequence[int] = ()) -> None:
        """Fold the gradients of matrices into their momenta, and write the directions."""
        codec, folded = self.ready.codec, False
        if codec is not None:
            codec.arrive(assignments, ahead)
            folded = codec.fold(elements.table)  # first, because directions are computed from decoded codes
        rows = elements.table.rows if self._by_kernel is None else self._by_kernel.fold(elements)
        take, together = partial(self._fold_one, elements, folded), partial(_fold_together, elements)
        self._run(elements.table, rows, take, None if folded else together)
        if codec is not None:
            codec.have_read(elements.table)

    def repeat(self, batch: LocalBatch, run: Callable[..., object], memory: Sequence[Tensor]) -> None:
        """Run a batch that stays on its rank, or start again what it started on a device in the steps before.

        That is possible if fold, products and apply depend on nothing but the numbers on the device and the addresses
        that `ByKernel` keeps there.
        """
        kernels, ready = self._by_kernel, self.ready
        if kernels is None or ready.version is None or ready.squares is not None or is_watched(*memory):
            run(*memory)
            return
        facts = ready.version, ready.rules, kernels.active
        now = [*map(id, facts), *map(Tensor.data_ptr, memory)]
        last, place, _ = self._places.get(batch, ([], None, ()))
        if last != now:
            place = None
            if self._only_orthogonalizes(batch.assignments[0]):
                place = kernels.located(Elements(batch.reads, memory[:1]), Elements(batch.writes, memory[1:]))
            self._places[batch] = now, place, facts  # which stay alive, so that nothing else takes their identity
        if place is None:
            run(*memory)
        else:
            run_again(self._recordings, run, memory, (batch, place.facts), place.beside)
            torch.autograd.graph.increment_version(place.written)

    def _only_orthogonalizes(self, number: int) -> bool:
        """Whether the kernels between fold and apply are the same in every step."""
        kind = self.ready.of(number).kind
        alone = kind.rule.orthogonalizes and not (kind.balances or kind.changes)
        return alone and kind.orthogonalizer.repeats

    def compute(self, matrices: Sequence[int], batch: Tensor, out: Tensor) -> None:
        """Orthogonalize matrices of one group and shape, including what their rule does before and afterwards."""
        kind = self.ready.of(matrices[0]).kind
        rule = kind.rule
        if kind.balances:
            for number, matrix in zip(matrices, batch.unbind(), strict=True):
                self._change(number, "balance", matrix)
        if rule.orthogonalizes:
            kind.orthogonalizer(batch, out=out, overwrite=not rule.sees_direction)
        else:
            out.copy_(batch)
        if kind.changes:
            for number, direction, matrix in zip(matrices, batch.unbind(), out.unbind(), strict=True):
                self._change(number, "whole", matrix, direction=direction if rule.sees_direction else None)

    def _change(self, number: int, part: str, matrix: Tensor, **seen: Any) -> None:
        """Let a part of the rule of a matrix change it whole, together with its state by row, column or matrix."""
        one = self.ready.of(number)
        with self.factored_states.of(one) as state:
            rows, cols = one.matrix.rows, one.matrix.cols
            parts.change_whole(getattr(one.rule_in_turn, part), matrix, state, rows=rows, cols=cols, **seen)

    def finalize(self, elements: Elements) -> None:
        """Decay and update the elements of a table, unless their matrix stays unchanged."""
        rows = elements.table.rows if self._by_kernel is None else self._by_kernel.apply(elements)
        take, together = partial(self._apply_one, elements), partial(_apply_together, elements)
        self._run(elements.table, rows, take, together, rounds=True)
        if self.ready.codec is not None:
            self.ready.codec.have_written(elements.table)

    # ---------------------------------------------------------------- by the parts of rules

    def _run(
        self, table: PieceTable, rows: Sequence[Row], take: Take, together: Together | None, *, rounds: bool = False
    ) -> None:
        """Take some rows of a table: small equal rows together, all others one by one.

        Args:
            table: The table.
            rows: The rows.
            take: Takes one row, or several rows that lie evenly in one parameter as one.
            together: Takes the rows of a run if they are alike; None: each row is taken by itself.
            rounds: Whether weights are rounded.
        """
        if rows is table.rows and self.ready.squares is None:
            runs: Sequence[Run] = table.derived.get(_RUNS) or table.once(_RUNS, lambda: _runs(self.ready, rows))
        else:
            runs = [Run((row,)) for row in rows]
        if len(runs) == 1:
            self._take(take, together, rounds, runs[0])
        else:
            run_all([partial(self._take, take, together, rounds, run) for run in runs], device=self.ready.device)

    def _take(self, take: Take, together: Together | None, rounds: bool, run: Run) -> None:
        first = self.ready.of(run.rows[0].assignment)
        if len(run.rows) == 1:
            take(run.rows[0], first)
            return
        by_place = rounds and not first.kind.rounds_to_nearest  # at random, by the place of each element
        entries = [] if together is None or by_place else self._changing(run, first)
        if entries and run.joined is not None:
            take(run.joined, first)
        elif together is None or not entries or not together(run, entries, first.kind):
            for row in run.rows:
                take(row, self.ready.of(row.assignment))

    def _fold_one(self, elements: Elements, folded: bool, row: Row, one: MatrixStep) -> None:
        into, entry, folds = elements.view(row), one.entry, not folded and one.nonzero is not False
        if entry.momenta is None:
            if into is not None:  # without state no gradient has ever been folded in, so the direction is zero
                into.zero_()
        elif folds or into is not None:
            gradient = entry.gradients[entry.number]
            assert gradient is not None
            if (state := self._momenta.get(id(row))) is None:
                state = one.momenta(row.piece)
                if self.ready.codec is None:
                    self._momenta[id(row)] = state
            gradient = view_in_storage(gradient, row.piece)
            parts.fold(one.kind.rule, gradient, state, active=one.mask, into=into, folds=folds)

    def _changing(self, run: Run, first: MatrixStep) -> list[ParameterStep]:
        """Return the parameters of rows that may be taken together: all change, each by itself, as the CPU knows."""
        nonzero, entries = self.ready.nonzero, self.ready.entries
        if isinstance(nonzero, Tensor) or first.kind.sums:
            return []
        if not all([nonzero[row.assignment] for row in run.rows]):
            return []
        if run.joined is not None:
            return [first.entry] if first.changes else []
        found = [entry for row in run.rows if (entry := entries[row.parameter]) is not None and entry.created]
        return found if len(found) == len(run.rows) else []

    def _apply_one(self, elements: Elements, row: Row, one: MatrixStep) -> None:
        if not one.changes:
            return
        update, member = elements.view(row), one.entry.member
        assert update is not None
        if (weights := self._weights.get(id(row))) is None:
            weights = one.weights(row.piece)
            if self.ready.codec is None and weights.write is None:
                self._weights[id(row)] = weights
        sums, told = self.summands.sums_of(row.assignment) if one.kind.sums else ((), None)
        squares: list[Tensor] | None = None if self.ready.squares is None else []
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
        if self.ready.squares is not None and squares is not None:
            total = torch.stack(squares).sum() / member.storage.copies
            self.ready.squares.setdefault(member.group, []).append(total)  # by any thread


class Profiled:
    """A wrapper of a step's work that gives its parts names while torch's profiler runs.

    Args:
        work: The object that does the work, such as a `MuonStep`.
    """

    def __init__(self, work: Any) -> None:
        self._work = work

    def __getattr__(self, name: str) -> Any:
        part: Callable[..., Any] = getattr(self._work, name)
        if name not in NAMES:
            return part

        def named(*given: Any) -> Any:
            with record_function(f"muonmesh: {NAMES[name]}"):
                return part(*given)

        return named


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
