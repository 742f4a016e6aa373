"""Planning simulated in one process: random shapes, meshes, placements and splits against plain torch slicing."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import muonmesh as mm
from muonmesh.errors import LayoutError
from muonmesh.layout import (
    MeshLayout,
    Parameter,
    Plan,
    Shard,
    cost,
    make_plan,
    split_matrices,
)
from muonmesh.layout.piece_table import Row
from muonmesh.layout.region import Region
from tests.support import fuzzing
from tests.support.reference import split

COVERS = (
    "layout.layout.MeshLayout",
    "layout.cost.cost",
    "layout.cover.prove",
    "layout.matrix.assemble",
    "layout.matrix.split_matrices",
    "layout.parameter.Parameter",
    "layout.plan.make_plan",
    "layout.region.Region",
    "layout.piece_table.pieces",
)


def at_storage(storage: Tensor, leg: Row) -> Tensor:
    piece = leg.piece
    return storage.view(-1).as_strided(piece.shape, piece.storage_strides, piece.storage_start)


def at_matrix(matrix: Tensor, leg: Row) -> Tensor:
    piece = leg.piece
    return matrix.view(-1).as_strided(piece.shape, piece.matrix_strides, piece.matrix_start)


def test_a_matrix_in_several_runs_of_one_rank_does_not_travel() -> None:
    """Rank 0 holds columns 0 and 2, which are the first of two alternating matrices."""
    layout = MeshLayout((1, 4), (2,), (0, 1), (Shard(1, 2),))
    matrices = split_matrices("w", (1, 4), ("transposed", ("interleaved", 2, 0)))
    assert [layout.holders(matrix.blocks[0].region) for matrix in matrices] == [(0,), (1,)]
    assert layout.holders(Region.box((0, 0), (1, 3))) == ()
    plan = make_plan([Parameter("w", layout, layout, matrices, (1, 1), "")], bucket_elements=10)
    assert [a.owner for a in plan.assignments] == [0, 1]
    assert not any(plan.moves(number) for number in range(2))


@hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
@hypothesis.given(st.data())
def test_any_owner_gets_the_whole_matrix_and_one_copy_comes_back(data: st.DataObject) -> None:
    """Whoever owns it, not only whom the planner would choose."""
    shape, spec = data.draw(fuzzing.specs(13))
    layout = data.draw(fuzzing.mesh_layouts(shape))
    parameter = fuzzing.parameter("w", shape, spec, layout)
    owners = st.sampled_from(layout.ranks)
    chosen = data.draw(st.dictionaries(st.sampled_from([m.index for m in parameter.matrices]), owners, min_size=1))
    fixed = {("w", layout.ranks, index): owner for index, owner in chosen.items()}
    plan = make_plan([parameter], bucket_elements=data.draw(st.sampled_from([1, 50, 10**6])), fixed_owners=fixed)
    assert {a.matrix.index: a.owner for a in plan.assignments}.items() >= chosen.items()

    whole = torch.arange(math.prod(shape)).reshape(shape)
    storages = {rank: fuzzing.stored(layout, rank, whole) for rank in layout.ranks}
    expected = [fuzzing.canonical(matrix) for matrix in split(whole, spec)]
    written = {rank: torch.zeros(storage.shape, dtype=torch.int64) for rank, storage in storages.items()}
    for bucket in range(len(plan.buckets)):
        to_owners = {rank: plan.routes(bucket, rank, gather=True) for rank in plan.ranks}
        to_holders = {rank: plan.routes(bucket, rank, gather=False) for rank in plan.ranks}
        counts = {number: torch.zeros(expected[number].shape, dtype=torch.int64) for number in plan.buckets[bucket]}
        moved = {True: False, False: False}
        for gather, routes in ((True, to_owners), (False, to_holders)):
            for rank in plan.ranks:
                for holder, legs in routes[rank].assembled.items():
                    assert routes[holder].stored[rank] == legs  # both ends agree
                    moved[gather] = moved[gather] or holder != rank
                    for leg in legs:
                        assert torch.equal(at_storage(storages[holder], leg), at_matrix(expected[leg.assignment], leg))
                        assert rank == plan.assignments[leg.assignment].owner
                        if gather:
                            at_matrix(counts[leg.assignment], leg).add_(1)
                        else:
                            at_storage(written[holder], leg).add_(1)
                for owner, legs in routes[rank].stored.items():
                    assert routes[owner].assembled[rank] == legs
        assert all(bool((count == 1).all()) for count in counts.values())  # the whole matrix, once
        assert (plan.gathers(bucket), plan.scatters(bucket)) == (moved[True], moved[False])
    assert all(bool((count == 1).all()) for count in written.values())  # one copy back, to every replica
    assert sum(plan.loads.values()) == sum(parameter.flops)


def test_owners_are_told_and_are_part_of_what_ranks_compare() -> None:
    layout = fsdp((8, 8), 4)
    parameter = Parameter("w", layout, layout, split_matrices("w", (8, 8)), (12,), "")
    plans = [
        make_plan([parameter], bucket_elements=10, fixed_owners={("w", layout.ranks, 0): owner}) for owner in (2, 3)
    ]
    assert [plan.description()[-1] for plan in plans] == ["bucket 0: w[0] on 2", "bucket 0: w[0] on 3"]
    assert plans[0].digest != plans[1].digest
    assert plans[1].loads == {0: 0, 1: 0, 2: 0, 3: 12}


def fsdp(shape: tuple[int, ...], ranks: int) -> MeshLayout:
    return MeshLayout(shape, (ranks,), tuple(range(ranks)), (Shard(0),))


def replicated_layout(shape: tuple[int, ...], ranks: int) -> MeshLayout:
    return MeshLayout.replicated(shape, tuple(range(ranks)))


def model_plan(layout: Any, ranks: int, layers: int = 12) -> Plan:
    parameters = []
    for layer in range(layers):
        for name, shape in (("qkv", (2304, 768)), ("o", (768, 768)), ("up", (3072, 768)), ("down", (768, 3072))):
            matrices = split_matrices(f"{layer}.{name}", shape)
            flops = tuple(cost(m.rows, m.cols, degrees=[(3, 3, 3), (3, 3)]) for m in matrices)
            parameters.append(
                Parameter(f"{layer}.{name}", layout(shape, ranks), layout(shape, ranks), matrices, flops, "")
            )
    return make_plan(parameters, bucket_elements=10**7)


def test_a_whole_matrix_stays_with_a_rank_that_holds_it() -> None:
    layout = fsdp((8, 64, 64), 4)  # two experts a rank
    plan = fuzzing.planned((8, 64, 64), "stack", layout)
    assert [assignment.owner for assignment in plan.assignments] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert not any(plan.gathers(b) or plan.scatters(b) for b in range(len(plan.buckets)))


def test_a_rank_that_holds_more_gives_some_away() -> None:
    plan = fuzzing.planned((9, 64, 64), "stack", fsdp((9, 64, 64), 4))  # shards of 3, 3, 3 and 0
    counts = [sum(a.owner == rank for a in plan.assignments) for rank in range(4)]
    assert sorted(counts) == [2, 2, 2, 3]


def test_replicated_storage_gathers_nothing() -> None:
    plan = model_plan(replicated_layout, 4)
    assert not any(plan.gathers(b) for b in range(len(plan.buckets)))
    assert all(plan.scatters(b) for b in range(len(plan.buckets)))


def test_every_owner_has_work_in_every_full_bucket() -> None:
    plan = model_plan(fsdp, 4)
    assert len(plan.buckets) > 1
    for bucket in plan.buckets[:-1]:
        assert {plan.assignments[number].owner for number in bucket} == {0, 1, 2, 3}


def test_the_digest_is_that_of_the_plan() -> None:
    assert model_plan(fsdp, 4).digest == model_plan(fsdp, 4).digest
    assert model_plan(fsdp, 4).digest != model_plan(fsdp, 2).digest
    assert model_plan(fsdp, 4).digest != model_plan(replicated_layout, 4).digest
    assert model_plan(fsdp, 4).digest != model_plan(fsdp, 4, layers=11).digest


@pytest.mark.parametrize("fault", ["overlap", "gap", "twice"])
def test_matrices_that_do_not_tile_are_refused(fault: str) -> None:
    whole = split_matrices("w", (8, 4), ("rows", 4, 4))
    if fault == "overlap":
        block = whole[1].blocks[0]
        moved = Region((3, 0), (4, 4), (1, 1))
        broken = (whole[0], replace(whole[1], blocks=(replace(block, region=moved),)))
    elif fault == "gap":
        broken = whole[:1]
    else:
        broken = (whole[0], whole[0])
    layout = replicated_layout((8, 4), 1)
    parameter = Parameter("w", layout, layout, broken, (1,) * len(broken), "")
    with pytest.raises(LayoutError, match=r"^w: "):
        make_plan([parameter], bucket_elements=100)


def test_layouts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(LayoutError, match="placements"):
        MeshLayout((4, 4), (2, 2), (0, 1, 2, 3), (Shard(0),))
    with pytest.raises(LayoutError, match="ranks"):
        MeshLayout((4, 4), (2,), (0, 1, 2), (Shard(0),))
    with pytest.raises(LayoutError, match="shape"):
        MeshLayout((4, 4), (2,), (0, 1), (Shard(2),))


def test_cover_is_proved_not_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break the splitting on purpose: the proof, and not only the tests, must notice."""
    from muonmesh.layout import layout as module

    honest = module._split
    module._prove_dim.cache_clear()
    monkeypatch.setattr(module, "_split", lambda size, cuts, at: tuple((f, c - 1) for f, c in honest(size, cuts, at)))
    with pytest.raises(LayoutError, match=r"w: found indices"):
        fuzzing.planned((7, 5), "whole", fsdp((7, 5), 3))
    module._prove_dim.cache_clear()


