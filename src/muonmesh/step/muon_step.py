"""MuonStep: the step of Muon's parameters: the work on matrices before, between and after the transfers.

One kernel takes all rows of a table if it can (`ByKernel`). The parts of rules take the others, on every device. On a
CPU each thread takes one piece after the other, so that a piece stays in the cache; and small equal pieces are taken
together, since a CPU copies them faster than it makes calls.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from muonmesh.comm.step_callbacks import LocalBatch, StepCallbacks
from muonmesh.comm.views import Elements, view_in_storage
from muonmesh.layout import Piece
from muonmesh.layout.piece_table import NOWHERE, Row, evenly
from muonmesh.layout.region import row_major
from muonmesh.numerics.kernels.recording import run_again
from muonmesh.numerics.kernels.threads import run_all
from muonmesh.numerics.kernels.triton_launch import is_watched
from muonmesh.numerics.newton_schulz import Orthogonalizer
from muonmesh.numerics.rules import parts
from muonmesh.step.by_kernel import ByKernel, Repeatable
from muonmesh.step.int8_momentum import Int8Codec
from muonmesh.step.offload import DeviceCopies, Offload
from muonmesh.step.parameter_steps import ROUNDED, WEIGHTS, Kind, MatrixStep, Views
from muonmesh.step.parameters import ReadyParameters
from muonmesh.step.planning import StepPlan
from muonmesh.step.stored_factored import RuleSums, StoredFactored

SMALL = 1 << 14
"""Up to this number of elements, a CPU copies a piece beside others; this is cheaper than a few more calls
(measured)."""

_MOST = 1 << 19
"""Largest number of elements of pieces that are taken together, so that they stay in the cache."""

_RUNS = "runs"

NAMES = {
    "prepare": "gradients into matrices",
    "compute": "orthogonalization",
    "finalize": "updates into weights",
    "step_elementwise": "AdamW and other elementwise rules",
}
"""The parts of a step, and their names in the profile after the prefix "muonmesh: "."""

_NO_COPIES: dict[str, list[Tensor]] = {}

Take = Callable[[Sequence[Row], Tensor | None, Sequence[MatrixStep]], bool]
"""Folds or applies rows, given with a view of them in their buffer, and with the matrix of each; or a row that was
joined from several. Returns False if nothing was done, because tensors of several rows differ."""


class MuonStep(StepCallbacks):
    """The step of Muon's parameters: reads, computes and writes for the exchange (`StepCallbacks`).

    Each step `ReadyParameters.begin` is called first, then `begin`, and then `Exchange.run`, which makes the calls that
    `StepCallbacks` lists; `ReadyParameters.finish` ends the step. Every rank of the plan makes all of these calls.

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

    def __init__(self, planned: StepPlan, ready: ReadyParameters, offload: Offload | None = None) -> None:
        if ready.precision.int8:
            ready.codec = Int8Codec(planned.blocks, ready.find)
        elif offload is not None:
            ready.codec = DeviceCopies(offload, planned, ready.entries)
        self.ready, self._by_kernel = ready, ByKernel.where_usable(ready)
        self.factored_states = StoredFactored(ready)
        self.summands = RuleSums(ready, self.factored_states)
        self._elementwise: Sequence[Callable[[], None]] = ()
        self._recordings: dict[Hashable, Any] = {}
        self._places: dict[LocalBatch, tuple[list[object], Repeatable | None, Orthogonalizer | None, object]] = {}
        # Views of rows in tensors that last as long as this object, by the identity of the row and what was read.
        self._row_views: dict[tuple[int, object], Views] = {}

    def begin(self, elementwise: Sequence[Callable[[], None]]) -> None:
        """Begin a step of parameters that are ready.

        Args:
            elementwise: One function for each group of an elementwise rule, such as AdamW's; called while the first
                matrices travel.
        """
        self._elementwise, self.factored_states.owned = elementwise, {}
        self.summands.sums, self.summands.unsuited = {}, {}
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
        self._run(elements, rows, partial(self._fold, folded), alone=folded)
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
        facts = ready.version, kernels.active
        ids = [kernels.kinds_of_rules, *map(id, facts), *map(Tensor.data_ptr, memory)]
        last, located, orthogonalizer, _ = self._places.get(batch, ([], None, None, ()))
        if last != ids:
            located, kind = None, ready.kind_of(batch.assignments[0])
            orthogonalizer = kind.orthogonalizer
            if _only_orthogonalizes(kind):
                x, out = batch.buffers(memory)
                located = kernels.located(Elements(batch.reads, (x,)), Elements(batch.writes, (out,)))
            # The facts stay alive, so that nothing else takes their identity.
            self._places[batch] = ids, located, orthogonalizer, facts
        if located is None or orthogonalizer is None:
            run(*memory)
        else:
            _ = kernels.factors  # written anew if a rate has changed
            with orthogonalizer.exactly():
                run_again(self._recordings, run, memory, (batch, located.facts), located.beside)
            torch.autograd.graph.increment_version(located.written)

    def compute(
        self, matrices: Sequence[int], batch: Sequence[Tensor], out: Sequence[Tensor], memory: Tensor | None = None
    ) -> None:
        """Orthogonalize matrices of one group, including what their rule does before and afterwards."""
        kind = self.ready.kind_of(matrices[0])
        rule = kind.rule
        if kind.balances:
            for number, matrix in zip(matrices, _one_by_one(batch), strict=True):
                self._change(number, "balance", matrix)
        if rule.orthogonalizes:
            kind.orthogonalizer.orthogonalize_batches(batch, out, overwrite=not rule.sees_direction, memory=memory)
        else:
            for results, directions in zip(out, batch, strict=True):
                results.copy_(directions)
        if kind.changes:
            for number, direction, matrix in zip(matrices, _one_by_one(batch), _one_by_one(out), strict=True):
                self._change(number, "whole", matrix, direction=direction if rule.sees_direction else None)

    def _change(self, number: int, part: str, matrix: Tensor, **extra: Any) -> None:
        """Let a part of the rule of a matrix change it whole, together with its state by row, column or matrix."""
        step = self.ready.of(number)
        with self.factored_states.of(step) as state:
            rows, cols = step.matrix.rows, step.matrix.cols
            parts.change_whole(getattr(step.rule_in_turn, part), matrix, state, rows=rows, cols=cols, **extra)

    def finalize(self, elements: Elements) -> None:
        """Decay and update the elements of a table, unless their matrix stays unchanged."""
        rows = elements.table.rows if self._by_kernel is None else self._by_kernel.apply(elements)
        self._run(elements, rows, self._apply)
        if self.ready.codec is not None:
            self.ready.codec.have_written(elements.table)

    # ---------------------------------------------------------------- by the parts of rules

    def _run(self, elements: Elements, rows: Sequence[Row], take: Take, *, alone: bool = False) -> None:
        """Take some rows of a table: small equal rows together, all others one by one.

        Args:
            elements: The table with its buffers.
            rows: The rows.
            take: Takes the rows of a run.
            alone: Whether each row is taken by itself.
        """
        table = elements.table
        if rows is table.rows and self.ready.squares is None and not alone:
            runs: Sequence[Run] = table.derived.get(_RUNS) or table.once(_RUNS, lambda: _runs(self.ready, rows))
        else:
            runs = [Run.of((row,)) for row in rows]
        if len(runs) == 1:
            self._take(elements, take, runs[0])
        else:
            run_all([partial(self._take, elements, take, run) for run in runs], device=self.ready.device)

    def _take(self, elements: Elements, take: Take, run: Run) -> None:
        """Take a run, or each row by itself unless all change, as the CPU knows, and none differs from the others."""
        steps = [*map(self.ready.of, run.assignments)]
        if len(steps) == 1:
            take(run.rows, elements.view(run.whole), steps)
            return
        kind = steps[0].kind
        alike = not kind.sums and kind.rounds_to_nearest  # at random, by the place of each element
        alike = alike and all([step.changes and step.mask is None for step in steps])
        if not alike or not take(run.rows_to_take, elements.view(run.whole), steps[: len(run.rows_to_take)]):
            for row, step in zip(run.rows, steps, strict=True):
                take((row,), elements.view(row), [step])

    def _fold(self, folded: bool, rows: Sequence[Row], into: Tensor | None, steps: Sequence[MatrixStep]) -> bool:
        """Fold gradients, unless a codec has ``folded`` them, and write directions; False if nothing was done."""
        first = steps[0]
        folds = not folded and first.nonzero is not False
        if first.entry.momenta is None:
            if into is not None:  # without state no gradient has ever been folded in, so the direction is zero
                into.zero_()
        elif folds or into is not None:
            tensors: list[dict[str, Tensor]] = []
            for row, step in zip(rows, steps, strict=True):
                gradient = step.entry.gradients[step.entry.number]
                assert gradient is not None
                momenta = self._views(row, step, MatrixStep.momenta).tensors
                tensors.append({"": view_in_storage(gradient, row.piece), **momenta})
            columns = (tensors[0], _NO_COPIES) if len(tensors) == 1 else _side_by_side(tensors)
            if columns is None:
                return False
            state, originals = columns
            parts.fold(first.kind.rule, state.pop(""), state, active=first.mask, into=into, folds=folds)
            for key in state if originals else ():
                parts.give_back(state[key], originals[key])
        return True

    def _views(self, row: Row, step: MatrixStep, read: Callable[[MatrixStep, Piece], Views]) -> Views:
        """Return what ``read`` returns of a row, and keep it as long as its tensors last."""
        if (views := self._row_views.get((id(row), read))) is None:
            views = read(step, row.piece)
            if self.ready.codec is None and views.write is None:
                self._row_views[id(row), read] = views
        return views

    def _apply(self, rows: Sequence[Row], update: Tensor | None, steps: Sequence[MatrixStep]) -> bool:
        """Decay and update weights, unless their matrix stays unchanged; False if nothing was done, as rows differ."""
        first = steps[0]
        if not first.changes:
            return True
        assert update is not None
        weights = [*map(self._views, rows, steps, repeat(MatrixStep.weights))]
        single = len(weights) == 1
        columns = (weights[0].tensors, _NO_COPIES) if single else _side_by_side([views.tensors for views in weights])
        if columns is None:
            return False
        copies, originals = columns
        state = {**copies}
        sums, numbers = self.summands.sums_of(rows[0].assignment) if first.kind.sums else ((), None)
        squares: list[Tensor] | None = None if self.ready.squares is None else []
        parts.apply(
            *(first.kind.rule, state.pop(WEIGHTS), update),
            rounded=state.pop(ROUNDED, None),
            state=state,
            scale=first.kind.scale,
            active=first.mask,
            sums=sums,
            matrix_state=numbers,
            squares=squares,
        )
        for key, views in originals.items():
            parts.give_back(copies[key], views)
        if weights[0].write is not None:
            weights[0].write()
        if self.ready.squares is not None and squares is not None:
            member = first.entry.member
            total = torch.stack(squares).sum() / member.storage.copies
            self.ready.squares.setdefault(member.group, []).append(total)  # by any thread
        return True


