"""MuonStep: the step of Muon's parameters: the work on matrices before, between and after the transfers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from muonmesh.comm.elements import Elements
from muonmesh.comm.matrix_sums import MatrixSums
from muonmesh.comm.storage import this_rank
from muonmesh.comm.views import view_in_storage
from muonmesh.comm.work import Local, Work
from muonmesh.layout import Piece
from muonmesh.layout.piece_table import Row
from muonmesh.numerics.kernels.memory import scratch
from muonmesh.numerics.kernels.threads import run_all
from muonmesh.numerics.rules import parts
from muonmesh.step.blocks import Momentum
from muonmesh.step.by_kernel import ByKernel
from muonmesh.step.ready import ReadyParameters
from muonmesh.step.side_by_side import apply_together, fold_together, runs
from muonmesh.step.stochastic_rounding import rounding_of
from muonmesh.step.stored_companions import RuleSums, StoredCompanions
from muonmesh.step.update_squares import UpdateSquares

_WORTH_A_THREAD = 1 << 18
"""From this number of elements on, threads share a set of equal matrices. For fewer elements, waiting for the Python
code of other threads costs more time than it saves (measured)."""


class MuonStep(Work):
    """The step of Muon's parameters: reads, computes and writes for the exchange (`muonmesh.comm.work.Work`).

    Pieces are views of the local storage, read as a contiguous array. If a storage is not contiguous, the step works on
    a contiguous copy. One kernel takes all pieces of a table if it can (`ByKernel`). The parts of the rule take all
    others: on a CPU each thread takes one piece after the other, so that a piece stays in the cache.

    Args:
        ready: The parameters of the step.
        elementwise: One function for each group of an elementwise rule, such as AdamW's; called while the first
            matrices travel.
        squares: Adds up the squares of the updates for `Muon.metrics`; None if no metrics are wanted.

    Attributes:
        companions: State of rules by row, column or matrix.
        summands: The sums that rules take over matrices.
    """

    def __init__(
        self,
        ready: ReadyParameters,
        elementwise: Sequence[Callable[[], None]],
        squares: UpdateSquares | None,
    ) -> None:
        self._ready, self._elementwise, self._update_squares = ready, elementwise, squares
        self.companions: StoredCompanions = StoredCompanions(ready)
        self.summands: RuleSums = RuleSums(ready, self.companions)
        self._by_kernel = ByKernel(ready, squares)
        self._agreed: Tensor | None = None  # the largest momenta of the blocks that ranks share

    def fetch(self, assignments: Sequence[int]) -> None:
        """Begin to copy the state of these matrices' parameters to the device, if it is in CPU memory."""
        if self._ready.copies is not None:
            self._ready.collect(assignments)

    def step_elementwise(self) -> None:
        """Step the parameters of elementwise rules, such as AdamW's parameters."""
        for step_group in self._elementwise:
            step_group()

    # ---------------------------------------------------------------- gradients

    def prepare(self, assignments: Sequence[int], elements: Elements) -> None:
        """Create missing state, fold the gradients into the momenta of matrices, and write directions."""
        ready = self._ready
        ready.arrive(assignments)
        if ready.blocks is not None:  # first, because directions are computed from the decoded codes
            for number in dict.fromkeys(row.assignment for row in elements.table.rows):
                self._fold_coded(number)
        self._run(self._fold, elements, self._by_kernel.fold(elements))
        ready.have_read(assignments)

    def _run(self, task: Callable[[Elements, Sequence[Row]], None], elements: Elements, rows: Sequence[Row]) -> None:
        """Run a task for some rows of a table: small equal rows together, all others one by one."""
        together = rows is elements.table.rows and self._update_squares is None
        some = list(runs(self._ready, elements.table)) if together else [(row,) for row in rows]
        run_all([functools.partial(task, elements, each) for each in some], device=self._ready.device)

    def _fold(self, elements: Elements, rows: Sequence[Row]) -> None:
        """Fold the gradients of rows into their momenta, and write the directions."""
        if len(rows) > 1 and fold_together(self._ready, elements, rows):
            return
        for row in rows:
            into = elements.view(row)
            if self._ready.here(row.assignment).momenta is not None:
                folds = self._ready.blocks is None and self._ready.nonzero[row.assignment] is not False
                self._fold_piece(row.assignment, row.piece, into=into, folds=folds)
            elif into is not None:  # without state no gradient has ever been folded in, so the direction is zero
                into.zero_()

    def _fold_piece(self, number: int, piece: Piece, *, into: Tensor | None, folds: bool) -> dict[str, Tensor]:
        """Fold the gradient of a piece, and write its direction; return its momentum, decoded if it is in int8."""
        entry, rule, active = self._ready.here(number), self._ready.rule(number), self._ready.mask(number)
        assert entry.gradient is not None
        assert entry.momenta is not None
        state = {
            key: kept.read(number, piece) if isinstance(kept, Momentum) else view_in_storage(kept, piece)
            for key, kept in entry.momenta.items()
        }
        if folds or into is not None:
            parts.fold(rule, view_in_storage(entry.gradient, piece), state, active=active, into=into, folds=folds)
        return state

    def _fold_coded(self, number: int) -> None:
        """Fold the gradient of a matrix into momentum that is kept in int8."""
        entry = self._ready.here(number)
        kept = [one for one in (entry.momenta or {}).values() if isinstance(one, Momentum)]
        if not kept or (self._ready.nonzero[number] is False and all(one.loaded is None for one in kept)):
            return  # no gradient is folded in, and no loaded momentum is encoded
        # Read all pieces before any is written: pieces may share a block, whose old scale a write replaces.
        for piece, values in [(piece, self._decoded(number, piece)) for piece in self._ready.holdings[number]]:
            for one, value in zip(kept, values.values(), strict=True):
                one.write(number, piece, value, self._agreed)

    def _decoded(self, number: int, piece: Piece) -> dict[str, Tensor]:
        """Return the int8 momentum of a piece, decoded and with the gradient folded in."""
        return self._fold_piece(number, piece, into=None, folds=self._ready.nonzero[number] is not False)

    def measure_blocks(self, into: Tensor) -> None:
        """Write the largest momentum of each block that ranks share, as it will be after this step."""
        blocks = self._ready.blocks
        assert blocks is not None
        self._ready.collect(blocks.shared)
        for number in blocks.shared:
            entry = self._ready.entry(number)
            if entry is None or entry.momenta is None:
                continue
            for piece in self._ready.holdings[number]:
                values = self._decoded(number, piece)
                for key, kept in entry.momenta.items():
                    assert isinstance(kept, Momentum)
                    kept.measure(number, piece, values[key], into)
        self._agreed = into

    # ---------------------------------------------------------------- whole matrices

    def compute(self, batches: Sequence[tuple[Tensor, Tensor, Sequence[int]]]) -> None:
        """Orthogonalize batches; each is a tuple (matrices, results, their assignments)."""
        tasks: list[tuple[int, Callable[[], None]]] = []
        for batch, out, assignments in batches:
            size = self.at_once(len(batch), assignments[0])
            flops = self._ready.plan.assignments[assignments[0]].flops
            for start in range(0, len(assignments), size):
                some = slice(start, start + size)
                task = functools.partial(self.orthogonalize_batch, batch[some], out[some], assignments[some])
                tasks.append((flops * len(assignments[some]), task))
        self._run_costly(tasks)

    def at_once(self, count: int, number: int) -> int:
        """Return how many of ``count`` matrices that are equal to this one are orthogonalized by one task."""
        if self._ready.device.type != "cpu":  # where each call has the whole device
            return self._ready.at_once(number)
        numel = self._ready.plan.assignments[number].matrix.numel
        threads = 1 if count * numel < _WORTH_A_THREAD else torch.get_num_threads()
        at_once = self._ready.orthogonalizer(number).at_once
        turns = -(-count // (threads * at_once))  # tasks of each thread, so that all threads have equally many matrices
        return max(1, -(-count // (threads * turns)))

    def _run_costly(self, tasks: Sequence[tuple[int, Callable[[], None]]]) -> None:
        """Run (cost, task) pairs, the costliest first, each on a thread of its own (exceptions: see `run_all`)."""
        tasks = sorted(tasks, key=lambda task: -task[0])
        run_all([task for _, task in tasks], device=self._ready.device, costs=[cost for cost, _ in tasks])

    def orthogonalize_batch(self, batch: Tensor, out: Tensor, assignments: Sequence[int]) -> None:
        """Orthogonalize matrices of one group and shape, including what their rule does before and afterwards."""
        rule, orthogonalizer = self._ready.rule(assignments[0]), self._ready.orthogonalizer(assignments[0])
        if rule.balances():
            for assignment, matrix in zip(assignments, batch.unbind(), strict=True):
                own, planned = self._ready.rule_in_turn(assignment), self._ready.matrix(assignment)
                with self.companions.of(assignment) as kept:
                    parts.change_whole(own.balance, matrix, kept, rows=planned.rows, cols=planned.cols)
        if rule.orthogonalizes:
            orthogonalizer(batch, out=out, overwrite=not rule.sees_direction, graphs=self._ready.graphs)
        else:
            out.copy_(batch)
        if rule.changes_matrices():
            for assignment, direction, matrix in zip(assignments, batch.unbind(), out.unbind(), strict=True):
                own, planned = self._ready.rule_in_turn(assignment), self._ready.matrix(assignment)
                seen = direction if own.sees_direction else None
                with self.companions.of(assignment) as kept:
                    parts.change_whole(own.whole, matrix, kept, rows=planned.rows, cols=planned.cols, direction=seen)

    # ---------------------------------------------------------------- weights

    def finalize(self, elements: Elements) -> None:
        """Decay and update the elements of a table, unless their matrix stays unchanged."""
        self._run(self._apply, elements, self._by_kernel.apply(elements))
        self._ready.have_written(elements.table)

    def _apply(self, elements: Elements, rows: Sequence[Row]) -> None:
        """Decay and update the weights of rows."""
        if len(rows) > 1 and apply_together(self._ready, elements, rows):
            return
        for row in rows:
            if self._ready.changes(row):
                self._apply_one(row, elements)

    def _apply_one(self, row: Row, elements: Elements) -> None:
        ready, number, update = self._ready, row.assignment, elements.view(row)
        assert update is not None
        rule, member = ready.rule(number), ready.here(number).member
        weights, rounded, beside = ready.weights(row)
        stochastic = weights.dtype == torch.bfloat16
        rounding = rounding_of(member.name, member.storage, rule, row.piece) if stochastic else None
        stepped = weights if rounding is None else weights.float()
        sums, told = self.summands.found(number)
        squares: list[Tensor] | None = None if self._update_squares is None else []
        parts.apply(
            *(rule, stepped, update, beside),
            scale=ready.scale(number),
            active=ready.mask(number),
            sums=sums,
            told=told,
            squares=squares,
            rounded=rounded,
        )
        if rounding is not None:
            rounding.write(stepped, weights)
        if self._update_squares is not None and squares is not None:
            self._update_squares.add(ready.group(number), torch.stack(squares).sum() / member.storage.copies)

    # ---------------------------------------------------------------- matrices of this rank alone

    def run_local(self, groups: Sequence[Local]) -> None:
        """Do the whole step of matrices that only this rank holds, with a batch of equal matrices in each task.

        On a CPU each task has a thread of its own, and each operation finds the result of the previous operation in the
        cache. On a device the batches follow each other, and state in CPU memory is copied one batch ahead.
        """
        ready, batches = self._ready, list[Local]()
        for group in groups:
            size = self.at_once(len(group.assignments), group.assignments[0])
            if ready.copies is not None:
                size = min(size, ready.copies.at_once(group.numel))
            batches += group.cut(size)
        if ready.device.type == "cpu" and ready.copies is None:
            for batch in batches:
                ready.arrive(batch.assignments)  # by this thread, as the threads may share a parameter
            flops = [ready.plan.assignments[batch.assignments[0]].flops * len(batch.assignments) for batch in batches]
            self._run_costly(
                [(cost, functools.partial(self._local, b)) for cost, b in zip(flops, batches, strict=True)]
            )
            return
        for number, batch in enumerate(batches):
            for after in batches[number + 1 : number + 2]:
                self.fetch(after.assignments)
            self._local(batch)

    def _local(self, batch: Local) -> None:
        numbers = batch.assignments
        x, out = self._memory(numbers)
        self.prepare(numbers, Elements(batch.reads, (x,)))
        self.orthogonalize_batch(x, out, numbers)
        updates = Elements(batch.writes, (out,))
        if asked := self._ready.plan.summed(numbers):
            MatrixSums(self._ready.plan, rank=this_rank(), device=self._ready.device).take(
                asked, updates, self.summands
            )
        self.finalize(updates)

    def _memory(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return memory for matrices and their results: the memory of their CUDA graph, if they have a graph."""
        ready, dtype = self._ready, self._ready.precision.compute
        shape = len(numbers), *ready.plan.assignments[numbers[0]].matrix.shape
        if ready.graphs is not None:
            overwrite = not ready.rule(numbers[0]).sees_direction
            key = ready.orthogonalizer(numbers[0]).graph_key(shape, dtype, overwrite=overwrite)
            if (found := ready.graphs.memory(*key)) is not None:
                return found
        x, out = (scratch(role, shape, dtype=dtype, device=ready.device) for role in ("matrices", "results"))
        return x, out
