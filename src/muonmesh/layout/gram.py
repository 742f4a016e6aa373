"""The Gram exchange: a matrix that is cut along its long dim only is orthogonalised where it lies.

With X = [X₁ … X_P] cut into slabs of whole columns, X Xᵀ = Σ X_r X_rᵀ. Ranks add up these small matrices instead of
moving the large one, and each applies the factors that follow from the sum to its own slab. Sums over shards round
differently from sums over a whole matrix, so this is done only where the user asks for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from muonmesh.layout.layout import Layout, MeshLayout
from muonmesh.layout.matrix import Matrix
from muonmesh.layout.parameter import Parameter
from muonmesh.layout.plan import Plan
from muonmesh.layout.rates import Rates
from muonmesh.layout.region import Piece
from muonmesh.layout.routes import pieces


def slab(layout: Layout, rank: int, matrix: Matrix) -> tuple[int, tuple[Piece, ...]] | None:
    """Return the columns of a matrix in its wide orientation that a rank stores, and where they lie.

    Returns:
        The number of columns, and the pieces, whose ``matrix_start`` and ``matrix_strides`` are their place in the slab
        alone, row-major (rows, columns). None if the rank stores a part of a column.
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
    """Whether a matrix is cut along its long dim only, each copy at the same places, and its momentum lies with it.

    Copies that are cut differently would add up sums that round differently, and drift apart.
    """
    layout = parameter.target
    if parameter.momentum_storage is not layout or len(layout.ranks) == layout.copies() or not _cut_alike(layout):
        return False
    parts = [slab(layout, rank, matrix) for rank in layout.replica(layout.ranks[0])]
    return all(part is not None and part[0] < matrix.shape[1] for part in parts)


def is_cheaper(parameter: Parameter, matrix: Matrix, flops: int, itemsize: int, rates: Rates) -> bool:
    """Whether the Gram exchange takes less time than an owner, the work of all matrices spread over all ranks.

    An owner receives and returns the elements, ``itemsize`` bytes each; a rank sends its share of them. The Gram
    exchange sums rows² fp32 numbers for each segment over the ranks of a copy: each rank sends nearly all of them to
    those that add them up, and its share of the sum to all others. Products of rows × rows are repeated on every rank.
    """
    rows, cols = matrix.shape
    ranks = len(parameter.target.ranks)
    shards = ranks // parameter.target.copies()
    owner = flops / ranks / rates.flops + 2 * rows * cols * itemsize / ranks / rates.bytes
    own_flops = parameter.segments * (4 * rows * rows * cols / shards + 10 * rows**3)
    moved = parameter.segments * 2 * 4 * rows * rows * (shards - 1) / shards
    gram = own_flops / rates.flops + moved / rates.bytes
    return gram < owner


def aligned(numel: int) -> int:
    """Return the elements after which the next matrix begins: at a multiple of 64 bytes in fp32 and fp64.

    The last bits of a product depend on where its operands begin, and must not depend on what else is in the bucket.
    """
    return -(-numel // 16) * 16


@dataclass(frozen=True)
class GramBucket:
    """One bucket of the Gram exchange: matrices whose Gram matrices are added up together.

    Attributes:
        turn: Number of the bucket among all of the plan. Every rank takes the buckets that it has in this order.
        ranks: Those that hold one copy, in the order of the layout, in which their parts are added.
        numbers: Of the assignments, those with most segments first.
        rows: Rows of each of these matrices.
        segments: How often the Gram matrix of each is summed (`muonmesh.numerics.newton_schulz.gram_segments`).
    """

    turn: int
    ranks: tuple[int, ...]
    numbers: tuple[int, ...]
    rows: tuple[int, ...]
    segments: tuple[int, ...]

    def active(self, segment: int) -> int:
        """Return how many of the matrices, from the first on, are summed in this segment."""
        return sum(segment < segments for segments in self.segments)

    def share(self, segment: int) -> int:
        """Return how many numbers of the Gram matrices each rank adds up for a segment; the last share is padded."""
        numbers = sum(aligned(rows * rows) for rows in self.rows[: self.active(segment)])
        return -(-numbers // len(self.ranks))

    @property
    def collectives(self) -> int:
        """How many collectives it takes: one for the norms, and two for each segment."""
        return 1 + 2 * max(self.segments)

    def bytes(self, itemsize: int) -> int:
        """Return the bytes that each rank sends, and receives, if Gram matrices have ``itemsize`` bytes a number."""
        shares = sum(self.share(segment) for segment in range(max(self.segments)))
        return (len(self.ranks) - 1) * (8 * len(self.numbers) + 2 * itemsize * shares)


def gram_buckets(plan: Plan, rank: int) -> tuple[GramBucket, ...]:
    """Return the buckets of a plan's Gram exchange that ``rank`` takes part in, in order.

    Matrices that are cut among the same ranks are added up together, as many as make about ``plan.bucket_elements`` on
    a rank: its columns and the Gram matrix.
    """
    buckets: dict[tuple[tuple[tuple[int, ...], ...], int], list[int]] = {}
    filled: dict[tuple[tuple[int, ...], ...], int] = {}
    for number in plan.grams:
        assignment = plan.assignments[number]
        copies = _copies(plan.parameters[assignment.parameter].target)
        rows, cols = assignment.matrix.shape
        before = filled.get(copies, 0)
        buckets.setdefault((copies, before // plan.bucket_elements), []).append(number)
        filled[copies] = before + rows * (-(-cols // len(copies[0])) + rows)
    found = []
    for turn, ((copies, _), numbers) in enumerate(buckets.items()):
        ranks = next((copy for copy in copies if rank in copy), None)
        if ranks is not None:
            segments = {n: plan.parameters[plan.assignments[n].parameter].segments for n in numbers}
            order = tuple(sorted(numbers, key=lambda n: -segments[n]))
            rows_of = tuple(plan.assignments[n].matrix.shape[0] for n in order)
            found.append(GramBucket(turn, ranks, order, rows_of, tuple(segments[n] for n in order)))
    return tuple(found)


def _cut_alike(layout: Layout) -> bool:
    """Whether ranks at the same place in two copies hold the same elements."""
    if isinstance(layout, MeshLayout):
        return True  # what a rank holds does not depend on its place on the axes that replicate
    cuts = {tuple(tuple(b.region for b in layout.blocks(rank)) for rank in copy) for copy in _copies(layout)}
    return len(cuts) == 1


def _copies(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Return the sets of ranks that hold one copy each."""
    found: dict[int, tuple[int, ...]] = {}
    for rank in layout.ranks:
        if rank not in found:
            found |= dict.fromkeys(layout.replica(rank), layout.replica(rank))
    return tuple(dict.fromkeys(found.values()))
