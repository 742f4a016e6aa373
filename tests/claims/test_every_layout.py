"""Invariant 1 under every way of holding a matrix: meshes of any dimension, declared shards, flat buffers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import muonmesh as mm
from muonmesh.comm.storage import local_of
from tests.support import layouts, problem
from tests.support.meshes import mesh_of

COVERS = (
    "comm.placing.storage_of",
    "comm.sharing.sharded_over_replicas",
)

EIGHT = [name for name, (sizes, _) in layouts.EIGHT.items() if len(sizes) == 3]
FP32: dict[str, Any] = {"compute_dtype": torch.float32}
FLAT = {"flat": {}, "flat shards": {"tensor_parallel": 2}}


def hold_in_layout(layout: str, seed: int, how: str) -> layouts.Held:
    if layout in FLAT:
        return layouts.flat(problem.PARAMETERS, problem.initial(), seed=seed, **FLAT[layout])
    sizes, placements_of = {**layouts.MESHES, **layouts.EIGHT}[layout]
    hold = layouts.declared if how == "declared" else layouts.dtensors
    mesh = mesh_of(sizes)
    return hold(problem.PARAMETERS, problem.initial(), mesh, lambda _, shape: placements_of(len(shape)))


def stepped_as_held(layout: str, seed: int = 0, how: str = "", **settings: Any) -> tuple[list[str], Any, Any]:
    """What differs from one process; what was promised and done; elements of momentum here, and in all."""
    placed = hold_in_layout(layout, seed, how)
    optimizer = mm.Muon(placed.groups, **placed.settings, **{**problem.SETTINGS, **settings})
    for step in range(3):
        placed.give(problem.gradients(step))
        optimizer.step()
    settings.pop("shard_state", None)
    result = placed.whole(optimizer)
    stored = [state["momentum_buffer"] for state in optimizer.state.values() if "momentum_buffer" in state]
    elements = sum(local_of(buffer).numel() for buffer in stored)
    whole = sum(value.numel() for name, value in result.items() if name.endswith(".momentum_buffer"))
    differing = problem.differing(result, problem.alone(3, **settings))
    return differing, problem.promised_and_counted(optimizer), (elements, whole)


# Declared shards are cut by the same layouts; one of each kind stays.
DECLARED = ("hsdp", "rows by cols", "fsdp over colwise", "strided alone", "experts")
SOAK = [pytest.mark.soak]
CASES = [
    *(pytest.param(4, name, 0, "", FP32, id=name) for name in layouts.MESHES),
    *(
        pytest.param(4, name, 0, "declared", FP32, id=f"{name}, declared", marks=SOAK * (name not in DECLARED))
        for name in layouts.MESHES
    ),
    *(
        pytest.param(4, name, 0, "", {"memory_budget_mb": 0.08}, id=f"{name}, bf16")
        for name in ("hsdp", "fsdp over colwise", "experts")
    ),
    *(
        pytest.param(
            ranks, "flat", seed, "", settings, id=f"flat {seed}, {ranks} ranks, {settings}", marks=SOAK * (ranks == 2)
        )
        for ranks, seed, settings in itertools.product((2, 4), range(3), (FP32, {}))
    ),
    *(pytest.param(4, "flat shards", seed, "", FP32, id=f"flat shards {seed}") for seed in range(3)),
    *(pytest.param(8, name, 0, "", FP32, id=name, marks=SOAK * (name == "hsdp over rowwise")) for name in EIGHT),
]


@pytest.mark.parametrize(("ranks", "layout", "seed", "how", "settings"), CASES)
def test_bit_for_bit_in_any_layout(
    workers, ranks: int, layout: str, seed: int, how: str, settings: dict[str, Any]
) -> None:
    orthogonalized = 0
    for differing, (promised, counted), _ in workers(ranks).run(stepped_as_held, layout, seed, how, **settings):
        assert differing == []
        assert promised == counted
        orthogonalized += counted[0]
    assert orthogonalized == len(problem.matrices()), "each once, over all ranks"


@pytest.mark.parametrize("settings", [FP32, {}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["hsdp", "replicate inside", "all replicated"])
def test_momentum_shared_by_replicas_has_the_same_bits_and_takes_less(workers, layout: str, settings: Any) -> None:
    outcomes = workers(4).run(stepped_as_held, layout, shard_state=True, **settings)
    assert [differing for differing, *_ in outcomes] == [[]] * 4
    stored, (whole, *_) = [elements for *_, (elements, _) in outcomes], [whole for *_, (_, whole) in outcomes]
    assert sum(stored) == whole, "each element once"
    assert max(stored) <= 1.25 * whole / 4


@pytest.mark.parametrize("layout", ["fsdp over rowwise", "three axes", "hsdp, shard 1", "cols by rows"])
def test_momentum_is_shared_where_it_can_be(workers, layout: str) -> None:
    outcomes = workers(4).run(stepped_as_held, layout, shard_state=True, **FP32)
    assert [differing for differing, *_ in outcomes] == [[]] * 4


def whole_experts(dim: int) -> tuple[int, int, bool]:
    """Eight experts on four ranks, two each, or each cut among all."""
    mesh = mesh_of((4,))
    value = torch.randn(8, 12, 20, generator=torch.Generator().manual_seed(0))
    twin = nn.Parameter(value.clone())
    weight = nn.Parameter(distribute_tensor(value.clone(), mesh, [Shard(dim)], src_data_rank=None))
    optimizers = [mm.Muon([weight], lr=0.1), mm.Muon([twin], lr=0.1, process_group="local")]
    gradient = torch.randn(8, 12, 20, generator=torch.Generator().manual_seed(1))
    weight.grad, twin.grad = distribute_tensor(gradient, mesh, [Shard(dim)], src_data_rank=None), gradient.clone()
    for optimizer in optimizers:
        optimizer.step()
    counts = optimizers[0].counts
    return counts.bytes_sent, counts.orthogonalized, torch.equal(weight.full_tensor(), twin)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_whole_experts_cost_no_communication(workers, dim: int) -> None:
    outcomes = workers(4).run(whole_experts, dim)
    assert [same for _, _, same in outcomes] == [True] * 4
    assert [count for _, count, _ in outcomes] == [2] * 4
    assert all((sent == 0) == (dim == 0) for sent, _, _ in outcomes)
