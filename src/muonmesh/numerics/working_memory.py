"""WorkingMemory: where a device keeps a batch of matrices while it orthogonalizes them, all of it in one memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from muonmesh.numerics.kernels.product_table import SMALL_ROWS

BatchShape = Sequence[tuple[int, int, int]]
"""The matrices of a batch: for each shape their number, rows and cols, rows ≤ cols; all have equally many rows."""

_ALIGNMENT = 64
"""Elements to whose multiples squares are rounded up. Every dtype then begins at a multiple of 64 bytes."""
_BYTES = 64
"""Bytes at whose multiples whatever deflation needs begins."""


@dataclass(frozen=True)
class WorkingMemory:
    """The places of a batch in one memory, in elements.

    A product X ← Q X cannot write where it reads. So X lies behind a gap that is as large as the part of X which one
    launch multiplies. The first product moves X into the gap, one part after the other, each to where the part before
    it was. Then the gap is behind X, and the next product moves X back, the last part first. Beside the gap, before X,
    is the memory of Q. Between the products of X, the squares take all memory that X does not, and before the first of
    them deflation does:

        | squares, the first one for Q     gap | X                          |      even turns
        | squares, the first one for Q | X                          gap     |      odd turns

    Attributes:
        shapes: The matrices. They begin at multiples of 64 bytes.
        squares: The number of rows × rows matrices in use at once, for each product X ← Q X.
        one_by_one: Whether each matrix is a part of its own; else all of one shape are one.
        deflated: How many singular values of each are reduced first.
    """

    shapes: tuple[tuple[int, int, int], ...]
    squares: tuple[int, ...]
    one_by_one: bool
    deflated: int = 0

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
        in_gap = self._gap // self.square
        needed = max(self._gap + self.square, deflation_at_once(self.shapes, self.deflated))
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

    def places(self, product_number: int) -> list[int]:
        """Return where the squares begin after so many products; the first of them stays while X moves."""
        ends = [(0, self.matrices(product_number))]
        if product_number % 2:
            ends.append((self.numel - self._gap, self.numel))
        starts = [start for begin, end in ends for start in range(begin, end - self.square + 1, self.square)]
        return starts[: self.squares[product_number]]


@dataclass(frozen=True)
class PlacedBatch:
    """A batch that lies in one memory.

    Attributes:
        memory: The memory, (numel,), in the compute dtype.
        layout: Where everything lies in it.
    """

    memory: Tensor
    layout: WorkingMemory

    def matrices(self, product_number: int) -> list[Tensor]:
        """Return X after so many products X ← Q X, (count, rows, cols) for each shape."""
        shapes = self.layout.shapes
        starts = itertools.accumulate(map(math.prod, shapes), initial=self.layout.matrices(product_number))
        return [self._view(start, shape) for start, shape in zip(starts, shapes, strict=False)]

    @property
    def results(self) -> list[Tensor]:
        """The matrices after the last product."""
        return self.matrices(len(self.layout.squares))

    def squares(self, product_number: int) -> list[Tensor]:
        """Return the squares of all matrices, (matrices, rows, rows); the first of them stays while X moves."""
        count, rows = sum(count for count, _, _ in self.layout.shapes), self.layout.shapes[0][1]
        return [self._view(start, (count, rows, rows)) for start in self.layout.places(product_number)]

    def _view(self, start: int, shape: tuple[int, int, int]) -> Tensor:
        strides = shape[1] * shape[2], shape[2], 1
        return self.memory.as_strided(shape, strides, self.memory.storage_offset() + start)

    def take_in_turn(self) -> Callable[[Sequence[int], torch.dtype], Tensor]:
        """Return a function that returns memory for one tensor after the other, all before the first product."""
        free, taken = self.memory[: self.layout.matrices(0)].view(torch.uint8), 0

        def take(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
            nonlocal taken
            begin, numel = taken, math.prod(shape) * dtype.itemsize
            taken = -(-(begin + numel) // _BYTES) * _BYTES
            return free[begin : begin + numel].view(dtype).view(*shape)

        return take


class Squares:
    """Memory for squares of a batch of matrices, which is used again.

    Args:
        make: Returns more memory.
        free: Memory that is free.
        lasting: Memory for what stays while X moves, which is taken for nothing else; None: any is.
    """

    def __init__(self, make: Callable[[], Tensor], free: Sequence[Tensor] = (), lasting: Tensor | None = None) -> None:
        self._make, self._lasting, self.free = make, lasting, list(free)

    def take(self, *, lasts: bool = False) -> Tensor:
        """Return memory that is free; ``lasts``: it stays while X moves, and nothing else that is needed then is."""
        if lasts and self._lasting is not None:
            return self._lasting
        return self.free.pop() if self.free else self._make()

    def give(self, *squares: Tensor) -> None:
        """Give memory back."""
        self.free += (square for square in squares if square is not self._lasting)


@dataclass(frozen=True)
class Needs:
    """What a device needs to orthogonalize batches of some matrices.

    Attributes:
        squares, one_by_one, deflated: See `WorkingMemory`.
        in_place: Whether the results may lie in the memory of the matrices.
    """

    squares: tuple[int, ...]
    one_by_one: bool
    in_place: bool
    deflated: int = 0

    def layout(self, shapes: BatchShape) -> WorkingMemory | None:
        """Return where a batch lies with its results and squares in one memory; None if it cannot."""
        resolved = tuple(shapes), self.squares, self.one_by_one, self.deflated
        return WorkingMemory(*resolved) if self.in_place else None

    def __call__(self, shapes: BatchShape, memories: int) -> int:
        """Return how many elements a batch needs for its squares, and in none, one or two memories for X and results.

        One: they share it, with the squares, if they can.
        """
        if memories == 1 and (layout := self.layout(shapes)) is not None:
            return layout.numel
        least = max(max(self.squares) * squares_of(shapes), deflation_at_once(shapes, self.deflated))
        return least + (2 if memories else 0) * sum(map(math.prod, shapes))


def squares_of(shapes: BatchShape) -> int:
    """Return the elements of a rows × rows matrix for each matrix of a batch, up to where another one may begin."""
    numel = sum(count * rows * rows for count, rows, _ in shapes)
    return -(-numel // _ALIGNMENT) * _ALIGNMENT


def deflation_at_once(shapes: BatchShape, vectors: int) -> int:
    """Return how many elements of 2 bytes deflation needs for a batch (`device_deflation.deflate`); 0 without vectors.

    That is a matrix of signs; and for each matrix a thin product of X's, three of its transpose, two of them in fp32,
    and four squares.
    """
    squares = 2 * vectors**2 + 6 * max(vectors, SMALL_ROWS) ** 2 if vectors else 0
    numel = sum(count * ((cols + 5 * rows) * vectors + squares) for count, rows, cols in shapes)
    numel += vectors * shapes[0][1]
    return -(-numel // _ALIGNMENT) * _ALIGNMENT + bool(vectors) * _ALIGNMENT * (len(shapes) + 6)


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
