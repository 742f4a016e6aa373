"""Stages of a pipeline, each with parameters of its own: one checkpoint of all, whatever cuts it when it is loaded."""

from __future__ import annotations

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
from torch.distributed.fsdp import fully_shard

import muonmesh as mm
from tests.support import problem
from tests.support.meshes import mesh_of

COVERS = ("checkpoint.save_load.checkpointed",)

NAMES = ("few", "qkv", "embedding", "square", "experts", "expert_gate_up", "conv1d", "bias")
AT = 3  # matrices and AdamW's on either side
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # of a group that several ranks have, DCP keeps one list


def build_stage(stages: int, seed: int = 0) -> tuple[nn.Module, mm.Muon]:
    """The stage of this rank, sharded where a stage has several ranks; 1: all of it in one process."""
    values = problem.initial(seed)
    ranks = dist.get_world_size() // stages if stages > 1 else 1
    stage = dist.get_rank() // ranks if stages > 1 else 0
    names = NAMES if stages == 1 else (NAMES[:AT], NAMES[AT:])[stage]
    model: nn.Module = problem.Bag({name: values[name] for name in names})
    model.register_buffer("everywhere", values["row"].clone())  # as rotary frequencies are in every stage
    model.register_buffer(f"of_{stage}" if stages > 1 else "of_0", values["one"].clone())
    if stages == 1:
        model.register_buffer("of_1", values["one"].clone())
    if ranks > 1:
        meshes = [mesh_of((ranks,), tuple(range(first, first + ranks))) for first in range(0, stages * ranks, ranks)]
        model = fully_shard(model, mesh=meshes[stage])
    group = None if ranks > 1 else "local"
    return model, mm.Muon(problem.groups(model), process_group=group, compute_dtype=torch.float32, **problem.SETTINGS)


def advance_stage(model: nn.Module, optimizer: mm.Muon, first: int, last: int) -> None:
    for step in range(first, last):
        gradients = problem.gradients(step)
        for name, parameter in model.named_parameters():
            parameter.grad = problem.placed_like(parameter, gradients[name])
        optimizer.clip_grad_norm_(1e30, skip_above="1e9x")  # by norms of each stage, and skips nothing
        optimizer.step()
    optimizer.zero_grad()


def stage_snapshot(model: nn.Module, optimizer: mm.Muon) -> dict[str, Tensor]:
    """Weights, state and buffers, whole; the ranks of a stage call it together, and no others."""
    tensors: dict[str, Tensor] = dict(model.named_buffers())
    for name, parameter in model.named_parameters():
        tensors |= {name: parameter, **{f"{name}.{key}": value for key, value in optimizer.state[parameter].items()}}
    return {name: problem.whole(value) for name, value in tensors.items()}


def save_stages(stages: int, path: str, how: str) -> None:
    model, optimizer = build_stage(stages)
    advance_stage(model, optimizer, 0, 2)
    if how == "ours":
        mm.checkpoint.save(path, model, optimizer)
    else:
        dcp.save(state_by_torch(model, optimizer), checkpoint_id=path)


def state_by_torch(model: nn.Module, optimizer: mm.Muon) -> dict[str, Any]:
    state = get_optimizer_state_dict(model, optimizer, options=FLAT)
    return {"model": get_model_state_dict(model), "optimizer": state}


def load_stages(stages: int, path: str, how: str) -> dict[str, Tensor]:
    """Go on from it under other weights, two steps."""
    model, optimizer = build_stage(stages, seed=7)
    if how == "ours":
        mm.checkpoint.load(path, model, optimizer)
    else:
        advance_stage(model, optimizer, 0, 1)  # DCP reads into what is there
        state = state_by_torch(model, optimizer)
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=FLAT)
    advance_stage(model, optimizer, 2, 4)
    return stage_snapshot(model, optimizer)


@pytest.mark.parametrize("how", ["ours", "torch's"])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_stages_go_to_one_process_and_back(workers, tmp_path: Path, ranks: int, how: str) -> None:
    """On 2 ranks a stage is whole on each; on 4, FSDP2 cuts each in two."""
    model, optimizer = build_stage(1)
    advance_stage(model, optimizer, 0, 4)
    expected = stage_snapshot(model, optimizer)

    workers(ranks).run(save_stages, 2, str(tmp_path / "stages"), how)
    assert problem.differing(load_stages(1, str(tmp_path / "stages"), how), expected) == []

    save_stages(1, str(tmp_path / "one"), how)
    for path in ("one", "stages"):
        by_rank = workers(ranks).run(load_stages, 2, str(tmp_path / path), how)
        assert {name for rank_tensors in by_rank for name in rank_tensors} == expected.keys()
        for rank_tensors in by_rank:
            assert problem.differing(rank_tensors, {name: expected[name] for name in rank_tensors}) == []
