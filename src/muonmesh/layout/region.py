"""Region: a box in one parameter's global index space. Block and Piece: the places of its elements in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from muonmesh.errors import explain_error


@dataclass(frozen=True, slots=True)
class Region:
    """A box of global indices: along dim d the indices ``offset[d] + k * step[d]`` for ``0 <= k < shape[d]``.

    A step other than 1 describes interleaved matrices (GPT-OSS stores gate and up row by row) without a region for each
    row. The regions that a rank stores always have steps of 1.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    step: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @staticmethod
    def box(offset: tuple[int, ...], shape: tuple[int, ...]) -> Region:
        """Return a region of consecutive indices."""
        return Region(offset, shape, (1,) * len(shape))


@dataclass(frozen=True, slots=True)
class Block:
    """A Region and the place of its elements in a linear memory.

    The element at region index ``k`` is at ``start + sum(k[d] * strides[d])``. The same class describes a rank's local
    storage and an assembled matrix, so that every move of data is the same kind of copy.
    """

    region: Region
    start: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """The overlap of a storage Block with a matrix Block: its shape, and its places in storage and matrix."""

    shape: tuple[int, ...]
    storage_start: int
    storage_strides: tuple[int, ...]
    matrix_start: int
    matrix_strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous row-major array of ``shape``."""
    strides = []
    stride = 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))


def number_in_whole(piece: Piece, blocks: Sequence[Block], shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Return the row-major number of a piece's first element in the whole parameter, and the piece's strides there.

    Args:
        piece: Elements of one of the blocks.
        blocks: The blocks that a rank stores (steps of 1).
        shape: The shape of the whole parameter.

    Raises:
        ValueError: the piece is in none of the blocks.
    """
    whole = row_major(shape)
    for block in blocks:
        rest, number = piece.storage_start - block.start, 0
        for d in sorted(range(len(shape)), key=lambda d: -block.strides[d]):
            within, rest = divmod(rest, block.strides[d]) if block.region.shape[d] > 1 else (0, rest)
            if not 0 <= within < block.region.shape[d]:
                break
            number += (block.region.offset[d] + within) * whole[d]
        else:
            if rest == 0:
                steps = (
                    apart // max(1, stride) for apart, stride in zip(piece.storage_strides, block.strides, strict=True)
                )
                return number, tuple(step * stride for step, stride in zip(steps, whole, strict=True))
    problem = f"a piece that begins at element {piece.storage_start}"
    raise ValueError(explain_error("the storage", problem, "one within a block of it"))


def overlap(storage: Block, matrix: Block) -> Piece | None:
    """Return the elements that a storage block (steps of 1) and a matrix block (any steps) share, or None."""
    shape: list[int] = []
    storage_start, matrix_start = storage.start, matrix.start
    storage_strides: list[int] = []
    for d, (low, size) in enumerate(zip(storage.region.offset, storage.region.shape, strict=True)):
        first, step, count = matrix.region.offset[d], matrix.region.step[d], matrix.region.shape[d]
        begin = max(0, -((first - low) // step))  # the first k with first + k * step >= low
        end = min(count, (low + size - 1 - first) // step + 1)
        if end <= begin:
            return None
        shape.append(end - begin)
        storage_start += (first + begin * step - low) * storage.strides[d]
        storage_strides.append(step * storage.strides[d])
        matrix_start += begin * matrix.strides[d]
    return Piece(tuple(shape), storage_start, tuple(storage_strides), matrix_start, matrix.strides)
