"""Invariant 5: state has no world size. Saved under one layout, loaded under another, training goes on alike."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import muonmesh as mm
from tests.support import layouts, problem
from tests.support.meshes import mesh_of

COVERS = (
    "checkpoint.save_load.save",
    "checkpoint.save_load.load",
    "checkpoint.state.restore_state",
    "checkpoint.save_load.reshard",
)

COMPUTE = torch.float32


def build(layout: str) -> tuple[nn.Module, mm.Muon]:
    """``-shared`` after the name of a layout stores momentum sharded over its replicas."""
    model, group = problem.hold(layout.removesuffix("-shared"), problem.initial())
    settings = {**problem.SETTINGS, "compute_dtype": COMPUTE, "shard_state": layout.endswith("-shared")}
    return model, mm.Muon(problem.groups(model), process_group=group, **settings)


def save(layout: str, path: str, flat: bool) -> None:
    model, optimizer = build(layout)
    problem.advance(model, optimizer, 0, 2)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    dcp.save(state, checkpoint_id=path)


def load(layout: str, path: str, flat: bool) -> dict[str, Tensor]:
    model, optimizer = build(layout)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state: dict[str, Any] = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    problem.advance(model, optimizer, 2, 4)
    return problem.result(model, optimizer)


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((4, "fsdp"), (2, "fsdp"), id="4-to-2", marks=pytest.mark.soak),
        pytest.param((2, "fsdp"), (4, "shard1"), id="other-dim"),
        pytest.param((2, "ddp"), (4, "fsdp"), id="ddp-to-fsdp"),
        pytest.param((4, "fsdp"), (2, "ddp"), id="fsdp-to-ddp", marks=pytest.mark.soak),
    ],
)
def test_resharding_continues_bit_for_bit(
    workers, tmp_path: Path, before: tuple[int, str], after: tuple[int, str], flat: bool
) -> None:
    workers(before[0]).run(save, before[1], str(tmp_path), flat)
    model, optimizer = build("local")
    problem.advance(model, optimizer, 0, 4)
    expected = problem.result(model, optimizer)
    for result in workers(after[0]).run(load, after[1], str(tmp_path), flat):
        assert problem.differing(result, expected) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((4, "ddp-shared"), (2, "ddp")),
        ((2, "fsdp"), (4, "hsdp-shared")),
        ((4, "hsdp-shared"), (2, "ddp-shared")),
        ((4, "rows-cols"), (4, "hsdp")),
    ],
    ids=["shared-to-ddp", "fsdp-to-shared-hsdp", "shared-to-shared", "two-dims"],
)
def test_resharding_between_meshes_and_shared_momentum(
    workers, tmp_path: Path, before: tuple[int, str], after: tuple[int, str]
) -> None:
    test_resharding_continues_bit_for_bit(workers, tmp_path, before, after, flat=False)


def full_state(path: str, layout: str = "fsdp") -> None:
    """A full state dict from several ranks, as a single process would save it."""
    model, optimizer = build(layout)
    problem.advance(model, optimizer, 0, 2)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options), get_optimizer_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        torch.save(state, path)


def broadcast(path: str, layout: str = "fsdp") -> dict[str, Tensor]:
    """A full state dict, read by rank 0 only, into several ranks."""
    model, optimizer = build(layout)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    full: tuple[Any, Any] = torch.load(path, weights_only=True) if dist.get_rank() == 0 else ({}, {})
    set_model_state_dict(model, full[0], options=options)
    set_optimizer_state_dict(model, optimizer, full[1], options=options)
    problem.advance(model, optimizer, 2, 4)
    return problem.result(model, optimizer)


@pytest.mark.parametrize("layout", ["fsdp", "ddp-shared", "hsdp-shared"])
def test_full_state_dicts_go_to_one_process_and_to_other_ranks(workers, tmp_path: Path, layout: str) -> None:
    path = str(tmp_path / "full.pt")
    workers(4).run(full_state, path, layout)
    model, optimizer = build("local")
    problem.advance(model, optimizer, 0, 4)
    expected = problem.result(model, optimizer)

    alone, other = build("local")
    weights, state = torch.load(path, weights_only=True)
    set_model_state_dict(alone, weights)
    set_optimizer_state_dict(alone, other, state)
    problem.advance(alone, other, 2, 4)
    assert problem.differing(problem.result(alone, other), expected) == []
    for result in workers(2).run(broadcast, path, layout):
        assert problem.differing(result, expected) == []


def creates_state() -> list[str]:
    """`get_optimizer_state_dict` before the first step creates state by stepping; nothing changes, now or later."""
    results = []
    for ask in (True, False):
        model, optimizer = build("fsdp")
        if ask:
            state = get_optimizer_state_dict(model, optimizer)
            assert len(state["state"]) == len(problem.PARAMETERS)
        problem.advance(model, optimizer, 0, 3)
        results.append(problem.result(model, optimizer))
    return problem.differing(*results)


def test_asking_for_state_before_the_first_step_changes_nothing(workers) -> None:
    assert workers(2).run(creates_state) == [[], []]


def placements() -> list[bool]:
    model, optimizer = build("fsdp")
    problem.advance(model, optimizer, 0, 1)
    return [
        value.placements == parameter.placements and value.shape == parameter.shape
        for parameter in model.parameters()
        for key, value in optimizer.state[parameter].items()
        if key != "step"  # of no shape
    ]


def test_state_of_a_dtensor_is_a_dtensor_of_its_shape(workers) -> None:
    for outcome in workers(4).run(placements):
        assert len(outcome) > 15
        assert all(outcome)


def wrong_kinds() -> list[str]:
    """Whole tensors into shards, and shards of another placement: an error, not half of the momentum."""
    messages = []
    whole_model, whole_optimizer = build("local")
    problem.advance(whole_model, whole_optimizer, 0, 1)
    other_model, other_optimizer = build("shard1")
    problem.advance(other_model, other_optimizer, 0, 1)
    for source in (whole_optimizer, other_optimizer):
        _, optimizer = build("shard0")
        with pytest.raises(mm.StateError) as caught:
            optimizer.load_state_dict(source.state_dict())
        messages.append(str(caught.value))
        assert not optimizer.state
    return messages


def test_state_of_another_layout_is_refused_by_load_state_dict(workers) -> None:
    for plain, other in workers(2).run(wrong_kinds):
        assert "plain tensor" in plain
        assert "set_optimizer_state_dict" in plain
        assert "placed (Shard(dim=1),)" in other


def placed_otherwise() -> str:
    """State with this rank's shape and other placements, on an axis of one rank."""
    mesh, optimizers = init_device_mesh("cpu", (dist.get_world_size(), 1)), []
    for placement in (Replicate(), Shard(1)):
        weight = nn.Parameter(distribute_tensor(torch.ones(6, 4), mesh, [Shard(0), placement]))
        optimizers.append(mm.Muon([weight]))
        weight.grad = torch.ones_like(weight)
        optimizers[-1].step()
    with pytest.raises(mm.StateError) as caught:
        optimizers[1].load_state_dict(optimizers[0].state_dict())
    return str(caught.value)


