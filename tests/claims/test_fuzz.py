"""Planning simulated in one process: generated layouts, mesh and flat, against plain gather, compute and scatter.

`make fuzz N=20000` runs more of it, from a new seed.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from muonmesh.errors import LayoutError
from muonmesh.layout import (
    FlatShards,
    Layout,
    MeshLayout,
    Parameter,
    Piece,
    Plan,
    Replicate,
    cost,
    make_plan,
    split_matrices,
)
from tests.support import fuzzing
from tests.support.fuzzing import COUNT, Case, Placed, contents, generated, stored
from tests.support.reference import split

pytestmark = pytest.mark.slow


def planned(case: Case) -> Plan:
    parameters = []
    for placed in case.buffers:
        for shape, spec, target, source in zip(
            placed.shapes, placed.specs, placed.targets, placed.sources, strict=True
        ):
            name = f"p{len(parameters)}"
            matrices = split_matrices(name, shape, spec)
            flops = tuple(cost(m.rows, m.cols, degrees=[(3,)] * 5) for m in matrices)
            parameters.append(Parameter(name, source, target, matrices, flops, ""))
    return make_plan(parameters, bucket_elements=case.bucket_elements)


def canonical(matrix: Tensor) -> Tensor:
    return (matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT).clone(memory_format=torch.contiguous_format)


def stand_in(matrix: Tensor, rows: int, cols: int) -> Tensor:
    """For the orthogonalization, exact in int64: everything in it depends on every element and on where it is."""
    down, along = torch.arange(1, matrix.shape[0] + 1)[:, None], torch.arange(1, matrix.shape[1] + 1)
    by_row, by_col = (matrix * along).sum(1, keepdim=True), (matrix * down * down).sum(0)
    return 7 * matrix + by_row * along + 3 * by_col * down + (by_row * down).sum() + 1000003 * rows + cols


def updates_of(whole: Tensor, spec: Any) -> Tensor:
    """The stand-in of each matrix, where its elements are in the parameter: gather, compute and scatter, whole."""
    result = torch.zeros(whole.numel(), dtype=torch.int64)
    for at in split(torch.arange(whole.numel()).reshape(whole.shape), spec):
        rows, cols = at.shape
        update = stand_in(canonical(whole.flatten()[at]), rows, cols)
        result[at] = update if rows <= cols else update.mT
    return result.reshape(whole.shape)


class Memory:
    """What every rank stores of the parameters of a case, as source or as target, in one vector a rank and holding."""

    def __init__(self, layouts: Sequence[Sequence[Layout]], wholes: Sequence[Tensor]) -> None:
        self._of: dict[tuple[int, int], Tensor] = {}  # by parameter number and rank; those of a buffer share one
        number = 0
        for group in layouts:
            values = wholes[number : number + len(group)]
            for rank in group[0].ranks:
                memory = contents(group, rank, values, padding=-1 - rank)
                self._of.update({(number + i, rank): memory for i in range(len(group))})
            number += len(group)

    def at(self, parameter: int, rank: int, piece: Piece) -> Tensor:
        return self._of[parameter, rank].as_strided(piece.shape, piece.storage_strides, piece.storage_start)

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Memory)
        return self._of.keys() == other._of.keys() and all(torch.equal(self._of[k], other._of[k]) for k in self._of)


def move(plan: Plan, bucket: int, *, gather: bool, memory: Memory, matrices: dict[int, Tensor]) -> None:
    """Move a bucket as ranks do: each packs and unpacks by its own routes. What arrives is added to what is there."""

    def part_of(leg: Any, rank: int, *, stored: bool) -> Tensor:
        piece = leg.piece
        if stored:
            return memory.at(leg.parameter, rank, piece)
        assert plan.assignments[leg.assignment].owner == rank
        return matrices[leg.assignment].as_strided(piece.shape, piece.matrix_strides, piece.matrix_start)

    routes = {rank: plan.routes(bucket, rank, gather=gather) for rank in plan.ranks}
    moved = {number for number in plan.buckets[bucket] if plan.moves(number)}
    sent: dict[tuple[int, int], Tensor] = {}
    for rank, routes_of_rank in routes.items():
        for peer, legs in (routes_of_rank.stored if gather else routes_of_rank.assembled).items():
            sent[rank, peer] = torch.cat([part_of(leg, rank, stored=gather).flatten() for leg in legs])
            if rank != peer:
                assert plan.gathers(bucket) if gather else plan.scatters(bucket)
                assert all(leg.assignment in moved for leg in legs)
    for rank, routes_of_rank in routes.items():
        for peer, legs in (routes_of_rank.assembled if gather else routes_of_rank.stored).items():
            message = sent.pop((peer, rank))
            parts = message.split([leg.piece.numel for leg in legs])  # without gaps
            for leg, part in zip(legs, parts, strict=True):
                part_of(leg, rank, stored=not gather).add_(part.view(leg.piece.shape))
    assert not sent, "messages that nobody expects"


def check(case: Case) -> None:
    """Gather, compute and scatter by the plan, and compare what every rank then stores with plain slicing."""
    plan = planned(case)
    shapes = [shape for placed in case.buffers for shape in placed.shapes]
    specs = [spec for placed in case.buffers for spec in placed.specs]
    momenta, first = [], 1
    for shape in shapes:  # no two elements alike, none zero
        momenta.append(torch.arange(first, first + torch.Size(shape).numel()).reshape(shape))
        first += momenta[-1].numel()
    updates = [updates_of(whole, spec) for whole, spec in zip(momenta, specs, strict=True)]
    weights = [whole * whole for whole in momenta]

    expected = [m for whole, spec in zip(momenta, specs, strict=True) for m in split(whole, spec)]
    assert [(a.matrix.rows, a.matrix.cols) for a in plan.assignments] == [tuple(m.shape) for m in expected]
    assert sorted(number for bucket in plan.buckets for number in bucket) == list(range(len(expected)))
    loads = dict.fromkeys(plan.ranks, 0)
    for assignment in plan.assignments:
        assert assignment.owner in plan.parameters[assignment.parameter].target.ranks
        loads[assignment.owner] += assignment.flops
    assert plan.loads == loads

    targets = [placed.targets for placed in case.buffers]
    source, target = Memory([placed.sources for placed in case.buffers], momenta), Memory(targets, weights)
    for bucket, numbers in enumerate(plan.buckets):
        matrices = {n: torch.zeros(plan.assignments[n].matrix.shape, dtype=torch.int64) for n in numbers}
        move(plan, bucket, gather=True, memory=source, matrices=matrices)
        for number, matrix in matrices.items():
            assert torch.equal(matrix, canonical(expected[number]))
            matrices[number] = stand_in(matrix, *expected[number].shape)
        move(plan, bucket, gather=False, memory=target, matrices=matrices)
    assert source == Memory([placed.sources for placed in case.buffers], momenta)
    assert target == Memory(targets, [w + u for w, u in zip(weights, updates, strict=True)])


def kinds(case: Case) -> Iterator[str]:
    yield "all"
    for placed in case.buffers:
        for shape, spec, target, source in zip(
            placed.shapes, placed.specs, placed.targets, placed.sources, strict=True
        ):
            yield from (form for form in FORMS if form in str(spec))
            if "interleaved', (" in str(spec):
                yield "unequal runs"
            if str(spec).count("(") > 1:
                yield "nested"
            if max(shape) > 100:
                yield "large"
            if target is not source:
                yield f"momentum elsewhere, {type(source).__name__}"
            if isinstance(target, FlatShards):
                yield "flat" if all(isinstance(p, Replicate) for p in placements_of(target.within)) else "flat shards"
                yield from flat_kinds(target)
                if len(placed.targets) > 1:
                    yield "several in a buffer"
            elif isinstance(target, MeshLayout):
                yield f"{len(target.mesh)} axes"
                yield from {str(placement).partition("(")[0] for placement in target.placements}
                yield from mesh_kinds(target)


def mesh_kinds(layout: MeshLayout) -> Iterator[str]:
    pieces = [stored(layout, rank, torch.empty(layout.shape, dtype=torch.bool)) for rank in layout.ranks]
    if len({piece.shape for piece in pieces}) > 1:
        yield "uneven"
    if not all(piece.numel() for piece in pieces):
        yield "empty"
    if sum(piece.numel() for piece in pieces) > torch.Size(layout.shape).numel():
        yield "replicas"


def flat_kinds(layout: FlatShards) -> Iterator[str]:
    lengths = [[interval.length for interval in intervals if interval.length] for intervals in layout.intervals]
    if not all(lengths):
        yield "a rank with nothing"
    if max(map(len, lengths)) > 1:
        yield "several intervals"
    if len(layout.replicas) > 1:
        yield "flat replicas"
    if layout.replicas[0] != layout.ranks and len(layout.replicas) == 1:
        yield "flat, cut up among all"


def placements_of(layout: Layout) -> tuple[Any, ...]:
    assert isinstance(layout, MeshLayout)
    return layout.placements


FORMS = ("whole", "rows", "cols", "heads", "interleaved", "transposed", "stack", "flatten")
SPLITS = (*FORMS, "unequal runs", "nested", "large")
ON_MESH = ("1 axes", "2 axes", "3 axes", "4 axes", "Replicate", "Shard", "StridedShard", "uneven", "empty", "replicas")
ELSEWHERE = ("momentum elsewhere, MeshLayout", "momentum elsewhere, FlatShards")
FLAT = ("flat", "flat shards", "a rank with nothing", "several intervals", "flat replicas", "several in a buffer")


@pytest.mark.parametrize(
    ("holding", "share", "expected"),
    [
        (fuzzing.on_mesh, 0.4, (*SPLITS, *ON_MESH)),
        (fuzzing.with_momentum_elsewhere, 0.3, (*SPLITS, *ON_MESH, *ELSEWHERE)),
        (fuzzing.in_flat_buffers, 0.3, (*SPLITS, *FLAT)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_planning_is_plain_slicing(holding: Any, share: float, expected: Sequence[str]) -> None:
    """At least ``COUNT`` different layouts in all, with enough of each kind."""
    hashes: dict[str, set[int]] = defaultdict(set)

    count = share * COUNT

    def check_once(case: Case) -> None:
        if hash(case) in hashes["all"] or len(hashes["all"]) >= count:
            return
        check(case)
        for kind in kinds(case):
            hashes[kind].add(hash(case))

    generated(fuzzing.cases(holding), int(1.25 * count) + 1)(check_once)()  # a few are drawn twice
    assert len(hashes["all"]) >= int(count)
    if count >= 500:
        assert [kind for kind in expected if len(hashes[kind]) < count / 20] == []


@generated(st.one_of(fuzzing.on_mesh(), fuzzing.in_flat_buffers()), COUNT // 8)
def test_what_layouts_say_of_themselves(placed: Placed) -> None:
    for shape, spec, layout in zip(placed.shapes, placed.specs, placed.targets, strict=True):
        whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
        memory = {rank: contents([layout], rank, [whole], padding=-1) for rank in layout.ranks}
        for rank in layout.ranks:
            flat = isinstance(layout, FlatShards)
            local = memory[rank] if flat else stored(layout, rank, whole)
            assert layout.local_shape(rank) == tuple(local.shape)
            replica = layout.replica(rank)
            assert rank in replica
            parts = torch.cat([memory[other] for other in replica])
            assert torch.equal(parts[parts >= 0].sort().values, whole.flatten())
        assert sum(int((m >= 0).sum()) for m in memory.values()) == layout.copies() * whole.numel()
        strided = isinstance(layout, MeshLayout) and any(getattr(p, "split_factor", 1) > 1 for p in layout.placements)
        matrices = split_matrices("w", shape, spec)
        for block in matrices[len(matrices) // 2].blocks[:5]:
            triples = zip(block.region.offset, block.region.shape, block.region.step, strict=True)
            elements = whole[tuple(slice(o, o + (n - 1) * s + 1, s) for o, n, s in triples)].flatten()
            holders = {rank for rank in layout.ranks if bool(torch.isin(elements, memory[rank]).all())}
            ranks = set(layout.holders(block.region))
            # a region in two runs of an interleaved shard need not count as held
            assert ranks <= holders if strided else ranks == holders


@generated(st.tuples(fuzzing.in_flat_buffers(), st.randoms(use_true_random=False)), COUNT // 8)
def test_flat_shards_that_do_not_cover_are_refused(drawn: tuple[Placed, random.Random]) -> None:
    placed, choice = drawn
    layout = choice.choice(placed.targets)
    assert isinstance(layout, FlatShards)
    layout.prove_cover()
    rank = choice.choice([rank for rank, pieces in enumerate(layout.intervals) if any(i.length for i in pieces)])
    pieces = list(layout.intervals[rank])
    broken = pieces.pop(choice.choice([number for number, interval in enumerate(pieces) if interval.length]))
    wrong = choice.choice(["missing", "twice", "short"])
    if wrong == "twice":
        pieces += [broken, broken]
    elif wrong == "short":
        pieces.append(broken._replace(length=broken.length - 1))
    intervals = (*layout.intervals[:rank], tuple(pieces), *layout.intervals[rank + 1 :])
    with pytest.raises(LayoutError, match="held"):
        replace(layout, intervals=intervals).prove_cover()
