"""Momentum in int8 under sharding: rows of several blocks, and checkpoints; `test_fuzz_ranks` generates layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import muonmesh as mm
from muonmesh import checkpoint
from muonmesh.step.runtime import Driver
from tests.support.meshes import mesh_of
from tests.support.tensors import same_bits

SHAPES = {"wide": (6, 700), "tall": (700, 6), "stack": (3, 5, 520)}


class Bag(nn.Module):
    def __init__(self, values: dict[str, Tensor]) -> None:
        super().__init__()
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value))


def random_of_parameter(name: str, seed: int) -> Tensor:
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed + len(name)))


def model_and_optimizer(
    dim: int | None, state_dtype: Any, *, device: bool = False, rounded: int | None = None
) -> tuple[Bag, mm.Muon]:
    """A model sharded along a dim, or alone on this rank; in bf16 if its weights are rounded at random."""
    values = {
        name: random_of_parameter(name, 0).to(torch.float32 if rounded is None else torch.bfloat16) for name in SHAPES
    }
    if dim is not None:
        mesh = mesh_of((dist.get_world_size(),))
        values = {name: distribute_tensor(value, mesh, [Shard(dim % value.ndim)]) for name, value in values.items()}
    model = Bag(values)
    group = {"params": list(model.parameters()), "param_names": list(SHAPES)}
    process_group = "local" if dim is None else None
    settings: dict[str, Any] = {"state_dtype": state_dtype, "stochastic_rounding": rounded}
    optimizer = mm.Muon([group], lr=0.02, compute_dtype=torch.float32, process_group=process_group, **settings)
    if device:
        optimizer._runtime.driver = Driver(False)
    return model, optimizer


def train(model: Bag, optimizer: mm.Muon, steps: range) -> None:
    for step in steps:
        for name, parameter in model.named_parameters():
            gradient = random_of_parameter(name, 10 * step + 1).to(parameter.dtype)
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        optimizer.step()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def results(model: Bag, optimizer: mm.Muon) -> list[Tensor]:
    """Weights and codes, whole."""
    parameters = list(model.parameters())
    return [whole(t).detach() for p in parameters for t in (p, optimizer.state[p]["momentum_buffer"])]


def sharded(dim: int, device: bool, rounded: int | None) -> tuple[bool, bool]:
    """Step sharded and alone; also whether explain() told the collectives."""
    (model, optimizer), (twin, alone) = (
        model_and_optimizer(of, "int8", device=device, rounded=rounded) for of in (dim, None)
    )
    train(model, optimizer, range(3))
    train(twin, alone, range(3))
    as_explained = optimizer.explain().collectives == optimizer.counts.collectives
    return same_bits(results(model, optimizer), results(twin, alone)), as_explained


@pytest.mark.parametrize("device", [False, True], ids=["as on a cpu", "as on a device"])
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("rounded", [None, 5], ids=["fp32", "bf16, rounded at random"])
def test_blocks_that_shards_cut_have_the_scale_of_the_whole_block(
    workers, dim: int, device: bool, rounded: int | None
) -> None:
    assert workers(2).run(sharded, dim, device, rounded) == [(True, True)] * 2


def resumed(folder: Path) -> list[bool]:
    """Save cut along rows; load cut along columns, in int8 and in fp32, and train on."""
    model, optimizer = model_and_optimizer(0, "int8")
    train(model, optimizer, range(2))
    parameters = [whole(p).detach() for p in model.parameters()]
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)
    twin, alone = model_and_optimizer(None, "int8")
    train(twin, alone, range(4))
    comparisons = []
    for state_dtype in ("int8", torch.float32):
        other, loaded = model_and_optimizer(-1, state_dtype)
        with torch.no_grad():
            for parameter, value in zip(other.parameters(), parameters, strict=True):
                parameter.copy_(distribute_tensor(value, parameter.device_mesh, parameter.placements))
        state = {"optimizer": get_optimizer_state_dict(other, loaded)}
        dcp.load(state, checkpoint_id=folder)
        set_optimizer_state_dict(other, loaded, state["optimizer"])
        same = [
            torch.equal(whole(value["momentum_buffer"]), whole(expected["momentum_buffer"]))
            for value, expected in zip(
                loaded.state_dict()["state"].values(), optimizer.state_dict()["state"].values(), strict=True
            )
        ]
        comparisons.append(all(same))
        train(other, loaded, range(2, 4))
        if state_dtype == "int8":
            comparisons.append(same_bits(results(other, loaded), results(twin, alone)))
    return comparisons


def kept_by_name(folder: Path) -> list[bool]:
    """The same through `muonmesh.checkpoint`; the one that saves goes on as well."""
    model, optimizer = model_and_optimizer(0, "int8")
    train(model, optimizer, range(2))
    checkpoint.save(folder, model, optimizer)
    train(model, optimizer, range(2, 4))
    twin, alone = model_and_optimizer(None, "int8")
    train(twin, alone, range(4))
    other, loaded = model_and_optimizer(-1, "int8")
    checkpoint.load(folder, other, loaded)
    train(other, loaded, range(2, 4))
    return [same_bits(results(*pair), results(twin, alone)) for pair in ((model, optimizer), (other, loaded))]


def test_our_own_checkpoints_hold_it_too(workers, tmp_path) -> None:
    assert workers(2).run(kept_by_name, tmp_path / "saved") == [[True, True]] * 2


def test_a_checkpoint_is_resharded_and_loaded_into_any_dtype(workers, tmp_path) -> None:
    assert workers(2).run(resumed, tmp_path) == [[True, True, True]] * 2


def resumed_by_our_own_checkpoints(folder: Path) -> list[bool]:
    """Likewise by `muonmesh.checkpoint`, which the optimizer that was saved goes on after too."""
    model, optimizer = model_and_optimizer(0, "int8")
    train(model, optimizer, range(2))
    mm.checkpoint.save(folder / "saved", model, optimizer)
    other, loaded = model_and_optimizer(-1, "int8")
    mm.checkpoint.load(folder / "saved", other, loaded)
    twin, alone = model_and_optimizer(None, "int8")
    for trained in ((model, optimizer), (other, loaded)):
        train(*trained, range(2, 4))
    train(twin, alone, range(4))
    return [same_bits(results(*trained), results(twin, alone)) for trained in ((model, optimizer), (other, loaded))]


def test_our_own_checkpoints_carry_it_too(workers, tmp_path) -> None:
    assert workers(2).run(resumed_by_our_own_checkpoints, tmp_path) == [[True, True]] * 2


def shared_and_planned_again() -> bool:
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
    return torch.equal(*weights)


def test_replicas_that_share_int8_momentum_plan_again(workers) -> None:
    assert workers(2).run(shared_and_planned_again) == [True, True]
