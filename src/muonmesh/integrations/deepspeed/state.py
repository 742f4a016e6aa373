"""State: weights and optimizer state of an engine by parameter name, the same at every stage and world size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from muonmesh.comm.agreement import group_of
from muonmesh.errors import StateError, explain_error
from muonmesh.integrations.deepspeed.calls import Call
from muonmesh.integrations.deepspeed.optimizer import EngineMuon
from muonmesh.integrations.deepspeed.saved import publish
from muonmesh.layout.region import row_major
from muonmesh.names import canonical_name
from muonmesh.numerics.rules import step_count
from muonmesh.step.slots import RUNNING, running_shape

_KEYS = {"muon": {"momentum_buffer": "exp_avg"}, "adamw": {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}}
"""For each algorithm its state by name, and what DeepSpeed calls it."""


@torch.no_grad()
def get_state(engine: Any) -> dict[str, Any]:
    """Return weights and optimizer state by parameter name, for `torch.distributed.checkpoint`; all ranks call it.

    The format is that of `get_model_state_dict` and `get_optimizer_state_dict` for a model under FSDP2: DTensors on a
    mesh of the data-parallel ranks, each of the whole parameter's shape, so that it loads at another stage of ZeRO, at
    another world size, or into `muonmesh.Muon` without DeepSpeed. Weights that are trained are the fp32 ones::

        state = get_state(engine)
        torch.distributed.checkpoint.load(state, checkpoint_id=path)
        set_state(engine, state)

    Returns:
        ``{"model": {name: weights}, "optimizer": {"state": {name: {...}}, "param_groups": [...]}}``
    """
    optimizer = _optimizer(engine)
    model = {}
    for name, tensor in _untrained(engine):
        with _whole(tensor):
            model[name] = tensor.detach().clone()
    states: dict[str, dict[str, Any]] = {}
    for call, name, tensor, algorithm in entries_of(optimizer):
        state = optimizer.state[tensor]
        model[name] = gather(call, name, tensor.detach())
        states[name] = {key: gather(call, name, state[theirs]) for key, theirs in _KEYS[algorithm].items()}
        if algorithm == "adamw":
            states[name]["step"] = step_count(state["step"])
        else:
            for key, norms in _running(call, name, state).items():
                states[name][key] = norms.clone().view(running_shape(norms.numel()))
    for name, first in _tied(engine).items():
        model[name] = model[first]
    reasons = {shard.name: shard.reason for call in optimizer.calls for shard in call.shards}
    groups = []
    for group in optimizer.settings():
        names = group.pop("parameters")
        if group["algorithm"] == "adamw":
            del group["matrices"]
        groups.append({**group, "params": names, "param_names": names, "reasons": [reasons[name] for name in names]})
    return {"model": model, "optimizer": {"state": states, "param_groups": groups}}


@torch.no_grad()
def set_state(engine: Any, state: Mapping[str, Any]) -> None:
    """Write what `get_state` returned, from whatever engine, into this one; all ranks call it.

    Without ``param_groups`` in it, the settings stay as they are.

    Raises:
        StateError: a parameter or a state is missing, or has another shape or belongs to another group; nothing has
            been written.
    """
    optimizer = _optimizer(engine)
    entries = list(entries_of(optimizer))
    model, states = state["model"], state["optimizer"]["state"]
    for call, name, _, algorithm in entries:
        for where, held in (
            ("weights", model.get(name)),
            *((k, states.get(name, {}).get(k)) for k in _KEYS[algorithm]),
        ):
            needed = next(shard.shape for shard in call.shards if shard.name == name)
            if held is None or tuple(held.shape) != needed:
                found = f"no {where}" if held is None else f"{where} of shape {tuple(held.shape)}"
                write = "Load the state of the same model, split in the same way"
                raise StateError(explain_error(name, found, f"{where} of shape {needed}, for {algorithm}", write))
        for key in RUNNING if algorithm == "muon" else ():
            if key not in states[name]:
                found, write = f"no {key}", "Load a state that get_state or muonmesh.Muon has made"
                raise StateError(explain_error(name, found, "one number for each of its matrices", write))
    steps = [held["step"] for held in states.values() if "step" in held]
    if "param_groups" in state["optimizer"]:
        saved = state["optimizer"]["param_groups"]
        optimizer.restore_groups([{**group, "parameters": group["params"]} for group in saved])
    zero = engine.optimizer
    if hasattr(zero, "_partition_all_parameters"):
        zero._partition_all_parameters()
    for call, name, tensor, algorithm in entries:
        own = optimizer.state[tensor]
        _scatter(call, name, tensor, model[name])
        for key, theirs in _KEYS[algorithm].items():
            _scatter(call, name, own[theirs], states[name][key])
        if algorithm == "adamw":
            own["step"] = step_count(states[name]["step"])
            continue
        own["step"] = step_count(max(map(float, steps), default=0.0))  # nothing of ours asks for it
        for key, norms in _running(call, name, own).items():
            norms.copy_(states[name][key].view(-1))
    for name, tensor in _untrained(engine):
        if name in model:
            with _whole(tensor, modifier_rank=0):
                tensor.data.copy_(model[name])
    publish(zero)


def _optimizer(engine: Any) -> EngineMuon:
    optimizer = engine.basic_optimizer
    if not isinstance(optimizer, EngineMuon):
        raise TypeError(
            explain_error(
                "engine",
                f"an optimizer {type(optimizer).__name__}",
                "an engine made by muonmesh.integrations.deepspeed.initialize",
                "Make it so",
            )
        )
    return optimizer


def entries_of(optimizer: EngineMuon) -> Iterator[tuple[Call, str, Tensor, str]]:
    """Yield each parameter's call, name, tensor (its own at stage 0, else the flat one) and algorithm."""
    for call in optimizer.calls:
        if call.layouts:
            (group,) = call.muon.param_groups
            for name in call.layouts:
                yield call, name, group["params"][0], group["algorithm"]
        else:
            for group in call.muon.param_groups:
                for name, tensor in zip(group["param_names"], group["params"], strict=True):
                    yield call, name, tensor, group["algorithm"]


