"""StepCallbacks: the methods by which an exchange lets the optimizer read, compute and write."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from muonmesh.comm.views import Elements
from muonmesh.layout import Piece
from muonmesh.layout.piece_table import PieceTable, Row
from muonmesh.layout.plan import Shapes


class SharedLayout(NamedTuple):
    """Where a batch lies in a memory that also has room to compute in.

    Attributes:
        numel: The number of elements of this memory.
        matrices, results: Where the matrices and their results begin; they may overlap.
    """

    numel: int
    matrices: int
    results: int


@dataclass(frozen=True, eq=False)
class LocalBatch:
    """Matrices that only this rank holds and owns, so that they need no transfer, and one task computes them.

    Attributes:
        assignments: The matrices.
        shapes: Their shapes, see `Plan.shapes`.
        summed: Those that need sums before they are written, see `Plan.summed`.
        reads, writes: Their pieces. The buffer is a batch of the matrices, in their order.
        shared_layout: Where they lie with their results, if both share one memory; else None.
    """

    assignments: tuple[int, ...]
    shapes: tuple[tuple[int, int, int], ...]
    summed: Mapping[int, int]
    reads: PieceTable
    writes: PieceTable
    shared_layout: SharedLayout | None = None

    @cached_property
    def numel(self) -> int:
        """The number of elements of the matrices."""
        return sum(map(math.prod, self.shapes))

    @cached_property
    def memory(self) -> Sequence[tuple[str, tuple[int]]]:
        """The roles and shapes of its memory: one for matrices and results each, or one that both share."""
        if self.shared_layout is not None:
            return (("matrices", (self.shared_layout.numel,)),)
        return ("matrices", (self.numel,)), ("results", (self.numel,))

    def buffers(self, memory: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the buffers of matrices and results in the memory of the batch."""
        if self.shared_layout is None:
            matrices, results = memory
        else:
            starts = self.shared_layout.matrices, self.shared_layout.results
            matrices, results = (memory[0][start : start + self.numel] for start in starts)
        return matrices, results


class Batching:
    """Which matrices are computed together.

    This base class is for a rank that owns nothing.
    """

    def batch_size(self, number: int, count: int, *, stays: bool = False) -> int:
        """Return how many matrices like matrix ``number`` one task computes, if ``count`` may be together.

        ``stays``: They stay on their rank, so that their state is read for these alone.
        """
        return count

    def joins(self, number: int, shape: tuple[int, int]) -> Hashable:
        """Return what is equal for matrices that one task may compute, if their settings are."""
        return shape

    def fits(self, number: int, shapes: Shapes, *, stays: bool = False) -> bool:
        """Return whether one task may compute matrices of several shapes, among them matrix ``number``."""
        return False

    def shared_layout(self, number: int, shapes: Shapes) -> SharedLayout | None:
        """Return where matrices that stay lie with their results, if both may share one memory."""
        return None


