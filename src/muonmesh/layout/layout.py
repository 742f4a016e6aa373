"""MeshLayout: the part of a parameter that each rank of a mesh stores, by placements as in DTensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from muonmesh.errors import LayoutError, NotCovered, explain_error
from muonmesh.layout.region import Block, Region, row_major

Span = tuple[int, int]
"""Consecutive indices along one dim: (first, count)."""

Spans = tuple[Span, ...]
"""Indices along one dim, in the order of the local tensor."""

_Cut = tuple[int, int, int]
"""A mesh axis that cuts a dim: (axis, its size, split factor)."""


@dataclass(frozen=True, slots=True)
class Replicate:
    """A placement: every coordinate of the mesh axis holds the same elements."""

    def __str__(self) -> str:
        return "Replicate"


@dataclass(frozen=True, slots=True)
class Shard:
    """A placement: the mesh axis cuts ``dim`` as ``torch.chunk`` does: chunks of ⌈n/k⌉, the last ones short or empty.

    With a split factor above 1 it is DTensor's ``_StridedShard``: ``dim`` is cut into ``split_factor`` chunks, and each
    chunk is cut over the axis. FSDP2 over tensor parallelism uses it if both cut the same dim: then the axis to its
    right cuts the dim first.
    """

    dim: int
    split_factor: int = 1

    def __str__(self) -> str:
        return f"Shard({self.dim})" if self.split_factor == 1 else f"StridedShard({self.dim}, {self.split_factor})"


Placement = Replicate | Shard


@lru_cache(maxsize=65536)
def _chunk(spans: Spans, chunks: int, index: int) -> Spans:
    """Return chunk ``index`` of ``chunks`` of an ordered index set, by the rule of ``torch.chunk``."""
    total = sum(count for _, count in spans)
    size = -(-total // chunks)
    begin, end = min(total, size * index), min(total, size * (index + 1))
    chunk, position = [], 0
    for first, count in spans:
        low, high = max(begin, position), min(end, position + count)
        if low < high:
            chunk.append((first + low - position, high - low))
        position += count
    return tuple(chunk)


@lru_cache(maxsize=65536)
def _split(size: int, cuts: tuple[_Cut, ...], coordinates: tuple[int, ...]) -> Spans:
    """Return the indices of a dim of ``size`` left after ``cuts``, left to right, at a coordinate of each axis.

    This function splits index sets as torch splits tensors, because torch's own offset helpers return only the first
    offset of an interleaved shard.
    """
    spans: Spans = ((0, size),) if size else ()
    for (_, axis_size, split_factor), coordinate in zip(cuts, coordinates, strict=True):
        parts = [_chunk(spans, split_factor, i) for i in range(split_factor)]
        spans = _joined(span for part in parts for span in _chunk(part, axis_size, coordinate))
    return spans


def _joined(spans: Iterable[Span]) -> Spans:
    """Merge spans that follow each other."""
    merged: list[Span] = []
    for first, count in spans:
        if merged and merged[-1][0] + merged[-1][1] == first:
            merged[-1] = (merged[-1][0], merged[-1][1] + count)
        else:
            merged.append((first, count))
    return tuple(merged)


@dataclass(frozen=True)
class MeshLayout:
    """A parameter placed on a mesh of ranks of any dimension, in DTensor's vocabulary.

    Args:
        shape: Global shape of the parameter.
        mesh: Size of each mesh axis.
        ranks: Global ranks of the mesh, row-major.
        placements: One per mesh axis, applied left to right.

    Attributes:
        place_of: The index of each rank in ``ranks``.

    Raises:
        LayoutError: placements and mesh do not fit, or a dim is out of range.
    """

    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    ranks: tuple[int, ...]
    placements: tuple[Placement, ...]

    place_of: dict[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.placements) != len(self.mesh) or math.prod(self.mesh) != len(self.ranks):
            problem = f"{len(self.placements)} placements on a mesh {self.mesh} of {len(self.ranks)} ranks"
            needed = "a placement for each axis and a rank for each place"
            raise LayoutError(explain_error("MeshLayout", problem, needed))
        for placement in self.placements:
            if not isinstance(placement, Replicate) and not 0 <= placement.dim < len(self.shape):
                problem, needed = f"{placement} on a parameter of shape {self.shape}", "a dim that it has"
                raise LayoutError(explain_error("MeshLayout", problem, needed, "Correct the placement's dim"))
        ranks, places = _places(self.ranks)  # thousands of numbers, shared by all parameters
        object.__setattr__(self, "ranks", ranks)
        object.__setattr__(self, "place_of", places)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # without thousands of ranks: caches ask for it often
        return hash((self.shape, self.mesh, self.placements))

    def __reduce__(self) -> tuple[Any, ...]:
        return MeshLayout, (self.shape, self.mesh, self.ranks, self.placements)

    @staticmethod
    def replicated(shape: tuple[int, ...], ranks: tuple[int, ...]) -> MeshLayout:
        """Return the layout of a tensor that every rank of ``ranks`` holds whole."""
        return MeshLayout(shape, (len(ranks),), ranks, (Replicate(),))

    @cached_property
    def _cuts(self) -> tuple[tuple[_Cut, ...], ...]:
        """For each dim the mesh axes that cut it, left to right."""
        cuts: list[list[_Cut]] = [[] for _ in self.shape]
        for axis, (size, placement) in enumerate(zip(self.mesh, self.placements, strict=True)):
            if not isinstance(placement, Replicate):
                cuts[placement.dim].append((axis, size, placement.split_factor))
        return tuple(tuple(cut) for cut in cuts)

    def at(self, rank: int) -> tuple[int, ...]:
        """Return the place of a rank on each mesh axis."""
        index = self.place_of[rank]
        return tuple(index // stride % size for size, stride in zip(self.mesh, row_major(self.mesh), strict=True))

    def _spans(self, rank: int) -> tuple[Spans, ...]:
        """Return the indices that a rank stores, dim by dim."""
        at, pairs = self.at(rank), zip(self.shape, self._cuts, strict=True)
        return tuple(_split(size, cut, tuple(at[axis] for axis, _, _ in cut)) for size, cut in pairs)

    def blocks(self, rank: int) -> tuple[Block, ...]:
        """Return the blocks that ``rank`` stores: one block, unless a strided shard interleaves."""
        return _blocks(self, rank) if rank in self.place_of else ()

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the local tensor on ``rank``."""
        return tuple(sum(count for _, count in spans) for spans in self._spans(rank))

    def replica(self, rank: int) -> tuple[int, ...]:
        """Return the ranks with the same coordinates as ``rank`` on the replicated axes."""
        axes = zip(self.at(rank), self.mesh, self.placements, strict=True)
        coordinates = tuple((at,) if isinstance(placement, Replicate) else range(size) for at, size, placement in axes)
        return _ranks_at(self, coordinates)

    def copies(self) -> int:
        """Return how many ranks hold each element."""
        pairs = zip(self.mesh, self.placements, strict=True)
        return math.prod(size for size, placement in pairs if isinstance(placement, Replicate))

    def replica_number(self, rank: int) -> int:
        """Return the number of the replica that ``rank`` belongs to, counted over all replicated axes."""
        return self._number(rank, replicated=True)

    def parts(self, rank: int) -> tuple[int, ...]:
        """Return the number of the shard that ``rank`` holds, counted over the sharded axes; empty if it holds nothing.

        Ranks with the same number hold the same elements.
        """
        return (self._number(rank, replicated=False),) if math.prod(self.local_shape(rank)) else ()

    def _number(self, rank: int, *, replicated: bool) -> int:
        number = 0
        for at, size, placement in zip(self.at(rank), self.mesh, self.placements, strict=True):
            if isinstance(placement, Replicate) == replicated:
                number = number * size + at
        return number

    def part_count(self) -> int:
        """Return the number of shards of a copy."""
        return len(self.ranks) // self.copies()

    def holders(self, region: Region) -> tuple[int, ...]:
        """Return the ranks that hold all of ``region``."""
        return _holders(self, region)

    def prove_cover(self) -> None:
        """Raise LayoutError unless each replica covers each element exactly once.

        A mesh cuts each dim independently. So the product covers each element once if the spans of each dim do.
        """
        for size, cuts in zip(self.shape, self._cuts, strict=True):
            _prove_dim(size, cuts)

    def describe(self) -> str:
        """Return e.g. ``StridedShard(0, 2)×2, Shard(0)×2``, one placement for each axis of the mesh."""
        if len(self.ranks) == 1:
            return "one process"
        return ", ".join(f"{placement}×{size}" for size, placement in zip(self.mesh, self.placements, strict=True))


