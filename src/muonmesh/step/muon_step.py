"""MuonStep: the step of Muon's parameters: the work on matrices before, between and after the transfers."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from muonmesh.comm.matrix_sums import MatrixSums
from muonmesh.comm.storage import this_rank
from muonmesh.comm.views import view_in_matrix, view_in_storage
from muonmesh.comm.work import LegViews, Local, Work
from muonmesh.layout import Piece
from muonmesh.numerics.kernels.memory import scratch
from muonmesh.numerics.kernels.threads import run_all
from muonmesh.numerics.rules import parts
from muonmesh.numerics.rules.on_device import Folded, Updated
from muonmesh.step.blocks import Momentum
from muonmesh.step.parameter_steps import Momenta, ParameterStep
from muonmesh.step.ready import ReadyParameters
from muonmesh.step.stack import SMALL, Stack
from muonmesh.step.stored_companions import RuleSums, StoredCompanions
from muonmesh.step.update_squares import UpdateSquares

_WORTH_A_THREAD = 1 << 18
"""From this number of elements on, threads share a set of equal matrices. For fewer elements, waiting for the Python
code of other threads costs more time than it saves (measured)."""


class MuonStep(Work, ABC):
    """The step of Muon's parameters: reads, computes and writes for the exchange (`muonmesh.comm.work.Work`).

    Pieces are views of the local storage, read as a contiguous array. If a storage is not contiguous, the step works on
    a contiguous copy. `HostStep` and `DeviceStep` differ in how many pieces they work on at a time.

    Args:
        ready: The parameters of the step.
        elementwise: One function for each group of an elementwise rule, such as AdamW's; called while the first
            matrices travel.
        squares: Adds up the squares of the updates, and singular values, for `Muon.metrics`; None if no metrics are
            wanted.

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

    def read(self, assignments: Sequence[int], legs: LegViews) -> None:
        """Create missing state, fold the gradients into the momenta of matrices, and write legs' directions."""
        self._ready.arrive(assignments)
        self.fold(self.pieces(assignments, legs))
        self._ready.have_read(assignments)

    @abstractmethod
    def fold(self, pieces: Sequence[Folded]) -> None:
        """Fold gradients into momenta and write directions. Pieces that are only read come after the folded pieces."""

    def pieces(self, assignments: Sequence[int], legs: LegViews) -> list[Folded]:
        """Return the pieces to fold, and then the pieces that are only read, with views for their directions.

        If a stored piece is also a read piece, which is nearly always so, one pass folds its gradient and writes its
        direction. Momentum in int8 is folded here, because directions are computed from its decoded codes.
        """
        found: dict[object, Folded] = {}
        for number in assignments:
            entry = self._ready.entry(number)
            if entry is None or entry.momenta is None:
                continue
            loaded = [kept.loaded for kept in entry.momenta.values() if isinstance(kept, Momentum)]
            if self._ready.nonzero[number] is False and all(value is None for value in loaded):
                continue  # no gradient is folded in, and no loaded momentum is encoded
            if self._ready.blocks is not None:
                self._fold_coded(number, entry, entry.momenta)
                continue
            for piece in self._ready.holdings[number]:
                found[number, piece] = _piece(entry, number, piece, folds=True)
        reads: list[Folded] = []
        for leg, into in legs:
            entry, key = self._ready.here(leg.assignment), (leg.assignment, leg.piece)
            if entry.momenta is None:  # without state no gradient has ever been folded in, so the direction is zero
                into.zero_()
            elif (known := found.get(key)) is not None and known.into is None:
                found[key] = known._replace(into=into)
            else:
                reads.append(_piece(entry, leg.assignment, leg.piece, folds=False)._replace(into=into))
        return [*found.values(), *reads]

    def _fold_coded(self, number: int, entry: ParameterStep, momenta: Momenta) -> None:
        """Fold the gradient of a matrix into momentum that is kept in int8."""
        # Read all pieces before any is written: pieces may share a block, whose old scale a write replaces.
        folded = [(piece, self._with_gradient(number, entry, piece)) for piece in self._ready.holdings[number]]
        for piece, values in folded:
            for key, kept in momenta.items():
                assert isinstance(kept, Momentum)
                kept.write(number, piece, values[key], self._agreed)

    def _with_gradient(self, number: int, entry: ParameterStep, piece: Piece) -> dict[str, Tensor]:
        """Return the decoded int8 momentum of a piece, by key, with the gradient folded in."""
        some = _piece(entry, number, piece, folds=True)
        if self._ready.nonzero[number] is not False:
            self.fold_one(some)
        return dict(some.state)

    def fold_one(self, piece: Folded) -> None:
        """Fold the gradient of a piece and write its direction; write only the direction if ``folds`` is false."""
        rule, active = self._ready.rule(piece.matrix), self._ready.mask(piece.matrix)
        parts.fold(rule, piece.gradient, piece.state, active=active, into=piece.into, folds=piece.folds)

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
                values = self._with_gradient(number, entry, piece)
                for key, kept in entry.momenta.items():
                    assert isinstance(kept, Momentum)
                    kept.measure(number, piece, values[key], into)
        self._agreed = into

    # ---------------------------------------------------------------- matrices of this rank alone

    def take_sums(self, numbers: Sequence[int], legs: LegViews) -> None:
        """Compute the sums that rules need over matrices that only this rank holds."""
        if asked := self._ready.plan.summed(numbers):
            MatrixSums(self._ready.plan, rank=this_rank(), device=self._ready.device).take(asked, legs, self.summands)

    # ---------------------------------------------------------------- whole matrices

    def orthogonalize(self, batches: Sequence[tuple[Tensor, Tensor, Sequence[int]]]) -> None:
        """Orthogonalize batches; each is a tuple (matrices, results, their assignments)."""
        tasks: list[tuple[int, Callable[[], None]]] = []
        for batch, out, assignments in batches:
            size = self.at_once(len(batch), assignments[0])
            flops = self._ready.plan.assignments[assignments[0]].flops
            for start in range(0, len(assignments), size):
                some = slice(start, start + size)
                task = functools.partial(self.orthogonalize_batch, batch[some], out[some], assignments[some])
                tasks.append((flops * len(assignments[some]), task))
        self.run(tasks)

    def at_once(self, count: int, number: int) -> int:
        """Return how many of ``count`` matrices that are equal to this one are orthogonalized by one task."""
        if self._ready.device.type != "cpu":  # where each call has the whole device
            return self._ready.at_once(number)
        numel = self._ready.plan.assignments[number].matrix.numel
        threads = 1 if count * numel < _WORTH_A_THREAD else torch.get_num_threads()
        at_once = self._ready.orthogonalizer(number).at_once
        turns = -(-count // (threads * at_once))  # tasks of each thread, so that all threads have equally many matrices
        return max(1, -(-count // (threads * turns)))

    def run(self, tasks: Sequence[tuple[int, Callable[[], None]]]) -> None:
        """Run (cost, task) pairs, the costliest first: in bf16 each on a thread of its own (exceptions: see `run_all`).

        In fp32 and fp64 the bits of a product depend on the number of threads that share it. So in these dtypes the
        tasks run one after the other, each on all threads, and the bits do not depend on the number of tasks.
        """
        tasks = sorted(tasks, key=lambda task: -task[0])
        ordered = [task for _, task in tasks]
        if self._ready.precision.compute == torch.bfloat16 and ordered:
            run_all(ordered, device=self._ready.device, costs=[cost for cost, _ in tasks])
        else:
            for task in ordered:
                task()

    def orthogonalize_batch(self, batch: Tensor, out: Tensor, assignments: Sequence[int]) -> None:
        """Orthogonalize matrices of one group and shape, including what their rule does before and afterwards."""
        times = self.steps_of(assignments)
        rule, orthogonalizer = self._ready.rule(assignments[0]), self._ready.orthogonalizer(assignments[0])
        if rule.balances():
            for assignment, matrix in zip(assignments, batch.unbind(), strict=True):
                own, planned = self._ready.rule_in_turn(assignment), self._ready.matrix(assignment)
                with self.companions.of(assignment) as kept:
                    parts.change_whole(own.balance, matrix, kept, rows=planned.rows, cols=planned.cols)
        if rule.orthogonalizes:
            orthogonalizer(batch, out=out, overwrite=not rule.sees_direction, times=times, graphs=self._ready.graphs)
        else:
            out.copy_(batch)
        if rule.changes_matrices():
            for assignment, direction, matrix in zip(assignments, batch.unbind(), out.unbind(), strict=True):
                own, planned = self._ready.rule_in_turn(assignment), self._ready.matrix(assignment)
                seen = direction if own.sees_direction else None
                with self.companions.of(assignment) as kept:
                    parts.change_whole(own.whole, matrix, kept, rows=planned.rows, cols=planned.cols, direction=seen)

    # ---------------------------------------------------------------- weights

    def write(self, legs: LegViews) -> None:
        """Decay and update the elements of legs, unless their matrix stays unchanged."""
        self.apply(self.summands.updates(legs))
        self._ready.have_written(legs)

    @abstractmethod
    def apply(self, pieces: Sequence[Updated]) -> None:
        """Decay and update the weights of these pieces."""

    def steps_of(self, assignments: Sequence[int]) -> Tensor | None:
        """Return the factors of results before sending, (n,); None: each rank multiplies the elements it writes."""
        return None


class HostStep(MuonStep):
    """A step on a CPU: each thread works on one piece after the other, so that a piece stays in the cache."""

    def fold(self, pieces: Sequence[Folded]) -> None:
        """Fold the gradients of these pieces into momentum, on all threads."""
        for folds in (True, False):
            tasks = [functools.partial(self.fold_one, piece) for piece in pieces if piece.folds == folds]
            run_all(tasks, device=self._ready.device)

    def apply(self, pieces: Sequence[Updated]) -> None:
        """Decay and update the weights of these pieces, on all threads."""
        run_all([functools.partial(self._apply_one, piece) for piece in pieces], device=self._ready.device)

    def _apply_one(self, piece: Updated) -> None:
        rule, active = self._ready.rule(piece.matrix), self._ready.mask(piece.matrix)
        wide = piece.widened()
        squares = wide.apply(rule, active, measured=self._update_squares is not None)
        piece.round(wide)
        if piece.rounded is not None:
            piece.rounded.copy_(piece.weights)
        if self._update_squares is not None:
            self._update_squares.add(self._ready.group(piece.matrix), torch.stack(squares).sum() / piece.copies)

    def run_local(self, alike: Sequence[Sequence[Local]]) -> None:
        """Do the whole step of matrices that only this rank holds, with a batch of equal matrices in each task.

        Each operation finds the result of the previous operation in the cache. In bf16 each task has a thread of its
        own, so no thread waits for another; see `MuonStep.run`.
        """
        tasks: list[tuple[int, Callable[[], None]]] = []
        numbers = [[matrix.assignment for matrix in some] for some in alike]
        for some, those in zip(alike, numbers, strict=True):
            assignment = self._ready.plan.assignments[those[0]]
            size = self.at_once(len(some), those[0])
            self._ready.arrive(those)
            for how in dict.fromkeys([local.stored for local in some]):
                stored = [local for local in some if local.stored == how]
                for start in range(0, len(stored), size):
                    batch = stored[start : start + size]
                    tasks.append((assignment.flops * len(batch), functools.partial(self._local, batch)))
        self.run(tasks)
        for those in numbers:
            self._ready.have_read(those)

    def _local(self, batch: Sequence[Local]) -> None:
        numbers = [local.assignment for local in batch]
        dtype, device, stack = self._ready.precision.compute, self._ready.device, self._stack(batch)
        matrix = self._ready.plan.assignments[numbers[0]].matrix
        x = scratch("matrices", (len(batch), *matrix.shape), dtype=dtype, device=device)
        out = scratch("results", x.shape, dtype=dtype, device=device)
        if stack is not None:
            into, updates = (x.mT, out.mT) if batch[0].stored == "transposed" else (x, out)
            stack.fold(into)
            self.orthogonalize_batch(x, out, numbers)
            stack.apply(matrix, updates)
            return
        for piece in self.pieces(numbers, leg_views_of(batch, x, read=True)):
            self.fold_one(piece)
        self.orthogonalize_batch(x, out, numbers)
        legs = leg_views_of(batch, out, read=False)
        self.take_sums(numbers, legs)
        for update in self.summands.updates(legs):
            self._apply_one(update)

    def _stack(self, batch: Sequence[Local]) -> Stack | None:
        """Return small equal matrices as one stack; None if a matrix is large, alone, or different from the others."""
        numbers = [local.assignment for local in batch]
        asked = (self._ready.blocks, self._ready.copies, self._update_squares) != (None, None, None)
        matrices = [self._ready.plan.assignments[number].matrix for number in numbers]
        if asked or len(batch) == 1 or matrices[0].numel > SMALL or len({matrix.rows for matrix in matrices}) > 1:
            return None
        if not all([self._ready.nonzero[number] is True for number in numbers]):
            return None
        return Stack.of(self._ready, batch)


def leg_views_of(batch: Sequence[Local], matrices: Tensor, *, read: bool) -> LegViews:
    """Return the legs of a batch that are read, or written, with their views of its matrices."""
    return tuple(
        (leg, view_in_matrix(leg.piece, matrix))
        for local, matrix in zip(batch, matrices.unbind(), strict=True)
        for leg in (local.read if read else local.write)
    )


def _piece(entry: ParameterStep, number: int, piece: Piece, *, folds: bool) -> Folded:
    """Return a piece of a gradient with its momentum: views of the momentum, or its decoded int8 codes."""
    assert entry.gradient is not None
    assert entry.momenta is not None
    state = {
        key: kept.read(number, piece) if isinstance(kept, Momentum) else view_in_storage(kept, piece)
        for key, kept in entry.momenta.items()
    }
    return Folded(view_in_storage(entry.gradient, piece), state, number, folds, None)
