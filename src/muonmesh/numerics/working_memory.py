"""WorkingMemory: where a device keeps a batch of matrices while it orthogonalizes them, all of it in one memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

Shapes = Sequence[tuple[int, int, int]]
"""Matrices of a batch: for each shape their number, rows and cols, rows ≤ cols; all have equally many rows."""

_ALIGNMENT = 64
"""Elements to whose multiples squares are rounded up. Every dtype then begins at a multiple of 64 bytes."""


@dataclass(frozen=True)
class WorkingMemory:
    """The places of a batch in one memory, in elements.

    A product X ← Q X cannot write where it reads. So X lies behind a gap that is as large as the part of X which one
    launch multiplies. The first product moves X into the gap, one part after the other, each to where the part before
    it was. Then the gap is behind X, and the next product moves X back, the last part first. Beside the gap, before X,
    is the memory of Q. Between the products of X, the squares take all memory that X does not:

        | squares, the first one for Q     gap | X                          |      even turns
        | squares, the first one for Q | X                          gap     |      odd turns

    Attributes:
        shapes: The matrices. They begin at multiples of 64 bytes.
        squares: The number of rows × rows matrices in use at once, for each product X ← Q X.
        one_by_one: Whether each matrix is a part of its own; else all of one shape are one.
    """

    shapes: tuple[tuple[int, int, int], ...]
    squares: tuple[int, ...]
    one_by_one: bool

    @cached_property
    def square(self) -> int:
        """The elements of a square of each matrix."""
        return squares_of(self.shapes)

    @cached_property
    def _gap(self) -> int:
        return max(rows * cols * (1 if self.one_by_one else count) for count, rows, cols in self.shapes)

    @cached_property
    def _first(self) -> int:
        """Where X begins in even turns."""
        in_gap, needed = self._gap // self.square, self._gap + self.square
        for product_number, squares in enumerate(self.squares):
            needed = max(
                needed, self._gap + (squares - in_gap) * self.square if product_number % 2 else squares * self.square
            )
        return needed

    @cached_property
    def numel(self) -> int:
        """The elements of the memory."""
        return self._first + sum(map(math.prod, self.shapes))

    def matrices(self, product_number: int) -> int:
        """Return where X begins after so many products X ← Q X."""
        return self._first - self._gap * (product_number % 2)

    @property
    def results(self) -> int:
        """Where the results begin."""
        return self.matrices(len(self.squares))

    def views(self, memory: Tensor, start: int) -> list[Tensor]:
        """Return the matrices that begin at an element of the memory, (count, rows, cols) for each shape."""
        starts = itertools.accumulate(map(math.prod, self.shapes), initial=start)
        pairs, first = zip(self.shapes, starts, strict=False), memory.storage_offset()
        return [memory.as_strided(shape, (shape[1] * shape[2], shape[2], 1), first + at) for shape, at in pairs]

    def places(self, product_number: int) -> list[int]:
        """Return where the squares begin after so many products; the first of them stays while X moves."""
        ends = [(0, self.matrices(product_number))]
        if product_number % 2:
            ends.append((self.numel - self._gap, self.numel))
        starts = [start for begin, end in ends for start in range(begin, end - self.square + 1, self.square)]
        return starts[: self.squares[product_number]]


@dataclass(frozen=True)
class Needs:
    """What a device needs to orthogonalize batches of some matrices.

    Attributes:
        squares, one_by_one: See `WorkingMemory`.
        in_place: Whether the results may lie in the memory of the matrices.
    """

    squares: tuple[int, ...]
    one_by_one: bool
    in_place: bool

    def layout(self, shapes: Shapes) -> WorkingMemory | None:
        """Return where a batch lies with its results and squares in one memory; None if it cannot."""
        return WorkingMemory(tuple(shapes), self.squares, self.one_by_one) if self.in_place else None

    def __call__(self, shapes: Shapes, memories: int) -> int:
        """Return how many elements a batch needs for its squares, and in none, one or two memories for X and results.

        One: they share it, with the squares, if they can.
        """
        if memories == 1 and (layout := self.layout(shapes)) is not None:
            return layout.numel
        return max(self.squares) * squares_of(shapes) + (2 if memories else 0) * sum(map(math.prod, shapes))


def squares_of(shapes: Shapes) -> int:
    """Return the elements of a rows × rows matrix for each matrix of a batch, up to where another one may begin."""
    numel = sum(count * rows * rows for count, rows, _ in shapes)
    return -(-numel // _ALIGNMENT) * _ALIGNMENT


def squares_at_once(degrees: Sequence[int]) -> int:
    """Return how many rows × rows matrices some steps on one Gram matrix need at once (`DeviceIteration`).

    Args:
        degrees: The number of coefficients of each step.
    """
    long = [degree > 3 for degree in degrees]  # powers beyond the square: two take turns
    if len(degrees) == 1:
        return 2 + long[0]
    # The Gram matrix, the factor so far and the step's polynomial; and what follows from two of them.
    return 3 + (len(degrees) > 2 or any(long[1:]))