# The results below are the same for all parameters of one shape and placement, hundreds in a large model.


@lru_cache(maxsize=1024)
def _places(ranks: tuple[int, ...]) -> tuple[tuple[int, ...], dict[int, int]]:
    """Return the ranks of a mesh (one shared tuple for equal ranks), and the index of each rank."""
    return ranks, {rank: index for index, rank in enumerate(ranks)}


@lru_cache(maxsize=65536)
def _blocks(layout: MeshLayout, rank: int) -> tuple[Block, ...]:
    strides = row_major(layout.local_shape(rank))
    placed = []  # per dim: the spans with their position in the local tensor
    for spans in layout._spans(rank):
        starts = itertools.accumulate((count for _, count in spans), initial=0)
        placed.append([(start, first, count) for start, (first, count) in zip(starts, spans, strict=False)])
    return tuple(
        Block(
            Region.box(tuple(first for _, first, _ in box), tuple(count for _, _, count in box)),
            sum(start * stride for (start, _, _), stride in zip(box, strides, strict=True)),
            strides,
        )
        for box in itertools.product(*placed)
    )


@lru_cache(maxsize=65536)
def _holders(layout: MeshLayout, region: Region) -> tuple[int, ...]:
    choices: list[Sequence[int]] = [range(size) for size in layout.mesh]
    for dim, (size, cut) in enumerate(zip(layout.shape, layout._cuts, strict=True)):
        combinations = _holding(size, cut, region.offset[dim], region.shape[dim], region.step[dim])
        if not combinations:
            return ()
        # If several axes cut one dim, at most one combination of coordinates holds these indices.
        for (axis, _, _), coordinates in zip(cut, zip(*combinations, strict=True), strict=True):
            choices[axis] = coordinates
    return _ranks_at(layout, tuple(choices))