@pytest.mark.parametrize(
    ("shape", "spec", "message"),
    [
        ((4, 6), ("rows", 3), "add up to 3, not 4"),
        ((4, 6), ("cols", 3, 4), "add up to 7, not 6"),
        ((4, 6), ("heads", 3, 0), "multiple of 3 heads"),
        ((4, 6), ("heads", 2, 2), "dim must be 0 or 1"),
        ((4, 6), ("interleaved", 4, 1), "not a multiple"),
        ((4, 6), ("rows", 2.0, 2), "positive integers"),
        ((4, 6), ("rows", 0, 4), "positive integers"),
        ((4, 6), ("rows",), "positive integers"),
        ((4, 6), "stack", "at least three dims"),
        ((4, 6, 2), ("rows", 2, 2), "nest it"),
        ((4, 6), ("transposed", "stack"), "other way round"),
        ((4, 6), ("whole", 3), "wrong number"),
        ((4, 6, 2), ("flatten", ("cols", 4, 8)), "cuts dim 0"),
        ((4, 6, 2), ("flatten", "transposed"), "cuts dim 0"),
        ((4, 6), 7, "unknown form"),
        ((12, 6), ("interleaved", (3, 2), 0), "12 is not a multiple of 5, the length of one turn"),
        ((12, 6), ("interleaved", (2, 1, 1), 1), "6 is not a multiple of 4"),
        ((12, 6), ("interleaved", 5, 0, 2), "12 is not a multiple of 10"),
        *(
            ((12, 6), ("interleaved", runs, 0), "sizes must be positive integers")
            for runs in ((2, 0), (2, "1"), ((2, 1), 1), ())
        ),
        ((12, 6), ("interleaved", (2, 1), 2), "dim must be 0 or 1"),
        *(
            ((12, 6), spec, r"wrong number of values.*needed a form.*\(runs\.\.\.\)")
            for spec in (("interleaved", (2, 1)), ("interleaved", (2, 1), 0, 2), ("interleaved",))
        ),
        ((4,), None, "needed a matrix"),
        ((4, 6, 3, 3), None, "flatten"),
        ((4, 0), None, "at least 1"),
    ],
)
def test_specs_that_do_not_fit_say_why(shape: tuple[int, ...], spec: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"w: .*{message}"):
        split_matrices("w", shape, spec)


