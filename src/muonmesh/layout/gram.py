"""The Gram exchange: a matrix that is cut along its long dim only is orthogonalised where it lies.

With X = [X₁ … X_P] cut into slabs of whole columns, X Xᵀ = Σ X_r X_rᵀ. Ranks add up these small matrices instead of
moving the large one, and each applies the factors that follow from the sum to its own slab. Sums over shards round
differently from sums over a whole matrix, so this is done only where the user asks for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from muonmesh.layout.layout import Layout
from muonmesh.layout.matrix import Matrix
from muonmesh.layout.plan import Parameter, pieces
from muonmesh.layout.region import Piece


@dataclass(frozen=True)
class Rates:
    """What a rank can do, for choosing between exchanges.

    Attributes:
        flops: Floating-point operations a second of matrix products.
        bytes: Bytes a second that it sends while it receives as many.
    """

    flops: float = 2e11
    bytes: float = 5e9


def slab(layout: Layout, rank: int, matrix: Matrix) -> tuple[int, tuple[Piece, ...]] | None:
    """Return the columns of a matrix, in its canonical orientation, that a rank stores, and where they lie.

    Returns:
        The number of columns, and pieces whose place in the matrix is that in the slab, (rows, columns) row-major;
        None if the rank stores a part of a column.
    """
    rows, cols = matrix.shape
    found = list(pieces(layout, rank, matrix))
    width = sum(piece.numel for piece in found) // rows
    placed, column = [], 0
    for piece in found:
        dims = [(size, stride) for size, stride in zip(piece.shape, piece.matrix_strides, strict=True)]
        down = [(size, stride) for size, stride in dims if size > 1 and stride >= cols]
        if math.prod(size for size, _ in down) != rows:
            return None
        strides, step = [0] * len(dims), 1
        for dim in sorted(range(len(dims)), key=lambda d: dims[d][1]):
            size, stride = dims[dim]
            if size > 1 and stride >= cols:
                strides[dim] = stride // cols * width
            else:
                strides[dim], step = step, step * size
        placed.append(Piece(piece.shape, piece.storage_start, piece.storage_strides, column, tuple(strides)))
        column += step
    return width, tuple(placed)


def fits(parameter: Parameter, matrix: Matrix) -> bool:
    """Whether a matrix is cut along its long dim only, and momentum lies where the parameter does."""
    layout = parameter.target
    if parameter.momentum_storage is not layout or len(layout.ranks) == layout.copies():
        return False
    parts = [slab(layout, rank, matrix) for rank in layout.replica(layout.ranks[0])]
    return all(part is not None and part[0] < matrix.shape[1] for part in parts)


def is_cheaper(parameter: Parameter, matrix: Matrix, flops: int, itemsize: int, rates: Rates) -> bool:
    """Whether the Gram exchange takes less time than an owner, the work of all matrices spread over all ranks.

    An owner receives and returns the elements, ``itemsize`` bytes each; a rank sends its share of them. The Gram
    exchange sums rows² fp32 numbers for each segment over the ranks of a copy, twice their bytes each way, and repeats
    what is rows × rows on every rank.
    """
    rows, cols = matrix.shape
    ranks = len(parameter.target.ranks)
    shards = ranks // parameter.target.copies()
    owner = flops / ranks / rates.flops + 2 * rows * cols * itemsize / ranks / rates.bytes
    own_flops = parameter.segments * (4 * rows * rows * cols / shards + 10 * rows**3)
    moved = parameter.segments * 2 * 4 * rows * rows * (shards - 1) / shards
    gram = own_flops / rates.flops + moved / rates.bytes
    return gram < owner
