"""Momentum in int8 under sharding: rows of several blocks, and checkpoints; `test_fuzz_ranks` generates layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

import muonmesh as mm
from muonmesh.step.runtime import Driver
from tests.support import problem
from tests.support.meshes import mesh_of
from tests.support.on_ranks import on_ranks
from tests.support.tensors import same_bits

SHAPES = {"wide": (6, 700), "tall": (700, 6), "stack": (3, 5, 520)}


def random_of_parameter(name: str, seed: int) -> Tensor:
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed + len(name)))


def build_with_state_dtype(
    dim: int | None, state_dtype: Any, *, device: bool = False, rounded: int | None = None
) -> tuple[nn.Module, mm.Muon]:
    """A model sharded along a dim, or alone on this rank; in bf16 if its weights are rounded at random."""
    values = {
        name: random_of_parameter(name, 0).to(torch.float32 if rounded is None else torch.bfloat16) for name in SHAPES
    }
    if dim is not None:
        mesh = mesh_of((dist.get_world_size(),))
        values = {name: distribute_tensor(value, mesh, [Shard(dim % value.ndim)]) for name, value in values.items()}
    model = problem.Bag(values)
    group = {"params": list(model.parameters()), "param_names": list(SHAPES)}
    process_group = "local" if dim is None else None
    settings: dict[str, Any] = {"state_dtype": state_dtype, "stochastic_rounding": rounded}
    optimizer = mm.Muon([group], lr=0.02, compute_dtype=torch.float32, process_group=process_group, **settings)
    if device:
        optimizer._runtime.driver = Driver(False)
    return model, optimizer


def step_on_random_of_names(model: nn.Module, optimizer: mm.Muon, steps: range) -> None:
    for step in steps:
        for name, parameter in model.named_parameters():
            parameter.grad = problem.placed_like(parameter, random_of_parameter(name, 10 * step + 1))
        optimizer.step()


def results(model: nn.Module, optimizer: mm.Muon) -> list[Tensor]:
    """Weights and codes, whole."""
    parameters = list(model.parameters())
    return [problem.whole(t) for p in parameters for t in (p, optimizer.state[p]["momentum_buffer"])]


@pytest.mark.parametrize("device", [False, True], ids=["as on a cpu", "as on a device"])
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("rounded", [None, 5], ids=["fp32", "bf16, rounded at random"])
@on_ranks(2)
def test_blocks_that_shards_cut_have_the_scale_of_the_whole_block(dim: int, device: bool, rounded: int | None) -> None:
    (model, optimizer), (twin, alone) = (
        build_with_state_dtype(of, "int8", device=device, rounded=rounded) for of in (dim, None)
    )
    step_on_random_of_names(model, optimizer, range(3))
    step_on_random_of_names(twin, alone, range(3))
    assert same_bits(results(model, optimizer), results(twin, alone))
    assert optimizer.explain().collectives == optimizer.counts.collectives


@on_ranks(2)
def test_our_own_checkpoints_carry_it_too(tmp_path: Path) -> None:
    """Likewise by `muonmesh.checkpoint`, which the optimizer that was saved goes on after too."""
    model, optimizer = build_with_state_dtype(0, "int8")
    step_on_random_of_names(model, optimizer, range(2))
    mm.checkpoint.save(tmp_path / "saved", model, optimizer)
    other, loaded = build_with_state_dtype(-1, "int8")
    mm.checkpoint.load(tmp_path / "saved", other, loaded)
    twin, alone = build_with_state_dtype(None, "int8")
    for trained in ((model, optimizer), (other, loaded)):
        step_on_random_of_names(*trained, range(2, 4))
    step_on_random_of_names(twin, alone, range(4))
    for trained in ((model, optimizer), (other, loaded)):
        assert same_bits(results(*trained), results(twin, alone))


@on_ranks(2)
def test_replicas_that_share_int8_momentum_plan_again() -> None:
    """Two replicas share int8 momentum; a new plan compares replicas, whose scales are of different parts."""
    weights = []
    for shared in (True, False):
        weight = nn.Parameter(random_of_parameter("wide", 0))
        optimizer = mm.Muon([("wide", weight)], lr=0.02, process_group="world", state_dtype="int8", shard_state=shared)
        for number in range(4):
            if number == 2:
                optimizer.param_groups[0]["ns_steps"] = 4
            weight.grad = random_of_parameter("wide", number)
            optimizer.step()
        weights.append(weight.detach())
    assert torch.equal(*weights)