def _untrained(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield frozen parameters and the buffers that a state dict keeps, by name."""
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            yield canonical_name(name), parameter
    kept = engine.module.state_dict().keys()
    for name, buffer in engine.module.named_buffers():
        if name in kept:
            yield canonical_name(name), buffer


def _tied(engine: Any) -> dict[str, str]:
    """Return the further names of parameters that have several, each with the first one."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        name = canonical_name(name)
        if first.setdefault(id(parameter), name) != name:
            tied[name] = first[id(parameter)]
    return tied


def _running(call: Call, name: str, state: dict[str, Any]) -> dict[str, Tensor]:
    """Return views of the running norms of a parameter's matrices among those of its tensor, (matrices,).

    Where nobody has stepped yet they are made in the state.
    """
    columns = call.columns[name]
    every = max(part.stop for part in call.columns.values()) if call.layouts else columns.stop
    found = {}
    for key in RUNNING:
        if key not in state:
            state[key] = torch.zeros(running_shape(every), dtype=torch.float32, device=state["exp_avg"].device)
        found[key] = state[key].view(-1)[columns]
    return found


def _whole(tensor: Tensor, **how: Any) -> Any:
    """Return a context in which a parameter that stage 3 has partitioned is whole."""
    return deepspeed.zero.GatheredParameters([tensor], enabled=hasattr(tensor, "ds_id"), **how)


def gather(call: Call, name: str, local: Tensor) -> Tensor:
    """Return a parameter's share of a tensor, cut by rows over the ranks that hold some of it."""
    if not call.layouts:
        if name not in call.muon.layouts:
            return local.clone()
        declared: Any = call.muon.layouts[name]
        mesh, placements, shape = declared
        stride = row_major(shape)
        return DTensor.from_local(local.clone(), mesh, placements, run_check=False, shape=shape, stride=stride)
    layout = call.layouts[name]
    group = group_of(layout.ranks, [call.process_group])
    whole = torch.zeros(layout.shape, dtype=local.dtype, device=local.device)
    if layout.replica(dist.get_rank()) == layout.replicas[0]:
        for block in layout.blocks(dist.get_rank()):
            box = tuple(slice(o, o + n) for o, n in zip(block.region.offset, block.region.shape, strict=True))
            whole[box].copy_(local.as_strided(block.region.shape, block.strides, local.storage_offset() + block.start))
    if group is None:
        return whole
    # Integers, so that adding the others' zeros keeps every bit, of -0 too.
    dist.all_reduce(whole.view({4: torch.int32, 2: torch.int16, 8: torch.int64}[whole.itemsize]), group=group)
    mesh = DeviceMesh.from_group(group, whole.device.type)
    return distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)


def _scatter(call: Call, name: str, local: Tensor, value: Tensor) -> None:
    """Write a parameter into its share of a tensor."""
    whole = (value.full_tensor() if isinstance(value, DTensor) else value).to(local.device, local.dtype)
    if not call.layouts:
        if name in call.muon.layouts:
            declared: Any = call.muon.layouts[name]
            mesh, placements, _ = declared
            whole = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
        local.copy_(whole)
        return
    for block in call.layouts[name].blocks(dist.get_rank()):
        box = tuple(slice(o, o + n) for o, n in zip(block.region.offset, block.region.shape, strict=True))
        target = local.detach().as_strided(block.region.shape, block.strides, local.storage_offset() + block.start)
        target.copy_(whole[box])