class FactoredCallbacks:
    """State of rules by row, column or matrix: reads and writes the part that this rank stores.

    This base class is for a rank that stores none of it.
    """

    def read(self, assignment: int, key: str, piece: Piece, into: Tensor) -> None:
        """Write a piece of the state of a matrix ``into`` a tensor of the piece's shape, with any strides.

        ``key`` is the key of this state in the state of the assignment's parameter.
        """
        into.zero_()

    def take(self, states: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Receive the state of the matrices that this rank owns, by assignment and key.

        Rules write these tensors in place, and they are sent back afterwards.
        """

    def write(self, assignment: int, key: str, piece: Piece, numbers: Tensor) -> None:
        """Store a piece of state that the owner has changed, unless its matrix stays unchanged."""


class SumCallbacks:
    """The sums of rules over whole matrices: computes this rank's contributions, and receives the results.

    This base class is for a rank that contributes nothing.
    """

    def exponents(self, row: Row, update: Tensor, into: Tensor) -> None:
        """Write the largest exponent of a row's summands, for each sum over its matrix.

        Args:
            row: Elements of a matrix with sums (`Plan.summed`).
            update: The update of its elements, in the shape of its piece; contiguous on a CPU.
            into: int64 (sums,); zeros before.
        """

    def limbs(self, row: Row, update: Tensor, exponents: Tensor, into: Tensor) -> None:
        """Write the contribution of a row's elements to each sum, as integers; see `muonmesh.numerics.exact`.

        Args:
            row: Elements of a matrix with sums (`Plan.summed`).
            update: The update of its elements, in the shape of its piece; contiguous on a CPU.
            exponents: The largest exponents over the whole matrix, int64 (sums,).
            into: int64 (sums, 2); zeros before.
        """

    def tell(self, assignment: int, into: Tensor) -> None:
        """Write the state that a rule keeps as one number for a matrix, if this rank owns the matrix.

        Args:
            assignment: The matrix.
            into: fp64 (numbers,), in the order of `Plan.keys_with_sums`; zeros before.
        """

    def take(self, assignment: int, sums: Tensor, state: Tensor) -> None:
        """Receive the sums over a matrix, fp64 (sums,), and its owner's numbers of `tell`, before it is written."""


class StepCallbacks:
    """The methods that an exchange calls to let the optimizer read, compute and write.

    `Exchange.run` makes these calls in each step, on every rank unless stated otherwise:

    1. If rules have factored states that travel: ``factored_states.read`` for each piece that this rank stores, and
       ``take`` once with those of the matrices that it owns.
    2. `prepare` for the matrices of the first bucket, which then travel to their owners.
    3. `step_elementwise`, once.
    4. For each bucket in turn: `prepare` for the next bucket; `compute` for each batch of matrices that this rank owns;
       `finalize` for the results that this rank stores, those that have to arrive while the next bucket is computed.
       If rules need sums over matrices, `finalize` comes after ``summands.exponents``, ``tell``, ``limbs`` and
       ``take``.
    5. Between buckets, `repeat` for each batch of matrices that only this rank holds; other ranks do not take part.
    6. ``factored_states.write`` for each piece of factored state that this rank stores.

    On a CPU, `compute` and `repeat` are called by several threads at a time, each for matrices of its own.

    This base class is for a rank that only takes part in the collectives of the other ranks: it sends zeros, and writes
    nothing.

    The rows of `Elements` name elements of one matrix each: their places in the local storage of parameter number
    ``row.parameter`` of the plan, read as a contiguous array, and in a buffer.

    Attributes:
        factored_states: State of rules by row, column or matrix.
        summands: This rank's contributions to sums over matrices.
    """

    factored_states: FactoredCallbacks = FactoredCallbacks()
    summands: SumCallbacks = SumCallbacks()

    def prepare(self, assignments: Sequence[int], elements: Elements, ahead: Sequence[int] = ()) -> None:
        """Fold the gradients of matrices into their momenta, and write the input of the orthogonalization.

        Each matrix is prepared once in a step. One that needs a transfer is prepared on every rank, even if the rank
        stores nothing of it. ``elements`` are all pieces whose momentum this rank stores, some of them in no buffer.
        ``ahead`` are the matrices that are prepared next, so that their state can be on its way.
        """
        for _, into in elements:
            into.zero_()

    def repeat(self, batch: LocalBatch, run: Callable[..., object], memory: Sequence[Tensor]) -> None:
        """Let ``run(*memory)`` prepare, compute and finalize a batch; `LocalBatch.buffers` are in its memory."""
        run(*memory)

    def compute(
        self, matrices: Sequence[int], batch: Sequence[Tensor], out: Sequence[Tensor], memory: Tensor | None = None
    ) -> None:
        """Orthogonalize matrices of the same settings, (b, rows, cols) for each shape; any thread may call this.

        ``memory`` is what both lie in, if they share it (`LocalBatch.shared_layout`).
        """
        for results in out:
            results.zero_()

    def finalize(self, elements: Elements) -> None:
        """Apply the updates in the buffers to the elements that this rank stores."""

    def step_elementwise(self) -> None:
        """Step AdamW's parameters, which need no exchange, while the first transfer is under way."""
