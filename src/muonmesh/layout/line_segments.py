"""LineSegment: consecutive elements of a matrix in the memory order of its parameter, in blocks of 256.

Momentum in int8 has one scale for each block (`muonmesh.step.int8_momentum`). Blocks are counted along the matrix, in
the direction in which the parameter is stored, so they are the same in every layout of the parameter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from muonmesh.layout.flat import FlatShards, Layout
from muonmesh.layout.layout import MeshLayout, Replicate
from muonmesh.layout.matrix import Matrix
from muonmesh.layout.piece_table import pieces
from muonmesh.layout.region import Piece, row_major

BLOCK = 256
"""Elements of a block; the last block of a line may be shorter."""


@dataclass(frozen=True, slots=True)
class LineSegment:
    """The same consecutive elements of consecutive lines of a matrix; a line lies along the last dim of the parameter.

    Attributes:
        line: The first line.
        lines: The number of lines.
        first: The first element in each line.
        width: The number of elements in each line.
        start: The place in the storage of the first element of the first line.
        strides: The strides in the storage, from line to line and from element to element.
        piece_start: The place of the same element in the segment's piece, read as a contiguous array.
        piece_strides: The strides in the piece, from line to line and from element to element.
    """

    line: int
    lines: int
    first: int
    width: int
    start: int
    strides: tuple[int, int]
    piece_start: int
    piece_strides: tuple[int, int]

    @property
    def blocks(self) -> range:
        """The numbers of the blocks of a line in which this segment has elements."""
        return range(self.first // BLOCK, -(-(self.first + self.width) // BLOCK))


def grid_of(matrix: Matrix) -> tuple[int, int]:
    """Return the number of lines of a matrix, and the number of elements of each line."""
    short, long = matrix.shape
    return (short, long) if _along_rows(matrix) else (long, short)


def line_segments_of(matrix: Matrix, piece: Piece) -> tuple[LineSegment, ...]:
    """Return the segments of a piece of a matrix: one segment, unless a convolution's kernel or channels are cut."""
    long = matrix.shape[1]
    rows, cols = divmod(piece.matrix_start, long)
    along_rows = _along_rows(matrix)
    line, first = (rows, cols) if along_rows else (cols, rows)
    places = row_major(piece.shape)
    # (size, stride in the matrix, in the storage, in the piece) of the dims along a line, and of the one across lines.
    along, across = list[tuple[int, int, int, int]](), (1, 0, 0, 0)
    for size, stride, stored, in_piece in zip(
        piece.shape, piece.matrix_strides, piece.storage_strides, places, strict=True
    ):
        if size > 1:
            if (stride < long) == along_rows:
                along.append((size, stride if along_rows else stride // long, stored, in_piece))
            else:
                across = (size, stride, stored, in_piece)
    width, step, place_step = 1, 1, 1
    while along:  # dims that follow each other in the matrix and in memory are one
        size, stride, stored, in_piece = along[-1]
        if width > 1 and (stride, stored, in_piece) != (width, width * step, width * place_step):
            break
        if width == 1:
            if stride != 1:
                break
            step, place_step = stored, in_piece
        width *= size
        along.pop()
    segments = []
    for at in itertools.product(*(range(size) for size, *_ in along)):
        moved = [sum(k * dim[number] for k, dim in zip(at, along, strict=True)) for number in (1, 2, 3)]
        start, in_piece = piece.storage_start + moved[1], moved[2]
        strides, piece_strides = (across[2], step), (across[3], place_step)
        segments.append(LineSegment(line, across[0], first + moved[0], width, start, strides, in_piece, piece_strides))
    return tuple(segments)


def shares_blocks(layout: Layout, matrix: Matrix) -> bool:
    """Whether a block of a matrix may have elements in several pieces, of one rank or of several ranks.

    The result is the same on every rank. It is always true for flat shards on several ranks, because their borders may
    be anywhere.
    """
    if isinstance(layout, FlatShards):
        return len(layout.ranks) > 1 or _cuts(matrix, pieces(layout, layout.ranks[0], matrix))
    # In a convolution, all dims except the first are along a line; in a stack, only the last dim is.
    lowest = 1 if matrix.blocks[0].strides[0] else len(layout.shape) - 1
    if all(isinstance(placement, Replicate) or placement.dim < lowest for placement in layout.placements):
        return _cuts(matrix, pieces(MeshLayout.replicated(layout.shape, (0,)), 0, matrix))
    return any(_cuts(matrix, pieces(layout, rank, matrix)) for rank in layout.ranks)


def _cuts(matrix: Matrix, parts: Iterable[Piece]) -> bool:
    length = grid_of(matrix)[1]
    for piece in parts:
        for segment in line_segments_of(matrix, piece):
            end = segment.first + segment.width
            if segment.first % BLOCK or (end % BLOCK and end != length):
                return True
    return False


def _along_rows(matrix: Matrix) -> bool:
    """Whether the last dim of the parameter is along the rows of the assembled matrix."""
    return matrix.blocks[0].strides[-1] < matrix.shape[1] or math.prod(matrix.shape) == 1