@lru_cache(maxsize=65536)
def _ranks_at(layout: MeshLayout, choices: tuple[Sequence[int], ...]) -> tuple[int, ...]:
    """Return the ranks at every combination of these coordinates."""
    strides = row_major(layout.mesh)
    return tuple(
        layout.ranks[sum(c * stride for c, stride in zip(at, strides, strict=True))]
        for at in itertools.product(*choices)
    )


@lru_cache(maxsize=65536)
def _holding(size: int, cuts: tuple[_Cut, ...], first: int, number: int, step: int) -> tuple[tuple[int, ...], ...]:
    """Return the coordinates whose spans together contain the indices first, first + step, …, ``number`` of them."""

    def within(low: int, count: int) -> int:
        """How many of the indices lie in a span."""
        begin, end = (min(number, max(0, -((first - border) // step))) for border in (low, low + count))
        return end - begin

    return tuple(
        at
        for at in itertools.product(*(range(axis_size) for _, axis_size, _ in cuts))
        if 0 < number == sum(within(low, count) for low, count in _split(size, cuts, at))
    )


@lru_cache(maxsize=65536)
def _prove_dim(size: int, cuts: tuple[_Cut, ...]) -> None:
    coordinates = itertools.product(*(range(axis_size) for _, axis_size, _ in cuts))
    spans = sorted(span for at in coordinates for span in _split(size, cuts, at))
    position = 0
    for first, count in spans:
        if first != position:
            raise NotCovered(f"indices {position} to {first} of a dim of {size} held twice or by nobody")
        position += count
    if position != size:
        raise NotCovered(f"indices {position} to {size} of a dim of {size} held by nobody")
