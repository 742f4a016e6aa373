"""Work: the calls by which an exchange asks the optimizer to read, compute and write."""

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
"""Legs whose storage is on this rank, each with the view that it is read into, or written from."""


@dataclass(frozen=True)
class Local:
    """A Matrix that one rank holds whole, owns and shares with no other rank, so nothing of this matrix moves."""

    assignment: int
    read: tuple[Leg, ...]
    write: tuple[Leg, ...]

    @cached_property
    def stored(self) -> Literal["as it is", "transposed", "in pieces"]:
        """How it lies in the storage, from `start` on, as against where it is assembled."""
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
        """The place of its first element in the storage, if it is not stored in pieces."""
        return self.read[0].piece.storage_start


class CompanionState:
    """The numbers that rules keep by row, column or matrix: reads and writes those that this rank stores.

    As it stands it is that of a rank which stores none.
    """

    def read(self, assignment: int, key: str, piece: Piece, into: Tensor) -> None:
        """Write what is kept of a matrix ``into`` a tensor of the shape of the piece, any strides.

        ``key`` names it among what is kept of the parameter of the assignment.
        """
        into.zero_()

    def take(self, kept: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Take what is kept of the matrices that this rank owns, by assignment and key.

        It is written in place, and read from there when it travels back.
        """

    def write(self, assignment: int, key: str, piece: Piece, numbers: Tensor) -> None:
        """Keep numbers that `read` has read and the owner has changed, unless their matrix is left alone."""


class Summands:
    """The sums that rules take over whole matrices: gives what this rank adds to them, and takes the results.

    As it stands it is that of a rank which adds nothing.
    """

    def exponents(self, leg: Leg, update: Tensor, into: Tensor) -> None:
        """Write the largest exponent of a leg's elements in each sum that is taken over their matrix.

        Args:
            leg: Whose matrix has sums (`Plan.summed`).
            update: Of the shape of its piece; contiguous on a CPU.
            into: int64 (sums,); zeros before.
        """

    def limbs(self, leg: Leg, update: Tensor, exponents: Tensor, into: Tensor) -> None:
        """Write what a leg's elements add to these sums, as integers; see `muonmesh.numerics.exact`.

        Args:
            leg: As in `exponents`.
            update: As in `exponents`.
            exponents: The largest of all elements of the matrix, int64 (sums,).
            into: int64 (sums, 2); zeros before.
        """

    def tell(self, assignment: int, into: Tensor) -> None:
        """Write what is kept of a matrix as one number, if this rank owns it: fp64 (numbers,), zeros before.

        In the order of `Plan.told`.
        """

    def take(self, assignment: int, sums: Tensor, told: Tensor) -> None:
        """Take the sums over a matrix, fp64 (sums,), and what its owner has told, before any of it is written."""


class Work:
    """The calls by which the exchange asks the optimizer to read, compute and write. It knows nothing else of it.

    As it stands it is the work of a rank that takes part in what others wait for, and has nothing to read, compute or
    write itself: it sends zeros.

    A `Leg` names elements of one matrix: where they lie in the local storage of parameter number ``leg.parameter`` of
    the plan, read as a contiguous array, and where they lie in the assembled matrix.

    Attributes:
        companions: What rules keep by row, column or matrix.
        summands: What this rank adds to sums over matrices.
    """

    companions: CompanionState = CompanionState()
    summands: Summands = Summands()

    def measure_blocks(self, into: Tensor) -> None:
        """Write the largest momentum of each block that several pieces share: int32 (blocks,), zeros before.

        Called before anything else where momentum is kept in int8 and there are such blocks. Keep ``into``: when the
        momentum is written, it has the maxima over all ranks.
        """

    def fetch(self, assignments: Sequence[int]) -> None:
        """Begin to bring the state of matrices that lies on the host: called a bucket before they are read."""

    def read(self, assignments: Sequence[int], legs: LegViews) -> None:
        """Fold the gradients into the momenta of matrices, and write what is orthogonalized of each leg's elements.

        Each matrix that moves is read once a step, on every rank, also on those that store nothing of it. What is
        written has the shape of the leg's piece, any strides.
        """
        for _, into in legs:
            into.zero_()

    def run_local(self, alike: Sequence[Sequence[Local]]) -> None:
        """Read, orthogonalize and write matrices that are this rank's alone; `read` has not been called for them.

        Those of one sequence have one shape and one setting.
        """

    def orthogonalize(self, batches: Sequence[tuple[Tensor, Tensor, Sequence[int]]]) -> None:
        """Orthogonalize batches: matrices (b, rows, cols), where to write the results, and their assignments.

        Those of one batch share their settings.
        """
        for _, out, _ in batches:
            out.zero_()

    def write(self, legs: LegViews) -> None:
        """Apply to each leg's elements an update of the shape of its piece, any strides."""

    def step_elementwise(self) -> None:
        """Step AdamW's half, which needs no exchange, while the first transfer is under way."""
