"""FlatShards: layouts by intervals of flattened parameters, as in ZeRO, FSDP1 and Megatron's distributed optimizer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from muonmesh.errors import LayoutError, NotCovered, explain_error
from muonmesh.layout.layout import MeshLayout, Replicate
from muonmesh.layout.region import Block, Region, overlap, row_major


class Interval(NamedTuple):
    """Elements ``first`` to ``first + length`` (exclusive) of a flattened tensor, stored from place ``start`` on."""

    first: int
    length: int
    start: int

    def part(self, low: int, high: int) -> Interval:
        """Return the part of this interval in the places ``low`` to ``high``, with starts relative to ``low``.

        Its length is 0 if there is no such part.
        """
        begin, end = max(low, self.start), min(high, self.start + self.length)
        return Interval(self.first + begin - self.start, end - begin, begin - low) if begin < end else Interval(0, 0, 0)

    def share(self, size: int, number: int, count: int) -> Interval:
        """Return the part of this interval in one of the equal parts of a buffer, as if it were alone in its memory.

        Args:
            size: The number of elements in the buffer.
            number: The index of the part.
            count: The number of parts.
        """
        length = size // count
        return self.part(number * length, (number + 1) * length)._replace(start=0)


@dataclass(frozen=True)
class FlatShards:
    """A layout of flat buffers: each rank holds intervals of its local tensor under another layout, flattened by rows.

    Intervals may begin and end anywhere, also inside rows. A rank may hold nothing. The storage of a rank is a flat
    buffer, which may also hold other parameters and padding. An interval of a matrix is at most three boxes: the end of
    a row, whole rows, and the beginning of a row.

    Args:
        within: The layout whose local tensors are flattened and cut: a replicated layout for ZeRO over plain
            parameters, a mesh with a shard axis for ZeRO over tensor parallelism. Ranks with the same local tensor
            divide it among themselves.
        intervals: The intervals that each rank holds, in the order of ``within.ranks``.
        sizes: The number of elements in the flat buffer of each rank. Default: the elements of its intervals, without
            gaps.
        replicas: Sets of ranks that each hold all of the parameter; one set of all ranks by default.

    Raises:
        LayoutError: the arguments contradict each other.
    """

    within: MeshLayout
    intervals: tuple[tuple[Interval, ...], ...]
    sizes: tuple[int, ...] = ()
    replicas: tuple[tuple[int, ...], ...] = ()
    _blocks_of_rank: dict[int, tuple[Block, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        intervals = tuple(tuple(Interval(*fields) for fields in of_rank if fields[1]) for of_rank in self.intervals)
        object.__setattr__(self, "intervals", intervals)
        sizes = tuple(self.sizes) or tuple(sum(interval.length for interval in of_rank) for of_rank in intervals)
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "replicas", tuple(map(tuple, self.replicas)) or (tuple(self.within.ranks),))
        count = len(self.within.ranks)
        if len(self.intervals) != count or len(self.sizes) != count:
            problem = f"intervals of {len(self.intervals)} and sizes of {len(self.sizes)} for {count} ranks"
            raise LayoutError(explain_error("FlatShards", problem, "one of each for every rank, in their order"))
        if sorted(rank for replica in self.replicas for rank in replica) != sorted(self.within.ranks):
            problem = f"replicas {self.replicas} of the ranks {self.within.ranks}"
            raise LayoutError(explain_error("FlatShards", problem, "each rank once"))
        for rank, of_rank, size in zip(self.within.ranks, self.intervals, self.sizes, strict=True):
            elements = math.prod(self.within.local_shape(rank))
            for interval in of_rank:
                first, length, start = interval
                if min(first, length, start) < 0 or first + length > elements or start + length > size:
                    problem = f"{interval} on rank {rank}, which has {elements} elements and a buffer of {size}"
                    needed = "intervals within the elements and within the buffer"
                    raise LayoutError(explain_error("FlatShards", problem, needed))

    @staticmethod
    def cut(shape: tuple[int, ...], ranks: Sequence[int], borders: Sequence[int]) -> FlatShards:
        """Return the layout of a parameter that is alone in its buffers: rank i holds [borders[i], borders[i + 1])."""
        intervals = tuple((Interval(low, high - low, 0),) for low, high in itertools.pairwise(borders))
        return FlatShards(MeshLayout.replicated(tuple(shape), tuple(ranks)), intervals)

    @staticmethod
    def on_axes(
        within: MeshLayout,
        axes: Sequence[int],
        intervals_at: Callable[[int, Sequence[int]], Sequence[Interval]],
        sizes: Sequence[int] = (),
    ) -> FlatShards:
        """Return the layout of a parameter that some axes of a mesh cut by intervals.

        Args:
            within: The layout with the parameter replicated along these axes.
            axes: The axes of the mesh that cut the flattened local tensors of ``within``.
            intervals_at: Returns the intervals that a rank holds, from the rank and its place on each axis.
            sizes: The size of each rank's buffer. Default: that of its intervals, so that the parameter is alone there.
        """
        copied = [n for n, p in enumerate(within.placements) if n not in axes and isinstance(p, Replicate)]
        intervals, replicas = [], dict[tuple[int, ...], list[int]]()
        for rank in within.ranks:
            at = within.at(rank)
            intervals.append(tuple(intervals_at(rank, at)))
            replicas.setdefault(tuple(at[axis] for axis in copied), []).append(rank)
        return FlatShards(within, tuple(intervals), tuple(sizes), tuple(map(tuple, replicas.values())))

    @staticmethod
    def in_buffer(within: MeshLayout, axes: Sequence[int], whole: Interval, size: int) -> FlatShards:
        """Return the layout of a parameter in a flat buffer that axes of a mesh cut into equal parts.

        Args:
            within: As for `on_axes`.
            axes: The axes that cut the buffer; the last of them cuts first.
            whole: The place of the flattened local tensor in the buffer.
            size: The number of elements in the buffer.
        """

        def intervals_at(_: int, at: Sequence[int]) -> list[Interval]:
            number, count = 0, 1
            for axis in reversed(axes):
                number, count = number * within.mesh[axis] + at[axis], count * within.mesh[axis]
            return [whole.share(size, number, count)]

        return FlatShards.on_axes(within, axes, intervals_at)

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape of the parameter."""
        return self.within.shape

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that may hold a part of the parameter."""
        return self.within.ranks

    def intervals_of(self, rank: int) -> tuple[Interval, ...]:
        """Return the intervals of one rank."""
        return self.intervals[self.within.place_of[rank]] if rank in self.within.place_of else ()

    def blocks(self, rank: int) -> tuple[Block, ...]:
        """Return the blocks that ``rank`` stores, with their places in its flat buffer."""
        if rank not in self._blocks_of_rank:
            self._blocks_of_rank[rank] = tuple(self._blocks(rank))
        return self._blocks_of_rank[rank]

    def _blocks(self, rank: int) -> Iterator[Block]:
        local = self.within.local_shape(rank) if rank in self.within.place_of else ()
        for first, count, start in self.intervals_of(rank):
            for offset, shape in _boxes(local, first, first + count):
                for block in self.within.blocks(rank):
                    yield from _within(block, local, offset, shape, start - first)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the flat buffer on ``rank``."""
        return (self.sizes[self.within.place_of[rank]],)

    def replica(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold one whole copy together with ``rank``."""
        return self.replicas[self.replica_number(rank)]

    def copies(self) -> int:
        """Return how many ranks hold each element."""
        return len(self.replicas)

    def replica_number(self, rank: int) -> int:
        """Return the number of the replica that ``rank`` belongs to."""
        return next(number for number, replica in enumerate(self.replicas) if rank in replica)

    def parts(self, rank: int) -> tuple[int, ...]:
        """Return the numbers of the parts (see `part_count`) that ``rank`` holds."""
        runs = self._runs()
        stored, intervals = self.within.blocks(rank), self.intervals_of(rank)
        return tuple(
            number
            for number, (blocks, low, high) in enumerate(runs)
            if blocks == stored and any(i.first <= low and high <= i.first + i.length for i in intervals)
        )

    def part_count(self) -> int:
        """Return the number of parts into which the intervals of all ranks and replicas divide the parameter."""
        return len(self._runs())

    def _runs(self) -> list[tuple[tuple[Block, ...], int, int]]:
        """Return the runs (blocks, low, high) between the borders of all ranks, for each local tensor that is cut."""
        borders: dict[tuple[Block, ...], set[int]] = {}
        for rank in self.ranks:
            ends = {end for i in self.intervals_of(rank) for end in (i.first, i.first + i.length)}
            borders.setdefault(self.within.blocks(rank), set()).update(ends)
        return [(blocks, *run) for blocks, ends in borders.items() for run in itertools.pairwise(sorted(ends))]

    def holders(self, region: Region) -> tuple[int, ...]:
        """Return the ranks that hold all of ``region``."""
        target = Block(region, 0, (0,) * len(region.shape))
        holding = []
        for rank, of_rank in zip(self.ranks, self.intervals, strict=True):
            if sum(interval.length for interval in of_rank) < region.numel:
                continue
            shared = (overlap(block, target) for block in self.blocks(rank))
            if sum(piece.numel for piece in shared if piece is not None) == region.numel:
                holding.append(rank)
        return tuple(holding)

    def prove_cover(self) -> None:
        """Raise LayoutError unless in each replica the intervals cover each element exactly once."""
        self.within.prove_cover()
        all_blocks = {self.within.blocks(rank) for rank in self.ranks}
        for replica in self.replicas:
            sharing: dict[tuple[Block, ...], list[int]] = {}
            for rank in replica:
                sharing.setdefault(self.within.blocks(rank), []).append(rank)
            if sharing.keys() != all_blocks:
                raise NotCovered(f"ranks {replica}, a replica, that do not hold all of the parameter")
            for ranks in sharing.values():
                position = 0
                for first, count, _ in sorted(i for rank in ranks for i in self.intervals_of(rank)):
                    if first != position:
                        raise NotCovered(f"elements {position} to {first} held twice or by none of {ranks}")
                    position = first + count
                if position != math.prod(self.within.local_shape(ranks[0])):
                    raise NotCovered(f"the elements from {position} on held by none of the ranks {ranks}")

    def describe(self) -> str:
        """Return e.g. ``flat×4`` or ``flat×4 of Replicate×2, Shard(0)×2``, with the intervals' fingerprint."""
        parts = sum(map(bool, self.intervals))
        whole = self.within.copies() == len(self.ranks)
        of = "" if whole else f" of {self.within.describe()}"
        return f"flat×{parts}{of} ({hash((self.intervals, self.sizes, self.replicas)) & 0xFFFFFFFF:08x})"


Layout: TypeAlias = MeshLayout | FlatShards
"""The layout of one parameter of global ``shape`` on its ranks.

For each rank of ``ranks``, the blocks give the Regions that it stores, and their places in its local storage (read as a
contiguous row-major array). A replica is the same Region on several ranks. Blocks are computed on demand, so a layout
stays small even with thousands of ranks.
"""


def occupied(layouts: Sequence[Layout | None], rank: int) -> tuple[slice, ...] | None:
    """Return where the parameters of one flat buffer lie in it; None if they fill it, or if it is no flat buffer.

    Args:
        layouts: The layouts of all parameters in the buffer.
        rank: The rank of the buffer.

    Returns:
        At least one place. Parameters without anything between them are one place.
    """
    flat = [layout for layout in layouts if isinstance(layout, FlatShards)]
    if len(flat) < len(layouts):
        return None
    ends = [0, 0]
    for low, high in sorted((i.start, i.start + i.length) for layout in flat for i in layout.intervals_of(rank)):
        if low > ends[-1]:
            ends += low, high
        ends[-1] = high
    places = [slice(low, high) for low, high in zip(ends[::2], ends[1::2], strict=True) if low < high] or [slice(0, 0)]
    full = places == [slice(0, math.prod(flat[0].local_shape(rank)))]
    return None if full else tuple(places)


@dataclass(frozen=True)
class FlatParameter:
    """One parameter in a flat buffer.

    Attributes:
        name: The canonical name of the parameter.
        layout: Which elements of the parameter each rank holds, and where in the buffer.
        matrices: How the parameter splits into matrices, see `split_matrices`; AdamW does not use it.
    """

    name: str
    layout: FlatShards
    matrices: Any = None


Declared: TypeAlias = tuple[Any, ...] | Layout | Sequence[FlatParameter]
"""An entry of ``layouts=``: (mesh, placements) or (mesh, placements, shape) of a plain local shard; its Layout, such as
FlatShards for a flat shard; or the FlatParameters that share a flat buffer."""


def _boxes(shape: tuple[int, ...], low: int, high: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield boxes (offset, shape) that together are elements ``low`` to ``high`` of a row-major array, in order."""
    if len(shape) == 1:
        yield (low,), (high - low,)
        return
    size = math.prod(shape[1:])
    row, rest = divmod(low, size)
    if rest:  # begins inside a row
        for offset, box in _boxes(shape[1:], rest, min(size, high - row * size)):
            yield (row, *offset), (1, *box)
        row += 1
    rows = high // size - row
    if rows > 0:
        yield (row, *(0,) * (len(shape) - 1)), (rows, *shape[1:])
    if rows >= 0 and high % size:
        for offset, box in _boxes(shape[1:], 0, high % size):
            yield (row + rows, *offset), (1, *box)


def _within(
    block: Block, local: tuple[int, ...], offset: tuple[int, ...], shape: tuple[int, ...], shift: int
) -> Iterator[Block]:
    """Yield the overlap of a box of the local index space with a block of the local storage, moved by ``shift``."""
    strides = row_major(local)
    begins, sizes = [], []
    rest = block.start
    for low, size, stride, count in zip(offset, shape, strides, block.region.shape, strict=True):
        position, rest = divmod(rest, stride)  # of the block along this dim of the local storage
        begin, end = max(low, position), min(low + size, position + count)
        if begin >= end:
            return
        begins.append(begin - position)
        sizes.append(end - begin)
    region = Region.box(
        tuple(first + begin for first, begin in zip(block.region.offset, begins, strict=True)), tuple(sizes)
    )
    start = block.start + sum(begin * stride for begin, stride in zip(begins, strides, strict=True))
    yield Block(region, start + shift, strides)
