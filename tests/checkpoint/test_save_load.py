"""Invariant 5: state has no world size. Saved under one layout, loaded under another, training goes on alike."""

from __future__ import annotations

import threading
import warnings
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
from tests.support import cases, problem, saving
from tests.support.on_ranks import on_ranks

COVERS = (
    "checkpoint.save_load.save",
    "checkpoint.save_load.load",
    "checkpoint.state.restore_state",
    "checkpoint.save_load.reshard",
)

COMPUTE = torch.float32
WHOLE = cases.Source(problem.PARAMETERS, problem.initial)


def build_layout(layout: str) -> tuple[nn.Module, mm.Muon]:
    """``-shared`` after the name of a layout stores momentum sharded over its replicas."""
    model, group = problem.hold(layout.removesuffix("-shared"), problem.initial())
    settings = {**problem.SETTINGS, "compute_dtype": COMPUTE, "shard_state": layout.endswith("-shared")}
    return model, mm.Muon(problem.groups(model), process_group=group, **settings)


def never_stopped() -> dict[str, Tensor]:
    return problem.alone(4, compute_dtype=COMPUTE)


def save_after_two(layout: str, path: str, how: saving.How) -> None:
    model, optimizer = build_layout(layout)
    problem.advance(model, optimizer, 0, 2)
    saving.save(path, model, optimizer, how)


def load_and_go_on(layout: str, path: str, how: saving.How) -> dict[str, Tensor]:
    model, optimizer = build_layout(layout)
    saving.load(path, model, optimizer, how)
    problem.advance(model, optimizer, 2, 4)
    return problem.result(model, optimizer)


@pytest.mark.parametrize(
    ("before", "after", "how"),
    [
        *(pytest.param((4, "fsdp"), (2, "fsdp"), how, marks=pytest.mark.soak) for how in ("torch's", "flat")),
        *((((2, "fsdp"), (4, "shard1"), how)) for how in ("torch's", "flat")),
        *((((2, "ddp"), (4, "fsdp"), how)) for how in ("torch's", "flat")),
        *(pytest.param((4, "fsdp"), (2, "ddp"), how, marks=pytest.mark.soak) for how in ("torch's", "flat")),
        ((4, "ddp-shared"), (2, "ddp"), "torch's"),
        ((2, "fsdp"), (4, "hsdp-shared"), "torch's"),
        ((4, "hsdp-shared"), (2, "ddp-shared"), "torch's"),
        ((4, "rows-cols"), (4, "hsdp"), "torch's"),
    ],
)
def test_resharding_continues_bit_for_bit(
    workers, tmp_path: Path, before: tuple[int, str], after: tuple[int, str], how: saving.How
) -> None:
    """A state dict nested or flattened."""
    workers(before[0]).run(save_after_two, before[1], str(tmp_path), how)
    for result in workers(after[0]).run(load_and_go_on, after[1], str(tmp_path), how):
        assert problem.differing(result, never_stopped()) == []


def full_state(path: str, layout: str = "fsdp") -> None:
    """A full state dict from several ranks, as a single process would save it."""
    model, optimizer = build_layout(layout)
    problem.advance(model, optimizer, 0, 2)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options), get_optimizer_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        torch.save(state, path)


def broadcast(path: str, layout: str = "fsdp") -> dict[str, Tensor]:
    """A full state dict, read by rank 0 only, into several ranks."""
    model, optimizer = build_layout(layout)
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
    expected = never_stopped()
    alone, other = build_layout("local")
    weights, state = torch.load(path, weights_only=True)
    set_model_state_dict(alone, weights)
    set_optimizer_state_dict(alone, other, state)
    problem.advance(alone, other, 2, 4)
    assert problem.differing(problem.result(alone, other), expected) == []
    for result in workers(2).run(broadcast, path, layout):
        assert problem.differing(result, expected) == []


@on_ranks(2)
def test_state_of_another_layout_is_refused_by_load_state_dict() -> None:
    """Whole tensors into shards, and shards of another placement: an error, not half of the momentum."""
    messages = []
    whole_model, whole_optimizer = build_layout("local")
    problem.advance(whole_model, whole_optimizer, 0, 1)
    other_model, other_optimizer = build_layout("shard1")
    problem.advance(other_model, other_optimizer, 0, 1)
    for source in (whole_optimizer, other_optimizer):
        _, optimizer = build_layout("shard0")
        with pytest.raises(mm.StateError) as caught:
            optimizer.load_state_dict(source.state_dict())
        messages.append(str(caught.value))
        assert not optimizer.state
    plain, other = messages
    assert "plain tensor" in plain
    assert "set_optimizer_state_dict" in plain
    assert "placed (Shard(dim=1),)" in other