def _only_orthogonalizes(kind: Kind) -> bool:
    """Whether the kernels between fold and apply are the same in every step."""
    return kind.rule.orthogonalizes and not (kind.balances or kind.changes) and kind.orthogonalizer.repeats


def _one_by_one(batches: Sequence[Tensor]) -> Iterator[Tensor]:
    return (matrix for equal in batches for matrix in equal.unbind())


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

        def named(*arguments: Any) -> Any:
            with record_function(f"muonmesh: {NAMES[name]}"):
                return part(*arguments)

        return named


# ---------------------------------------------------------------- small equal pieces together


class Run(NamedTuple):
    """Rows that may be taken together.

    Attributes:
        rows: Small rows of equal form, one after the other in a table and evenly in a buffer; or any row.
        assignments: The assignment of each.
        rows_to_take: The same, or as one row if they lie evenly in one parameter.
        whole: All of them as one row in their buffer, (rows, *shape); a single row as it is.
    """

    rows: tuple[Row, ...]
    assignments: tuple[int, ...]
    rows_to_take: tuple[Row, ...]
    whole: Row

    @staticmethod
    def of(rows: tuple[Row, ...]) -> Run:
        """Return the run of rows."""
        first, assignments = rows[0], tuple(row.assignment for row in rows)
        if len(rows) == 1:
            return Run(rows, assignments, rows, first)
        if (joined := evenly(rows)) is not None:
            return Run(rows, assignments, (joined,), joined)
        piece, strides = replace(first.piece, shape=(len(rows), *first.piece.shape)), (rows[1].start - first.start,)
        return Run(rows, assignments, rows, replace(first, piece=piece, strides=strides + first.strides))


