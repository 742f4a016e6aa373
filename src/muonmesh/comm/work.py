"""Work: the interface by which an exchange lets the optimizer read, compute and write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import Tensor

from muonmesh.layout import Piece
from muonmesh.layout.region import row_major
from muonmesh.layout.routes import Leg

LegViews = tuple[tuple[Leg, Tensor], ...]
"""Legs whose storage is on this rank, each with the view that its elements are read into or written from."""


@dataclass(frozen=True)
class Local:
    """A Matrix that only one rank holds and owns, so that this matrix needs no transfer."""

    assignment: int
    read: tuple[Leg, ...]
    write: tuple[Leg, ...]

    @cached_property
    def stored(self) -> Literal["as it is", "transposed", "in pieces"]:
        """How the matrix is stored from `start` on, compared with the assembled matrix."""
        first, *rest = {leg.piece for leg in (*self.read, *self.write)}
        dims = [dim for dim, size in enumerate(first.shape) if size != 1]
        shape = tuple(first.shape[dim] for dim in dims)
        there, here = (tuple(strides[d] for d in dims) for strides in (first.storage_strides, first.matrix_strides))
        if rest or first.matrix_start or there != row_major(shape):
            return "in pieces"
        if here == there:
            return "as it is"
        return "transposed" if len(shape) == 2 and here == (1, shape[0]) else "in pieces"

    @cached_property
    def start(self) -> int:
        """The place of the matrix's first element in the storage, if it is not stored in pieces."""
        return self.read[0].piece.storage_start


class CompanionState:
    """State of rules by row, column or matrix: reads and writes the part that this rank stores.

    This base class is for a rank that stores none of it.
    """

    def read(self, assignment: int, key: str, piece: Piece, into: Tensor) -> None:
        """Write a piece of the state of a matrix ``into`` a tensor of the piece's shape, with any strides.

        ``key`` is the key of this state in the state of the assignment's parameter.
        """
        into.zero_()

    def take(self, kept: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Receive the state of the matrices that this rank owns, by assignment and key.

        Rules write these tensors in place, and they are sent back afterwards.
        """

    def write(self, assignment: int, key: str, piece: Piece, numbers: Tensor) -> None:
        """Store a piece of state that the owner has changed, unless its matrix stays unchanged."""


class Summands:
    """The sums of rules over whole matrices: computes this rank's contributions, and receives the results.

    This base class is for a rank that contributes nothing.
    """

    def exponents(self, leg: Leg, update: Tensor, into: Tensor) -> None:
        """Write the largest exponent of a leg's summands, for each sum over its matrix.

        Args:
            leg: A leg of a matrix with sums (`Plan.summed`).
            update: The update of its elements, in the shape of its piece; contiguous on a CPU.
            into: int64 (sums,); zeros before.
        """

    def limbs(self, leg: Leg, update: Tensor, exponents: Tensor, into: Tensor) -> None:
        """Write the contribution of a leg's elements to each sum, as integers; see `muonmesh.numerics.exact`.

        Args:
            leg: A leg of a matrix with sums (`Plan.summed`).
            update: The update of its elements, in the shape of its piece; contiguous on a CPU.
            exponents: The largest exponents over the whole matrix, int64 (sums,).
            into: int64 (sums, 2); zeros before.
        """

    def tell(self, assignment: int, into: Tensor) -> None:
        """Write the state that a rule keeps as one number for a matrix, if this rank owns the matrix.

        Args:
            assignment: The matrix.
            into: fp64 (numbers,), in the order of `Plan.told`; zeros before.
        """

    def take(self, assignment: int, sums: Tensor, told: Tensor) -> None:
        """Receive the sums over a matrix, fp64 (sums,), and its owner's numbers of `tell`, before it is written."""


class Work:
    """The methods that an exchange calls to let the optimizer read, compute and write.

    This base class is the work of a rank that only takes part in the collectives of the other ranks: it sends zeros,
    and writes nothing.

    A `Leg` names elements of one matrix: their places in the local storage of parameter number ``leg.parameter`` of the
    plan, read as a contiguous array, and their places in the assembled matrix.

    Attributes:
        companions: State of rules by row, column or matrix.
        summands: This rank's contributions to sums over matrices.
    """

    companions: CompanionState = CompanionState()
    summands: Summands = Summands()

    def measure_blocks(self, into: Tensor) -> None:
        """Write the largest momentum of each block that several pieces share: int32 (blocks,), zeros before.

        This method is called first, if momentum is kept in int8 and there are such blocks. Keep ``into``: when the
        momentum is written, ``into`` has the maxima over all ranks.
        """

    def fetch(self, assignments: Sequence[int]) -> None:
        """Begin to copy state of matrices from CPU memory to the device; called one bucket before they are read."""

    def read(self, assignments: Sequence[int], legs: LegViews) -> None:
        """Fold the gradients of matrices into their momenta, and write the input of the orthogonalization for each leg.

        Each matrix that needs a transfer is read once in a step, on every rank, even if the rank stores nothing of it.
        The view of a leg has the shape of its piece, with any strides.
        """
        for _, into in legs:
            into.zero_()

    def run_local(self, alike: Sequence[Sequence[Local]]) -> None:
        """Read, orthogonalize and write matrices that only this rank holds; `read` has not been called for them.

        The matrices of each inner sequence have the same shape and the same settings.
        """

    def orthogonalize(self, batches: Sequence[tuple[Tensor, Tensor, Sequence[int]]]) -> None:
        """Orthogonalize batches: matrices (b, rows, cols), the tensor for their results, and their assignments.

        The matrices of a batch have the same settings.
        """
        for _, out, _ in batches:
            out.zero_()

    def write(self, legs: LegViews) -> None:
        """Apply an update to each leg's elements; its view has the shape of the leg's piece, with any strides."""

    def step_elementwise(self) -> None:
        """Step AdamW's parameters, which need no exchange, while the first transfer is under way."""
