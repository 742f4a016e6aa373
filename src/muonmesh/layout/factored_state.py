"""FactoredState: state of a rule that is not per element (by row, column or matrix), and its layout.

A factored state has the form of a parameter whose matrices have one column (or row, or element) each. Example: a fused
weight of 40 × 24 with three matrices of 24, 8 and 8 rows has one of 40 × 1 for rows, 3 × 24 for columns and 3 × 1 for
matrices. A factored state has the placements of the parameter's momentum. So routes, checkpoints and resharding treat
it like any parameter.

A factored state with two sizes, such as "rows×rows", is as large as the matrices. It is kept at the owners, which
orthogonalize the matrices, and does not travel. It is one tensor in which the parts of the matrices follow each other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from muonmesh.layout.flat import FlatShards, Interval, Layout
from muonmesh.layout.layout import MeshLayout
from muonmesh.layout.matrix import Matrix, MatrixSpec, assemble, parts_of, split_matrices

Side = str
"""The unit of a factored state: one number for each of the "rows" or "cols" or for each "matrix"; or two sizes:
"rows×rows"."""


def size_of(side: Side, rows: int, cols: int) -> tuple[int, int]:
    """Return the size of the factored state of a rows × cols matrix, as (rows, columns)."""
    sizes = {"rows": rows, "cols": cols}
    height, width = {"rows": "rows×1", "cols": "1×cols", "matrix": "1×1"}.get(side, side).split("×")
    return sizes.get(height) or int(height), sizes.get(width) or int(width)


@dataclass(frozen=True, slots=True)
class FactoredState:
    """State of a rule for the matrices of a parameter under one key, by row, column or matrix.

    Attributes:
        key: Its name in the state of the parameter.
        side: The unit that has one number.
        layout: Its layout. The layout of state at the owners is provisional until the owners are known.
        matrices: The part that belongs to each of the parameter's matrices, in order: rows × 1, 1 × cols, or 1 × 1.
        starts: For state at the owners: the place of each matrix's part in the memory of its owner.
    """

    key: str
    side: Side
    layout: Layout
    matrices: tuple[Matrix, ...]
    starts: tuple[int, ...] = ()

    @property
    def at_owner(self) -> bool:
        """Whether this state is kept at the owners of the matrices."""
        return "×" in self.side

    def describe(self) -> str:
        """Return a short text for comparing plans between ranks."""
        return f"{self.key} by {self.side} {'at its owner' if self.at_owner else self.layout.describe()}"


def factored_matrices(
    name: str, shape: Sequence[int], spec: MatrixSpec, side: Side
) -> tuple[tuple[int, ...], tuple[Matrix, ...]]:
    """Return the shape of a factored state and the part of it that belongs to each of a parameter's matrices.

    Args:
        name: The parameter's name.
        shape: Its global shape.
        spec: How the parameter splits, see `split_matrices`.
        side: The unit of the factored state that has one number.

    Raises:
        ValueError: the spec is unknown or does not fit the shape.
    """
    parts = parts_of(name, shape, spec)
    if "×" in side:
        sizes = [size_of(side, matrix.rows, matrix.cols) for matrix in assemble(name, parts)]
        if len({width for _, width in sizes}) > 1:
            sizes = [(height * width, 1) for height, width in sizes]
        stacked = sum(height for height, _ in sizes), sizes[0][1]
        return stacked, split_matrices(name, stacked, ("rows", *(height for height, _ in sizes)))
    # The other side shrinks to one index for each distinct set of spans: to 3 for the columns' state of a fused weight
    # that three matrices cut by rows, since each of them has all columns; to 1 where one matrix is the whole weight.
    shrunk, sides = list(shape), []
    for unit, dims in (("rows", parts[0][0].row_dims), ("cols", parts[0][0].col_dims)):
        spans = [tuple(dict.fromkeys(pair[unit == "cols"] for pair in pairs)) for _, pairs in parts]
        if side != unit:
            places = {span_set: ((position, 1, 1),) for position, span_set in enumerate(dict.fromkeys(spans))}
            spans = [places[span_set] for span_set in spans]
            for dim in dims:
                shrunk[dim] = len(places)  # of several dims none is cut
        sides.append(spans)
    reduced = [
        (replace(view, shape=tuple(shrunk)), list(itertools.product(rows, cols)))
        for (view, _), rows, cols in zip(parts, *sides, strict=True)
    ]
    return tuple(shrunk), assemble(name, reduced)


def factored_in_buffers(pairs: Mapping[str, tuple[FlatShards, tuple[int, ...]]]) -> dict[str, FlatShards]:
    """Return the layouts of factored states whose parameters share a flat buffer; they share a buffer of their own.

    In each replica, a rank holds the same fraction of the factored state as of the parameter, in the order of the
    ranks. So if each rank holds one interval, as in ZeRO, a row's number is on the rank of the row's first element.

    Args:
        pairs: For each name the layout of a parameter and the shape of its factored state, in the same order on all
            ranks. All these parameters are on the same ranks.
    """
    filled: dict[int, int] = {}
    intervals: dict[str, dict[int, Interval]] = {}
    for name, (layout, shape) in pairs.items():
        count, total = math.prod(shape), math.prod(layout.shape)
        for replica in layout.replicas:
            sizes_in_replica = [sum(interval.length for interval in layout.intervals_of(rank)) for rank in replica]
            borders = [-(-end * count // total) for end in itertools.accumulate(sizes_in_replica, initial=0)]
            for rank, (low, high) in zip(replica, itertools.pairwise(borders), strict=True):
                start = filled.get(rank, 0)
                intervals.setdefault(name, {})[rank] = Interval(low, high - low, start)
                filled[rank] = start + high - low
    layouts = {}
    for name, (layout, shape) in pairs.items():
        ranks, by_rank = layout.ranks, intervals[name]
        per_rank = tuple((by_rank[rank],) for rank in ranks)
        sizes = tuple(filled[rank] for rank in ranks)
        within = MeshLayout.replicated(shape, ranks)
        layouts[name] = FlatShards(within, per_rank, sizes, layout.replicas)
    return layouts