def _runs(ready: ReadyParameters, rows: Sequence[Row]) -> list[Run]:
    """Return rows in their order, with those that may be taken together in one run."""
    rows_of_runs, last, numel = list[list[Row]](), None, 0
    for row in rows:
        shape, step = row.piece.shape, ready.find(row.assignment)
        small = row.piece.numel <= SMALL and row.piece.storage_strides == row_major(shape) and row.buffer != NOWHERE
        form = None
        if small and step is not None:  # of one scale
            form = shape, row.strides, row.buffer, step.entry.member.group, step.matrix.rows, step.matrix.cols
        numel += row.piece.numel
        if form is not None and form == last and numel <= _MOST and _follows(row, rows_of_runs[-1]):
            rows_of_runs[-1].append(row)
        else:
            rows_of_runs.append([row])
            last, numel = form, row.piece.numel
    return [Run.of(tuple(rows_together)) for rows_together in rows_of_runs]


def _follows(row: Row, run: Sequence[Row]) -> bool:
    """Whether a row lies as far behind the last row of a run, in their buffer, as that behind the row before it."""
    apart = row.start - run[-1].start
    return apart > 0 and (len(run) == 1 or apart == run[-1].start - run[-2].start)


def _side_by_side(tensors: Sequence[dict[str, Tensor]]) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]] | None:
    """Return the tensors of several rows in one tensor for each key, with the tensors that were copied there.

    Args:
        tensors: The tensors of each row, by key.

    Returns:
        None if the rows do not have tensors by the same keys, of one dtype for each.
    """
    first = tensors[0]
    if any([others.keys() != first.keys() for others in tensors]):
        return None
    columns = {key: [others[key] for others in tensors] for key in first}
    if any([len({tensor.dtype for tensor in column}) > 1 for column in columns.values()]):
        return None
    return {key: parts.side_by_side(key, column) for key, column in columns.items()}, columns