def test_cost_counts_what_is_computed() -> None:
    assert cost(1, 1, degrees=[(3,)]) == 1 + 1 + 2
    assert cost(10, 40, degrees=[(3,)] * 5) == cost(40, 10, degrees=[(3,)] * 5)
    assert cost(768, 3072, degrees=[(3, 3, 3), (3, 3)]) < cost(768, 3072, degrees=[(3,)] * 5)
    assert cost(64, 64, degrees=[(2,)]) < cost(64, 64, degrees=[(3,)])


def test_a_form_may_come_from_json() -> None:
    """Tuples come back as lists."""
    spec = ("stack", ("transposed", ("interleaved", (3, 1), 1)))
    assert split_matrices("w", (2, 8, 6), json.loads(json.dumps(spec))) == split_matrices("w", (2, 8, 6), spec)


def test_a_step_of_unequal_runs_is_that_of_the_separate_matrices() -> None:
    spec = ("interleaved", (6, 2, 1), 0)
    whole, gradient = torch.randn(2, 18, 8)
    fused, apart = nn.Parameter(whole.clone()), [nn.Parameter(matrix.clone()) for matrix in split(whole, spec)]
    fused.grad = gradient
    for parameter, part in zip(apart, split(gradient, spec), strict=True):
        parameter.grad = part.clone()
    for groups in ([{"params": [fused], "matrices": [spec]}], apart):
        mm.Muon(groups, lr=0.1, compute_dtype=torch.float32).step()
    assert not torch.equal(fused.detach(), whole)
    assert all(map(torch.equal, split(fused.detach(), spec), apart))