@on_ranks(2)
def test_state_with_other_placements_is_refused_by_load_state_dict() -> None:
    """State with this rank's shape and other placements, on an axis of one rank."""
    mesh, optimizers = init_device_mesh("cpu", (dist.get_world_size(), 1)), []
    for placement in (Replicate(), Shard(1)):
        weight = nn.Parameter(distribute_tensor(torch.ones(6, 4), mesh, [Shard(0), placement]))
        optimizers.append(mm.Muon([weight]))
        weight.grad = torch.ones_like(weight)
        optimizers[-1].step()
    with pytest.raises(mm.StateError) as caught:
        optimizers[1].load_state_dict(optimizers[0].state_dict())
    message = str(caught.value)
    assert "placed (Shard(dim=0), Replicate()), (3, 4) here; needed a DTensor" in message
    assert "placed (Shard(dim=0), Shard(dim=1)), (3, 4) here. Load it with torch.distributed.checkpoint" in message


def load_own_and_first(layout: str, path: str) -> tuple[dict[str, Tensor], str]:
    """Go on with the file of this rank, and say what is said of the first rank's."""
    model, optimizer = build_layout(layout)
    problem.advance(model, optimizer, 0, 2)
    rank, message = dist.get_rank(), ""
    torch.save(optimizer.state_dict(), f"{path}/{rank}")
    dist.barrier()
    problem.advance(model, optimizer, 2, 3)
    fresh = build_layout(layout)[1]
    try:
        fresh.load_state_dict(torch.load(f"{path}/0", weights_only=False))
    except mm.StateError as error:
        message = str(error)
        assert not fresh.state
    model, optimizer = build_layout(layout)
    problem.advance(model, optimizer, 0, 2)
    optimizer.load_state_dict(torch.load(f"{path}/{rank}", weights_only=False))
    problem.advance(model, optimizer, 2, 4)
    return problem.result(model, optimizer), message


@pytest.mark.parametrize("layout", ["fsdp", "ddp-shared", "hsdp-shared"])
def test_shards_of_one_rank_are_refused_by_the_others(workers, tmp_path: Path, layout: str) -> None:
    """A framework that saves on the first rank only, as Accelerate and Trainer do under DDP."""
    results = workers(4).run(load_own_and_first, layout, str(tmp_path))
    for rank, (result, message) in enumerate(results):
        assert problem.differing(result, never_stopped()) == []
        assert rank != 0 or message == ""
        assert rank == 0 or "of the rank at (0," in message
        assert rank == 0 or "leave out shard_state=True" in message


class Late(dcp.FileSystemWriter):
    """Writes when it is told to."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.released = threading.Event()

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        self.released.wait()
        return super().write_data(*args, **kwargs)


def save_while_training(layout: str, path: str) -> None:
    model, optimizer = build_layout(layout)
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
    for result in workers(2).run(load_and_go_on, layout, str(tmp_path), "torch's"):
        assert problem.differing(result, never_stopped()) == []


def test_a_save_warns_of_state_that_no_load_takes(tmp_path: Path) -> None:
    model = nn.Linear(4, 6, bias=False)
    optimizer = mm.Muon(model.named_parameters())
    model.weight.grad = torch.ones(6, 4)
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mm.checkpoint.save(tmp_path / "finite", model, optimizer)
    optimizer.state[model.weight]["momentum_buffer"][-1, -1] = torch.inf
    found = r"diverged: optimizer\.state\.weight\.momentum_buffer has infinity or NaN, so load refuses this checkpoint"
    with pytest.warns(UserWarning, match=found):
        mm.checkpoint.save(tmp_path / "diverged", model, optimizer)
    with pytest.raises(mm.FileError, match=r"found infinity or NaN in optimizer\.state\.weight"):
        mm.checkpoint.load(tmp_path / "diverged", model, optimizer)


@on_ranks(2)
def test_torchs_functions_refuse_flat_shards_of_which_they_would_keep_one_ranks() -> None:
    case = cases.build("flat 2", WHOLE, **problem.SETTINGS)
    case.give(problem.gradients(0))
    case.optimizer.step()
    assert case.optimizer.state_dict()["state"]  # as this rank stores it, for a file of its own
    with pytest.raises(mm.StateError, match=r"muonmesh\.checkpoint\.save\(path, model, optimizer\)"):
        get_optimizer_state_dict(case.model, case.optimizer)


@on_ranks(2)
def test_torchs_functions_keep_the_state_of_declared_shards(tmp_path: Path) -> None:
    """The state of declared shards is made of DTensors, so torch's functions keep all of it."""
    differing = []
    for seed in (0, 7):
        case = cases.build("declared 2", WHOLE, seed, **problem.SETTINGS)
        case.give(problem.gradients(seed))
        case.optimizer.step()
        state = get_optimizer_state_dict(case.model, case.optimizer)
        if seed:
            dcp.load(state, checkpoint_id=tmp_path)
            set_optimizer_state_dict(case.model, case.optimizer, state)
        else:
            dcp.save(state, checkpoint_id=tmp_path)
        differing.append({name: value for name, value in case.whole().items() if "." in name})
    assert problem.differing(*differing) == []