def test_state_with_other_placements_is_refused_by_load_state_dict(workers) -> None:
    for message in workers(2).run(placed_otherwise):
        assert "placed (Shard(dim=0), Replicate()), (3, 4) here; needed a DTensor" in message
        assert "placed (Shard(dim=0), Shard(dim=1)), (3, 4) here. Load it with torch.distributed.checkpoint" in message


class Late(dcp.FileSystemWriter):
    """Writes when it is told to."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.released = threading.Event()

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        self.released.wait()
        return super().write_data(*args, **kwargs)


def save_while_training(layout: str, path: str) -> None:
    model, optimizer = build(layout)
    problem.advance(model, optimizer, 0, 2)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    writer = Late(path)
    apart = dist.new_group(list(range(dist.get_world_size())))  # the writers' collectives must not meet the steps'
    saving: Any = dcp.async_save(state, storage_writer=writer, process_group=apart)
    problem.advance(model, optimizer, 2, 4)
    assert not saving.done()
    writer.released.set()
    saving.result()


@pytest.mark.parametrize("layout", ["fsdp", pytest.param("ddp-shared", marks=pytest.mark.soak)])
def test_async_save_keeps_what_was_there_when_it_was_called(workers, tmp_path: Path, layout: str) -> None:
    """Steps write momentum and weights in place; torch copies them before `async_save` returns."""
    workers(2).run(save_while_training, layout, str(tmp_path))
    model, optimizer = build("local")
    problem.advance(model, optimizer, 0, 4)
    expected = problem.result(model, optimizer)
    for result in workers(2).run(load, layout, str(tmp_path), False):
        assert problem.differing(result, expected) == []


def flat_by_torch() -> str:
    layout = layouts.flat(problem.PARAMETERS, problem.initial())
    optimizer = mm.Muon(layout.groups, **layout.settings, **problem.SETTINGS)
    layout.give(problem.gradients(0))
    optimizer.step()
    assert optimizer.state_dict()["state"]  # as this rank stores it, for a file of its own
    model = nn.Module()
    for name, tensor in layout.tensors.items():
        model.register_parameter(name, tensor)  # type: ignore[arg-type]
    try:
        get_optimizer_state_dict(model, optimizer)
    except mm.StateError as error:
        return str(error)
    return ""


def test_torchs_functions_refuse_flat_shards_of_which_they_would_keep_one_ranks(workers) -> None:
    for message in workers(2).run(flat_by_torch):
        assert "muonmesh.checkpoint.save(path, model, optimizer)" in message


def declared_by_torch(path: str) -> list[str]:
    """The state of declared shards is made of DTensors, so torch's functions keep all of it."""
    differing = []
    for seed in (0, 7):
        layout = layouts.declared(problem.PARAMETERS, problem.initial(seed), mesh_of((2,)), lambda _, shape: [Shard(0)])
        optimizer = mm.Muon(layout.groups, **layout.settings, **problem.SETTINGS)
        model = nn.Module()
        for name, tensor in layout.tensors.items():
            model.register_parameter(name, tensor)  # type: ignore[arg-type]
        layout.give(problem.gradients(seed))
        optimizer.step()
        state = get_optimizer_state_dict(model, optimizer)
        if seed:
            dcp.load(state, checkpoint_id=path)
            set_optimizer_state_dict(model, optimizer, state)
        else:
            dcp.save(state, checkpoint_id=path)
        differing.append({name: value for name, value in layout.whole(optimizer).items() if "." in name})
    return problem.differing(*differing)


def test_torchs_functions_keep_the_state_of_declared_shards(workers, tmp_path: Path) -> None:
    assert workers(2).run(declared_by_torch, str(tmp_path)) == [[], []]
