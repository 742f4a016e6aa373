"""Who shares what: ranks linked through others, replicas outside a mesh, gradients missing on shards and replicas."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import muonmesh as mm
from muonmesh.comm.storage import local_of
from muonmesh.layout import FlatShards
from tests.support import problem
from tests.support.meshes import mesh_of
from tests.support.on_ranks import on_ranks

COVERS = (
    "comm.ranks.connected_ranks",
    "step.planning.plan_members",
)


def values(count: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(12 + 2 * i, 10 + i, generator=generator) for i in range(count)]


def trained_by_local_group(weights: list[Tensor], gradients: list[list[Tensor]], **settings: Any) -> list[Tensor]:
    parameters = [nn.Parameter(weight.clone()) for weight in weights]
    optimizer = mm.Muon(parameters, process_group="local", compute_dtype=torch.float32, **settings)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


# ------------------------------------------------------------------ connected sets

# Rank: sets of ranks that share a parameter with it; 0-1-3-2 are linked through each other, or only in pairs.
SETS = {
    "ring": [(0, 1), (1, 3), (2, 3), (0, 2)],
    "chain": [(0, 1), (1, 2), (2, 3)],
    "pairs": [(0, 1), (2, 3)],
    "experts": [(0, 1, 2, 3), (0, 2), (1, 3)],
    "three and one": [(0, 1), (1, 2), (3,)],
}


def distributed(value: Tensor, placed: Any) -> Tensor:
    return value.flatten().clone() if placed is None else distribute_tensor(value.clone(), *placed, src_data_rank=None)


def in_sets(kind: str) -> tuple[bool, tuple[int, ...], int]:
    """One parameter for each set, with the same name in every set, sharded over its ranks or replicated."""
    rank = dist.get_rank()
    groups = {s: dist.new_group(s) for s in SETS[kind] if len(s) > 1}
    weights, gradients = values(len(SETS[kind]), 0), [values(len(SETS[kind]), step) for step in (1, 2, 3)]
    own_sets = [i for i, s in enumerate(SETS[kind]) if rank in s]
    parameters: dict[int, Tensor] = {}
    placed: dict[int, Any] = {}
    for i in own_sets:
        s = SETS[kind][i]
        placed[i] = None
        if s in groups:
            placed[i] = DeviceMesh.from_group(groups[s], "cpu"), [Shard(0)] if i % 2 == 0 else [Replicate()]
        parameters[i] = nn.Parameter(distributed(weights[i], placed[i]))
    names = [f"weight{len(SETS[kind][i])}.{min(SETS[kind][i])}" for i in own_sets]
    layouts = {  # a rank of its own
        name: FlatShards.cut(tuple(weights[i].shape), (rank,), [0, weights[i].numel()])
        for i, name in zip(own_sets, names, strict=True)
        if placed[i] is None
    }
    named = [{"params": list(zip(names, parameters.values(), strict=True))}]
    optimizer = mm.Muon(named, layouts=layouts, compute_dtype=torch.float32)
    for step in gradients:
        for i, parameter in parameters.items():
            parameter.grad = distributed(step[i], placed[i])
        optimizer.step()
    expected = trained_by_local_group(weights, gradients)
    same = [torch.equal(problem.whole(p).view(expected[i].shape), expected[i]) for i, p in parameters.items()]
    assert optimizer._runtime.planned is not None
    return all(same), optimizer._runtime.planned.plan.ranks, optimizer.counts.orthogonalized


@pytest.mark.parametrize("kind", SETS)
def test_ranks_are_linked_through_what_others_share(workers, kind: str) -> None:
    outcomes = workers(4).run(in_sets, kind)
    assert [same for same, _, _ in outcomes] == [True] * 4
    linked = {"pairs": [(0, 1), (0, 1), (2, 3), (2, 3)], "three and one": [(0, 1, 2)] * 3 + [(3,)]}
    assert [ranks for _, ranks, _ in outcomes] == linked.get(kind, [(0, 1, 2, 3)] * 4)
    assert sum(count for _, _, count in outcomes) == len(SETS[kind])


@on_ranks(4)
def test_stages_do_not_wait_for_each_other() -> None:
    """Two pipeline stages; the second one comes to its step two seconds later."""
    rank = dist.get_rank()
    groups = [dist.new_group((0, 1)), dist.new_group((2, 3))]
    mesh = DeviceMesh.from_group(groups[rank // 2], "cpu")
    weight = nn.Parameter(distribute_tensor(torch.ones(8, 6), mesh, [Shard(0)], src_data_rank=None))
    optimizer = mm.Muon([weight])
    dist.barrier()
    if rank >= 2:
        time.sleep(2)
    begin = time.monotonic()
    for _ in range(2):
        weight.grad = distribute_tensor(torch.ones(8, 6), mesh, [Shard(0)], src_data_rank=None)
        optimizer.step()
    assert rank >= 2 or time.monotonic() - begin < 1.5


def experts_of_one_name() -> tuple[bool, int]:
    """Experts under expert parallelism as Megatron and DeepSpeed hold them: plain, whole, and all of one name."""
    rank = dist.get_rank()
    mesh = mesh_of((2, 2), names=("data", "expert"))
    dense, expert = values(1, 0)[0], values(3, 5)[rank % 2]
    parameters = {"dense": nn.Parameter(dense.clone()), "expert": nn.Parameter(expert.clone())}
    layouts = {"dense": (mesh, [Replicate(), Replicate()]), "expert": (mesh["data"], [Replicate()])}
    optimizer = mm.Muon([{"params": list(parameters.items())}], layouts=layouts, compute_dtype=torch.float32)
    gradients = [[values(1, 10 + step)[0], values(3, 20 + step)[rank % 2]] for step in range(3)]
    for step in gradients:
        for parameter, gradient in zip(parameters.values(), step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    expected = trained_by_local_group([dense, expert], gradients)
    same = all(torch.equal(p, e) for p, e in zip(parameters.values(), expected, strict=True))
    return same, optimizer.counts.orthogonalized


def test_experts_of_one_name_on_different_ranks(workers) -> None:
    outcomes = workers(4).run(experts_of_one_name)
    assert [same for same, _ in outcomes] == [True] * 4
    assert sum(count for _, count in outcomes) == 3  # the dense weight once, each expert once


def replicas_outside(how: str, shard_state: bool) -> tuple[bool, int, int]:
    """DDP over tensor parallelism: DTensors on the tensor-parallel mesh, replicas named by process_group=."""
    mesh = mesh_of((2, 2), names=("data", "tensor"))
    tensor = mesh["tensor"]
    weights, gradients = values(4, 0), [values(4, step) for step in (1, 2, 3)]
    parameters = [
        nn.Parameter(distribute_tensor(w.clone(), tensor, [Shard(i % 2)], src_data_rank=None))
        for i, w in enumerate(weights)
    ]
    group: Any = "world" if how == "world" else mesh["data"].get_group()
    optimizer = mm.Muon(parameters, process_group=group, compute_dtype=torch.float32, shard_state=shard_state)
    for step in gradients:
        for i, (parameter, gradient) in enumerate(zip(parameters, step, strict=True)):
            parameter.grad = distribute_tensor(gradient.clone(), tensor, [Shard(i % 2)], src_data_rank=None)
        optimizer.step()
    expected = trained_by_local_group(weights, gradients)
    same = [torch.equal(p.full_tensor(), e) for p, e in zip(parameters, expected, strict=True)]
    stored = sum(local_of(state["momentum_buffer"]).numel() for state in optimizer.state.values())
    return all(same), optimizer.counts.orthogonalized, stored


@pytest.mark.parametrize("shard_state", [False, True])
@pytest.mark.parametrize("how", ["world", "group"])
def test_replicas_outside_a_mesh_share_the_work(workers, how: str, shard_state: bool) -> None:
    outcomes = workers(4).run(replicas_outside, how, shard_state)
    assert [outcome[:2] for outcome in outcomes] == [(True, 1)] * 4
    elements = sum(weight.numel() for weight in values(4, 0))
    assert sum(stored for _, _, stored in outcomes) == (elements if shard_state else 2 * elements)


# ------------------------------------------------------------------ missing gradients


def missing_under_hsdp(kind: str) -> bool:
    """HSDP: the gradient of the second shard is missing on all of its replicas, or on one of them."""
    mesh = mesh_of((2, 2))
    rank = dist.get_rank()
    weight, twin = (nn.Parameter(distribute_tensor(torch.ones(8, 6), mesh, [Replicate(), Shard(0)])) for _ in range(2))
    optimizers = [mm.Muon([p], lr=0.1, compute_dtype=torch.float32) for p in (weight, twin)]
    missing = {"shard": rank % 2 == 1, "replica": rank == 3, "all": True}[kind]
    for step in range(3):
        gradient = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        if step == 1:
            gradient[0 if kind == "all" else 4 :] = 0.0
        placed = distribute_tensor(gradient, mesh, [Replicate(), Shard(0)], src_data_rank=None)
        weight.grad = placed
        twin.grad = None if step == 1 and missing else placed
        for optimizer in optimizers:
            optimizer.step()
    return torch.equal(local_of(weight), local_of(twin))


@pytest.mark.parametrize("kind", ["shard", "all"])
@on_ranks(4)
def test_a_shard_missing_on_all_its_replicas_counts_as_zero(kind: str) -> None:
    assert missing_under_hsdp(kind)


@on_ranks(4)
def test_a_shard_missing_on_one_replica_is_an_error_everywhere() -> None:
    with pytest.raises(mm.PlanError, match="replicas would drift apart"):
        missing_under_hsdp("replica")


@on_ranks(2, timeout=10)
def test_an_adamw_gradient_missing_on_one_replica_is_an_error_everywhere() -> None:
    norm = nn.Parameter(torch.ones(5))
    group = {"params": [("norm", norm)], "algorithm": "adamw"}
    weight = nn.Parameter(torch.ones(4, 3))
    optimizer = mm.Muon([{"params": [("weight", weight)]}, group], process_group="world")
    weight.grad = torch.ones(4, 3)
    norm.grad = torch.ones(5) if dist.get_rank() else None
    with pytest.raises(mm.PlanError, match="norm: Some of the ranks"):
        optimizer.step()


# ------------------------------------------------------------------ errors


def wrong(kind: str) -> None:
    mesh, rank = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank()
    entries: dict[str, Callable[[], Any]] = {
        "placements": lambda: (mesh, [Shard(0), Shard(1)]),
        "dim": lambda: (mesh, [Shard(2)]),
        "entry": lambda: "Shard(0)",
        "partial": lambda: (mesh, [Partial()]),
        "shape": lambda: (mesh, [Shard(0)], (9, 6)),
        "one rank": lambda: (mesh, [Shard(rank)]),
        "flat": lambda: FlatShards.cut((4, 6), (0, 1), [0, 11, 24]),
        "flat gap": lambda: FlatShards.cut((4, 6), (0, 1), [0, 12, 23]),
        "flat differs": lambda: FlatShards.cut((6, 4) if rank else (4, 6), (0, 1), [0, 12, 24]),
    }
    layouts = {"w": entries.get(kind, lambda: (mesh, [Shard(0)]))()}
    shapes = {"one shape": (4 + rank, 6), "flat": (12,), "flat differs": (12,), "flat gap": (12 - rank,)}
    weight = nn.Parameter(torch.ones(shapes.get(kind, (4, 6))))
    if kind == "name":
        layouts["weight"] = (mesh, [Shard(0)])
    elif kind == "dtensor":
        weight = nn.Parameter(distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)]))
    elif kind == "attribute":
        weight.tensor_model_parallel = True  # type: ignore[attr-defined]
        mm.Muon([{"params": [("w", weight)]}], process_group="world").explain()
    optimizer = mm.Muon([{"params": [("w", weight)]}], layouts=layouts)
    weight.grad = torch.ones_like(weight)
    optimizer.step()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("placements", "w: layouts entry: .*2 placements on a mesh"),
        ("dim", "w: layouts entry: .*on a parameter of shape"),
        ("entry", "w: found layouts entry 'Shard"),
        ("partial", "w: found placement Partial"),
        ("shape", r"w: found a local tensor of shape \(4, 6\) on rank .*needed \([45], 6\)"),
        ("name", r"layouts: found \['weight'\]"),
        ("dtensor", "w: found a DTensor with an entry in layouts="),
        ("one rank", "the plans differ: Rank 0 has 'w: "),
        ("one shape", "the plans differ: Rank 0 has 'w: shape|local tensor of shape"),
        ("attribute", "w: The attribute tensor_model_parallel=True says that this tensor is a shard"),
        ("flat", r"w: found a local tensor of shape \(12,\)"),
        ("flat gap", "w: found the elements from 23 on held by none"),
        ("flat differs", "the plans differ: Rank 0 has 'w: shape"),
    ],
)
def test_layouts_that_are_wrong_are_an_error_on_every_rank(workers, kind: str, message: str) -> None:
    outcomes = workers(2).run_expecting_errors(wrong, kind)
    for outcome in outcomes:
        assert outcome.error is not None, kind
        assert issubclass(outcome.error, (mm.LayoutError, mm.PlanError)), outcome
    assert any(re.search(message, outcome.message) for outcome in outcomes), [o.message for o in outcomes]
