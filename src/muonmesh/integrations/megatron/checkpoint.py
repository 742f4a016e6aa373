"""Checkpoint: optimizer state as boxes of whole parameters, for Megatron's dist_checkpointing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from torch import Tensor

from muonmesh.checkpoint.share import boxes_of
from muonmesh.comm.storage import local_of, this_rank
from muonmesh.errors import LayoutError, StateError, explain_error
from muonmesh.integrations.megatron.param_groups import EACH, EXPERTS
from muonmesh.layout import Layout
from muonmesh.optimizer import Muon
from muonmesh.step.connection import placed_members
from muonmesh.step.members import Member
from muonmesh.step.state_layout import RUNNING

_PREFIX = "optimizer.state"


def sharded(
    optimizer: Muon, saved: Mapping[str, tuple[str, int, bool]], holders: Mapping[str, int], *, is_loading: bool
) -> dict[str, Any]:
    """Return state and groups in Megatron's vocabulary; state that no step has created yet is, by all ranks.

    Args:
        optimizer: Whose.
        saved: For each parameter the name by which checkpoints know it, the number of this copy of it, and whether
            they may hold it with other many rows.
        holders: For each group the first rank that has it.
        is_loading: Whether it is to be loaded into.
    """
    _create(optimizer)
    optimizer.finish()
    state: dict[str, dict[str, Any]] = {}
    for member in placed_members(optimizer):
        entry = state[member.name] = {}
        for key, value in optimizer.state[member.tensor].items():
            local = local_of(value)
            if local.device.type == "cpu" and not is_loading:
                # dist_checkpointing copies what is on a device. An asynchronous save would write this as it is later.
                local = local.clone()
            # A dict, since dist_checkpointing takes an empty list for a list of another length.
            entry[key] = dict(enumerate(_parts(member, key, local, *saved[member.name])))
    groups = {}
    # The only group of a stage with nothing to train has no parameters, and no other run knows it.
    for group in (group for group in optimizer.param_groups if group["params"]):
        settings = {key: value for key, value in group.items() if key not in EACH}
        first = holders.get(group["name"], 0)
        number = (this_rank() - first) if this_rank() >= first else this_rank() + 1
        for saved_as in (settings,) if is_loading else (settings, _other(settings)):
            name = saved_as["name"]
            if saved_as is settings or name not in holders:
                key = f"optimizer.param_groups.{name}"
                groups[name] = ShardedObject(key, saved_as, (1,), (0,), replica_id=number)
    return {"state": state, "param_groups": groups}


def _other(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group as those of the experts' group beside it, or of the one beside the experts'.

    With another size of expert parallelism there may be both, or one: what is loaded there is saved here too.
    """
    name, experts = settings["name"].removesuffix(EXPERTS), not settings["is_expert_parallel"]
    return {**settings, "name": name + (EXPERTS if experts else ""), "is_expert_parallel": experts}


def _parts(member: Member, key: str, local: Tensor, saved: str, copy: int, resizes: bool) -> Iterator[ShardedTensor]:
    """Yield the boxes of a tensor that this rank stores; counts and norms are the same on all ranks that have them."""
    layout = _layout(member, key)
    whole = f"{_PREFIX}.{key}.{saved}"
    if key == "step" or key in RUNNING:
        number = layout.ranks.index(this_rank())
        yield _tensor(whole, local.view(-1), (local.numel(),), (0,), (copy, number))
        return
    for at, box in boxes_of(local, layout, layout.shape).items():
        found = _tensor(whole, box, layout.shape, at, (copy, layout.replica_number(this_rank())))
        found.allow_shape_mismatch = resizes
        yield found


def _layout(member: Member, key: str) -> Layout:
    """Return where what is kept of a parameter lives; masters live where it does, counts and norms on its ranks."""
    state_layout = member.state_layouts.get(key)
    layout = member.storage.layout if state_layout is None else state_layout.storage.layout
    assert layout is not None
    return layout


def _tensor(key: str, data: Tensor, whole: tuple[int, ...], offset: tuple[int, ...], replica: Any) -> ShardedTensor:
    return ShardedTensor(key, data, data.dtype, tuple(data.shape), whole, offset, None, replica_id=replica)


@torch.no_grad()
def _create(optimizer: Muon) -> None:
    """Create state by a step with zero gradients and rates, which changes nothing; all ranks call it."""
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    if all(optimizer.state[tensor] for tensor in tensors):
        return
    optimizer.zero_grad()
    kept: list[tuple[Tensor, Tensor]] = []
    with contextlib.suppress(LayoutError):  # which the step raises on every rank
        for gradient in map(optimizer.gradients.gradient, tensors):
            if gradient is not None and gradient.any():  # of a backward that came before
                kept.append((gradient, gradient.clone()))
                gradient.zero_()
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.step()
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for gradient, values in kept:
            gradient.copy_(values)


@torch.no_grad()
def restore(optimizer: Muon, loaded: Mapping[str, Any]) -> None:
    """Write what dist_checkpointing has loaded for `sharded` into the state and the groups.

    Raises:
        StateError: something is missing; nothing has been written then.
    """
    groups = {group["name"]: group for group in optimizer.param_groups if group["params"]}
    missing = sorted(groups.keys() - loaded["param_groups"].keys())
    if missing:
        write = "Load into an optimizer of the same model and settings"
        raise StateError(explain_error(missing[0], "no state of it", "that of all groups and parameters", write))
    for name, group in groups.items():
        group.update({key: value for key, value in loaded["param_groups"][name].items() if key not in EACH})
    optimizer.finish()
    for member in placed_members(optimizer):
        for key, value in optimizer.state[member.tensor].items():
            local, layout = local_of(value), _layout(member, key)
            parts = [*loaded["state"].get(member.name, {}).get(key, {}).values()]  # none where a rank holds nothing
            if key == "step" or key in RUNNING:
                local.copy_(parts[0].view(local.shape))
                continue
            for box, part in zip(boxes_of(local, layout, layout.shape).values(), parts, strict=True):
                box.copy_(part)
        if (master := optimizer.state[member.tensor].get("master")) is not None:
            local_of(member.tensor).copy_(local_of(master))
