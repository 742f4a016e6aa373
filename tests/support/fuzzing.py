"""Generated layouts: every way to hold and to split parameters, and what torch itself would store of them.

What is generated is plain data in the package's vocabulary. `stored` and `contents`, the oracle, read only what a
layout was made of (mesh, ranks, placements, intervals), never what it computes from that.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import Placement as TorchPlacement
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard

from muonmesh.layout import (
    FlatShards,
    Interval,
    Layout,
    MeshLayout,
    Parameter,
    Placement,
    Plan,
    Replicate,
    Shard,
    cost,
    make_plan,
    split_matrices,
)

COUNT = int(os.environ.get("FUZZ", "120"))
"""How many layouts are planned; `make fuzz N=` sets it."""

SEED = int(os.environ.get("FUZZ_SEED", "0"))
"""What they are drawn from; `make fuzz SEED=` sets it."""


def generated(strategy: st.SearchStrategy[Any], count: int) -> Callable[[Callable[[Any], None]], Callable[[], None]]:
    """Make a test of ``count`` generated examples: the same ones for the same seed, and no time limit."""
    settings = hypothesis.settings(
        max_examples=max(1, count),
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    return lambda test: hypothesis.seed(SEED)(settings(hypothesis.given(strategy)(test)))


def examples(strategy: st.SearchStrategy[Any], count: int) -> list[Any]:
    """Return ``count`` generated examples, for ranks that step through all of them in one call."""
    drawn_examples: list[Any] = []
    generated(strategy, count)(lambda example: drawn_examples.append(example))()
    return drawn_examples


# ---------------------------------------------------------------- matrices


@st.composite
def sizes(draw: st.DrawFn, largest: int) -> int:
    """Mostly small, some large."""
    small = min(12, largest)
    large = draw(st.integers(0, 3)) == 3
    return draw(st.integers(small, largest)) if large else draw(st.integers(1, small))


@st.composite
def specs(draw: st.DrawFn, largest: int = 300) -> tuple[tuple[int, ...], Any]:
    """A shape, from 1 × 1 to ``largest`` a dim, and a way to split it into matrices."""
    if draw(st.integers(0, 7)) == 7:
        kernel = st.integers(1, 4)
        shape = (draw(sizes(largest)), *draw(st.lists(kernel, max_size=2)), draw(sizes(largest)))
        halves = "flatten" if shape[0] % 2 else ("flatten", ("heads", 2, 0))
        return shape[:2] + shape[2:][::-1], draw(st.sampled_from(["flatten", halves]))
    stacked = draw(st.integers(0, 3)) == 3
    (rows, cols), spec = draw(_flat_specs(20 if stacked else largest))
    if stacked:
        leading = draw(st.lists(st.integers(1, 5), min_size=1, max_size=2))
        spec = "stack" if spec == "whole" and draw(st.booleans()) else ("stack", spec)
        return (*leading, rows, cols), spec
    return (rows, cols), spec


@st.composite
def _flat_specs(draw: st.DrawFn, largest: int) -> tuple[tuple[int, int], Any]:
    """A way to split a matrix, and its shape."""
    form = draw(st.sampled_from(["whole", "rows", "cols", "heads", "interleaved", "blocks", "runs", "transposed"]))
    if form == "transposed":
        (rows, cols), inner = draw(_flat_specs(largest))
        return (cols, rows), "transposed" if inner == "whole" and draw(st.booleans()) else ("transposed", inner)
    along, across = 1, draw(sizes(largest))
    dim, count = draw(st.integers(0, 1)), draw(st.integers(1, 4))
    part_sizes = st.lists(sizes(max(1, largest // 4)), min_size=1, max_size=4)
    spec: Any = "whole"
    if form == "whole":
        along = draw(sizes(largest))
    elif form in ("rows", "cols"):
        parts, dim = draw(part_sizes), int(form == "cols")
        spec, along = (form, *parts), sum(parts)
    elif form == "heads":
        spec, along = ("heads", count, dim), count * draw(sizes(max(1, largest // count)))
    elif form == "interleaved":
        spec, along = ("interleaved", count, dim), count * draw(sizes(max(1, largest // count)))
    elif form == "blocks":
        run = draw(st.integers(1, 5))
        spec, along = ("interleaved", count, dim, run), count * run * draw(st.integers(1, 5))
    else:
        runs = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
        spec, along = ("interleaved", runs, dim), sum(runs) * draw(st.integers(1, 5))
    return ((across, along) if dim else (along, across)), spec


# ---------------------------------------------------------------- layouts

MESHES = [mesh for axes in (1, 2, 3, 4) for mesh in itertools.product(range(1, 9), repeat=axes) if math.prod(mesh) <= 8]


@st.composite
def mesh_layouts(
    draw: st.DrawFn, shape: tuple[int, ...], ranks: Sequence[int] = range(8), *, every: bool = False
) -> MeshLayout:
    """Any placements on a mesh of 1 to 4 axes of some of the ranks (or ``every`` one), in any order."""
    fits = [mesh for mesh in MESHES if (math.prod(mesh) == len(ranks) if every else math.prod(mesh) <= len(ranks))]
    axes = draw(st.integers(1, 4))
    mesh = draw(st.sampled_from([mesh for mesh in fits if len(mesh) == axes]))
    order = tuple(draw(st.permutations(list(ranks))))[: math.prod(mesh)]
    return MeshLayout(shape, mesh, order, tuple(draw(placements(len(shape))) for _ in mesh))


def placements(dims: int) -> st.SearchStrategy[Placement]:
    dim = st.integers(0, dims - 1)
    return st.one_of(st.just(Replicate()), st.builds(Shard, dim), st.builds(Shard, dim, st.integers(1, 4)))


@st.composite
def shared_by_replicas(draw: st.DrawFn, layout: MeshLayout) -> MeshLayout:
    """A layout in which each rank holds part of what it holds in this one: replicate axes cut what is left."""
    new_placements = list(layout.placements)
    for axis, placement in enumerate(layout.placements):
        cut = {getattr(later, "dim", None) for later in layout.placements[axis + 1 :]}
        free = [dim for dim in range(len(layout.shape)) if dim not in cut]
        if isinstance(placement, Replicate) and free and draw(st.integers(0, 3)):
            dim = draw(st.sampled_from(free))
            new_placements[axis] = draw(st.sampled_from([Shard(dim), Shard(dim), Shard(dim, 2)]))
    return MeshLayout(layout.shape, layout.mesh, layout.ranks, tuple(new_placements))


@st.composite
def flat_layouts(draw: st.DrawFn, withins: Sequence[MeshLayout]) -> tuple[FlatShards, ...]:
    """Parameters held by the same ranks, in one flat buffer a rank.

    Borders lie anywhere, also twice at one place; ranks hold any number of intervals, in any order, with padding
    anywhere; what several ranks would hold alike is cut up among all of them or held by several replicas.
    """
    pieces: dict[int, list[tuple[int, int, int]]] = {rank: [] for rank in withins[0].ranks}
    replicas: list[list[list[int]]] = []
    for number, within in enumerate(withins):
        alike = ranks_alike(within)
        sets: list[list[int]] = [[] for _ in range(draw(st.integers(1, len(alike[0]))))]
        for ranks in alike:
            parts: list[list[int]] = [[] for _ in sets]
            for position, rank in enumerate(draw(st.permutations(ranks))):
                parts[position if position < len(sets) else draw(st.integers(0, len(sets) - 1))].append(rank)
            length = stored(within, ranks[0], torch.empty(within.shape, dtype=torch.bool)).numel()
            for replica, part in zip(sets, parts, strict=True):
                replica.extend(part)
                borders = draw(st.lists(st.integers(0, length), max_size=4))
                for low, high in itertools.pairwise([0, *sorted(borders), length]):
                    pieces[draw(st.sampled_from(part))].append((number, low, high - low))
        replicas.append(sets)
    padding = st.sampled_from([0, 0, 0, 1, 5])
    intervals_of: list[dict[int, list[Interval]]] = [{rank: [] for rank in pieces} for _ in withins]
    total = dict.fromkeys(pieces, 0)
    for rank, intervals in pieces.items():
        for number, first, length in draw(st.permutations(intervals)):
            start = total[rank] + draw(padding)
            intervals_of[number][rank].append(Interval(first, length, start))
            total[rank] = start + length
        total[rank] += draw(padding)
    return tuple(
        FlatShards(
            within,
            tuple(tuple(intervals_of[number][rank]) for rank in within.ranks),
            tuple(total[rank] for rank in within.ranks),
            tuple(map(tuple, replicas[number])),
        )
        for number, within in enumerate(withins)
    )


def ranks_alike(layout: MeshLayout) -> list[list[int]]:
    """The sets of ranks with equal coordinates on the axes that cut."""
    alike: dict[tuple[int, ...], list[int]] = {}
    coordinates = itertools.product(*(range(size) for size in layout.mesh))
    for rank, at in zip(layout.ranks, coordinates, strict=True):
        pairs = zip(at, layout.placements, strict=True)
        alike.setdefault(tuple(c for c, p in pairs if not isinstance(p, Replicate)), []).append(rank)
    return list(alike.values())


# ---------------------------------------------------------------- cases


@dataclass(frozen=True)
class Placed:
    """Parameters that lie together: one alone, or several in one flat buffer a rank.

    Attributes:
        shapes, specs: Of each parameter.
        targets: Where each lives.
        sources: Where the momentum of each lives.
    """

    shapes: tuple[tuple[int, ...], ...]
    specs: tuple[Any, ...]
    targets: tuple[Layout, ...]
    sources: tuple[Layout, ...]


@dataclass(frozen=True)
class Case:
    """What is planned together, and how many matrix elements go into a bucket."""

    buffers: tuple[Placed, ...]
    bucket_elements: int


@st.composite
def on_mesh(draw: st.DrawFn, ranks: Sequence[int] = range(8), largest: int = 300, *, every: bool = False) -> Placed:
    """A parameter placed on a mesh, its momentum there too."""
    shape, spec = draw(specs(largest))
    layout = draw(mesh_layouts(shape, ranks, every=every))
    return Placed((shape,), (spec,), (layout,), (layout,))


@st.composite
def with_momentum_elsewhere(draw: st.DrawFn, ranks: Sequence[int] = range(8)) -> Placed:
    """A parameter placed on a mesh, its momentum shared by the replicas, flat, or anywhere else on these ranks."""
    at_home = draw(on_mesh(ranks))
    (target,) = at_home.targets
    assert isinstance(target, MeshLayout)
    anywhere = mesh_layouts(target.shape, sorted(target.ranks), every=True)
    shared = shared_by_replicas(target)
    source = draw(st.one_of(shared, shared, flat_layouts([target]).map(lambda layouts: layouts[0]), anywhere))
    return Placed(at_home.shapes, at_home.specs, (target,), (source,))


@st.composite
def in_flat_buffers(
    draw: st.DrawFn, ranks: Sequence[int] = range(8), largest: int = 300, *, every: bool = False
) -> Placed:
    """Several parameters in one flat buffer a rank: of replicated parameters, or of shards."""
    pairs = draw(st.lists(specs(largest), min_size=1, max_size=3))
    first = draw(mesh_layouts(pairs[0][0], ranks, every=every))
    plain = draw(st.booleans())
    withins = []
    for shape, _ in pairs:
        placed = [Replicate() if plain else draw(placements(len(shape))) for _ in first.mesh]
        withins.append(MeshLayout(shape, first.mesh, first.ranks, tuple(placed)))
    layouts = draw(flat_layouts(withins))
    return Placed(tuple(shape for shape, _ in pairs), tuple(spec for _, spec in pairs), layouts, layouts)


@st.composite
def cases(draw: st.DrawFn, holding: Callable[..., st.SearchStrategy[Placed]]) -> Case:
    """One to three holdings on some of up to 8 ranks, whose numbers need not begin at 0."""
    begin, world = draw(st.sampled_from([0, 0, 3])), draw(st.integers(1, 8))
    buffers = draw(st.lists(holding(range(begin, begin + world)), min_size=1, max_size=3))
    return Case(tuple(buffers), draw(st.sampled_from([1, 100, 5000, 10**9])))


# ---------------------------------------------------------------- what torch would store


def torch_placements(layout: MeshLayout) -> list[TorchPlacement]:
    converted: list[TorchPlacement] = []
    for placement in layout.placements:
        if isinstance(placement, Replicate):
            converted.append(TorchReplicate())
        elif getattr(placement, "split_factor", 1) > 1:
            converted.append(_StridedShard(placement.dim, split_factor=placement.split_factor))
        else:
            converted.append(TorchShard(placement.dim))
    return converted


def stored(layout: MeshLayout, rank: int, whole: Tensor) -> Tensor:
    """What DTensor itself would store on a rank: its own splitting, placement by placement."""
    coordinates = list(itertools.product(*(range(size) for size in layout.mesh)))[layout.ranks.index(rank)]
    for size, placement, at in zip(layout.mesh, torch_placements(layout), coordinates, strict=True):
        if not isinstance(placement, TorchReplicate):
            split: Any = placement
            whole = split._split_tensor(whole, size, with_padding=False)[0][at]
    return whole.clone(memory_format=torch.contiguous_format)


def contents(layouts: Sequence[Layout], rank: int, wholes: Sequence[Tensor], padding: float) -> Tensor:
    """What a rank's memory for the parameters of one `Placed` holds, as a vector; ``padding`` where no parameter is."""
    first = layouts[0]
    if isinstance(first, MeshLayout):
        return stored(first, rank, wholes[0]).flatten()
    assert isinstance(first, FlatShards)
    memory = torch.full((first.sizes[first.within.ranks.index(rank)],), padding, dtype=wholes[0].dtype)
    for layout, whole in zip(layouts, wholes, strict=True):
        assert isinstance(layout, FlatShards)
        assert isinstance(layout.within, MeshLayout)
        local = stored(layout.within, rank, whole).flatten()
        for begin, length, start in layout.intervals[layout.within.ranks.index(rank)]:
            memory[start : start + length] = local[begin : begin + length]
    return memory


# ---------------------------------------------------------------- plans


def parameter(name: str, shape: tuple[int, ...], spec: Any, target: Layout, source: Layout | None = None) -> Parameter:
    """Return what is planned of a parameter whose momentum lives where it does, or elsewhere."""
    matrices = split_matrices(name, shape, spec)
    flops = tuple(cost(m.rows, m.cols, degrees=[(3,)] * 5) for m in matrices)
    return Parameter(name, source or target, target, matrices, flops, "")


def planned(shape: tuple[int, ...], spec: Any, layout: MeshLayout, bucket_elements: int = 50) -> Plan:
    """Return the plan of one parameter."""
    return make_plan([parameter("w", shape, spec, layout)], bucket_elements=bucket_elements)


def canonical(matrix: Tensor) -> Tensor:
    """Return a matrix as it is orthogonalized: no more rows than columns, contiguous."""
    return (matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT).clone(memory_format=torch.contiguous_format)
