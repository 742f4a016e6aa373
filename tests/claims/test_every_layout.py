"""Invariant 1 under every way of holding a matrix: meshes of any dimension, declared shards, flat buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Shard, distribute_tensor

import muonmesh as mm
from muonmesh.comm.storage import local_of
from tests.support import layouts, problem
from tests.support.layouts import R, S, strided
from tests.support.meshes import mesh_of

COVERS = (
    "comm.placing.storage_of",
    "comm.sharing.sharded_over_replicas",
)

EIGHT: dict[str, tuple[tuple[int, ...], Any]] = {
    "hsdp over tp": ((2, 2, 2), lambda n: [R, strided(0, 2), S(0)]),
    "hsdp over rowwise": ((2, 2, 2), lambda n: [R, S(0), S(n - 1)]),
    "rows, cols, rows": ((2, 2, 2), lambda n: [S(0), S(n - 1), S(0)]),
}


def outcome(placed: layouts.Held, steps: int, settings: dict[str, Any]) -> tuple[dict[str, Tensor], mm.Muon]:
    optimizer = mm.Muon(placed.groups, **placed.settings, **{**problem.SETTINGS, **settings})
    for step in range(steps):
        placed.give(problem.gradients(step))
        optimizer.step()
    return placed.whole(optimizer), optimizer


def alone(steps: int, settings: dict[str, Any]) -> dict[str, Tensor]:
    settings = {key: value for key, value in settings.items() if key != "shard_state"}
    return problem.alone(steps, **settings)


def compared(placed: layouts.Held, settings: dict[str, Any], steps: int = 3) -> tuple[list[str], Any, Any]:
    result, optimizer = outcome(placed, steps, settings)
    differing = problem.differing(result, alone(steps, settings))
    promise, did = optimizer.explain(), optimizer.counts
    promised = (
        promise.orthogonalizations,
        promise.collectives,
        promise.bytes_sent,
        promise.bytes_received,
        promise.flops,
    )
    return differing, promised, (did.orthogonalized, did.collectives, did.bytes_sent, did.bytes_received)


def on_mesh(name: str, how: str, settings: dict[str, Any]) -> Any:
    sizes, placements_of = {**layouts.MESHES, **EIGHT}[name]
    hold = layouts.declared if how == "declared" else layouts.dtensors

    def placements(_: str, shape: tuple[int, ...]) -> Sequence[Placement]:
        return placements_of(len(shape))

    placed = hold(problem.PARAMETERS, problem.initial(), mesh_of(sizes), placements)
    return compared(placed, settings)


def check(outcomes: Sequence[Any], *, divided: bool) -> None:
    orthogonalized = 0
    for differing, promised, did in outcomes:
        assert differing == []
        assert did == promised[:4]
        orthogonalized += did[0]
    if divided:  # every matrix once, over all ranks
        matrices = sum(1 for _ in problem_matrices())
        assert orthogonalized == matrices


def problem_matrices() -> Any:
    from tests.support.reference import split

    for name, (_, spec) in problem.PARAMETERS.items():
        if spec != "adamw":
            yield from split(problem.initial()[name], spec)


# Declared shards are cut by the same layouts; one of each kind stays.
DECLARED = ("hsdp", "rows by cols", "fsdp over colwise", "strided alone", "experts")


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, "dtensor") for name in layouts.MESHES),
        *(pytest.param(n, "declared", marks=[pytest.mark.soak] * (n not in DECLARED)) for n in layouts.MESHES),
    ],
)
def test_bit_for_bit_on_any_mesh(workers, name: str, how: str) -> None:
    check(workers(4).run(on_mesh, name, how, {"compute_dtype": torch.float32}), divided=True)


@pytest.mark.parametrize("name", ["hsdp", "fsdp over colwise", "experts"])
def test_bit_for_bit_on_any_mesh_in_bf16(workers, name: str) -> None:
    check(workers(4).run(on_mesh, name, "dtensor", {"memory_budget_mb": 0.08}), divided=True)


def flat(tensor_parallel: int, seed: int, settings: dict[str, Any]) -> Any:
    placed = layouts.flat(problem.PARAMETERS, problem.initial(), tensor_parallel=tensor_parallel, seed=seed)
    return compared(placed, settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.soak), 4])
def test_bit_for_bit_in_flat_buffers(workers, ranks: int, seed: int, dtype: torch.dtype) -> None:
    check(workers(ranks).run(flat, 1, seed, {"compute_dtype": dtype}), divided=True)


@pytest.mark.parametrize("seed", range(3))
def test_bit_for_bit_in_flat_buffers_of_tensor_parallel_shards(workers, seed: int) -> None:
    check(workers(4).run(flat, 2, seed, {"compute_dtype": torch.float32}), divided=True)


def with_shared_state(layout: str, settings: dict[str, Any]) -> tuple[list[str], float, float]:
    """Step with ``shard_state=True``; return what differs and the momentum held here, alone and shared."""
    model, group = problem.hold(layout, problem.initial()) if layout == "ddp" else (None, None)
    if model is not None:
        optimizer = mm.Muon(
            problem.groups(model), process_group=group, shard_state=True, **problem.SETTINGS, **settings
        )
        for step in range(3):
            for name, gradient in problem.gradients(step).items():
                model.get_parameter(name).grad = gradient.clone()
            optimizer.step()
        result = problem.result(model, optimizer)
    else:
        sizes, placements_of = {**layouts.MESHES, **EIGHT}[layout]
        mesh = mesh_of(sizes)
        placed = layouts.dtensors(
            problem.PARAMETERS, problem.initial(), mesh, lambda _, shape: placements_of(len(shape))
        )
        result, optimizer = outcome(placed, 3, {"shard_state": True, **settings})
    stored = whole = 0.0
    for name, value in result.items():
        if name.endswith(".momentum_buffer"):
            whole += value.numel()
    for state in optimizer.state.values():
        if "momentum_buffer" in state:
            stored += local_of(state["momentum_buffer"]).numel()
    return problem.differing(result, alone(3, settings)), stored, whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("layout", "holders"), [("ddp", 4), ("hsdp", 4), ("replicate inside", 4), ("all replicated", 4)]
)
def test_momentum_shared_by_replicas_has_the_same_bits_and_takes_less(
    workers, layout: str, holders: int, dtype: torch.dtype
) -> None:
    outcomes = workers(4).run(with_shared_state, layout, {"compute_dtype": dtype})
    assert [differing for differing, _, _ in outcomes] == [[]] * 4
    assert sum(stored for _, stored, _ in outcomes) == outcomes[0][2]  # each element once
    assert max(stored for _, stored, _ in outcomes) <= 1.25 * outcomes[0][2] / holders


@pytest.mark.parametrize("layout", ["fsdp over rowwise", "three axes", "hsdp, shard 1", "cols by rows"])
def test_momentum_is_shared_where_it_can_be(workers, layout: str) -> None:
    outcomes = workers(4).run(with_shared_state, layout, {"compute_dtype": torch.float32})
    assert [differing for differing, _, _ in outcomes] == [[]] * 4


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] * (name == "hsdp over rowwise")) for name in EIGHT]
)
def test_bit_for_bit_on_eight_ranks(workers, name: str) -> None:
    check(workers(8).run(on_mesh, name, "dtensor", {"compute_dtype": torch.float32}), divided=True)


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
