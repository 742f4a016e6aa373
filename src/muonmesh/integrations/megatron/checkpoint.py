"""Checkpoint: describes optimizer state as boxes of whole tensors, for Megatron's dist_checkpointing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from muonmesh.checkpoint.record import Boxes, CheckpointedOptimizer, boxes_of
from muonmesh.comm.storage import local_of, this_rank
from muonmesh.errors import StateError, explain_error
from muonmesh.integrations.megatron.param_groups import EACH, EXPERTS
from muonmesh.layout import Layout, MeshLayout
from muonmesh.optimizer import Muon
from muonmesh.settings import NORM_MEANS
from muonmesh.step.connection import placed_members
from muonmesh.step.members import OptimizedParameter
from muonmesh.step.state_layout import COUNT

ANOTHERS = "To begin with new state, as after another optimizer such as Megatron's Adam, write --no-load-optim"
"""What to write if a checkpoint lacks state."""


class _KeyToLoad(str):
    """The key of a tensor to load, which says what to write when Megatron tells that a checkpoint lacks it.

    Only `dist_checkpointing.load` knows what a checkpoint has. Its message formats the key; nothing else does.
    """

    __slots__ = ()

    def __format__(self, _: str) -> str:
        return f"{str(self)!r} ({ANOTHERS})"


def sharded(
    optimizer: Muon, saved: Mapping[str, tuple[str, int, bool]], holders: Mapping[str, int], *, is_loading: bool
) -> dict[str, Any]:
    """Return state and groups as Megatron's ShardedTensors and ShardedObjects; missing state is created first.

    Args:
        optimizer: The optimizer to save or to load into.
        saved: For each parameter by name: its name in checkpoints, the number of this copy, and whether a checkpoint
            may have another number of rows.
        holders: For each group by name, the first rank that has it.
        is_loading: Whether a checkpoint will be loaded into the result.
    """
    CheckpointedOptimizer(optimizer).create_state()
    optimizer.finish()
    for member in placed_members(optimizer):
        member.weights(optimizer.state[member.tensor])  # a master weight follows its weights
    state: dict[str, dict[str, Any]] = {}
    for member, key, layout, boxes in _stored(optimizer):
        name, copy, resizes = saved[member.name]
        replica = copy, layout.replica_number(this_rank())
        # A dict and not a list: dist_checkpointing refuses an empty list as a list of another length.
        entry = state.setdefault(member.name, {}).setdefault(key, {})
        for number, (at, box) in enumerate(boxes.items()):
            if box.device.type == "cpu" and not is_loading:
                # dist_checkpointing copies tensors on a GPU, but not on the CPU. Without a copy, an asynchronous save
                # would write values of a later step.
                box = box.clone()
            whole = f"optimizer.state.{key}.{name}"
            whole = _KeyToLoad(whole) if is_loading else whole
            entry[number] = ShardedTensor(
                whole, box, box.dtype, tuple(box.shape), layout.shape, at, None, replica, allow_shape_mismatch=resizes
            )
    groups = {}
    # A stage with nothing to train has one group without parameters, which a checkpoint does not need.
    for group in (group for group in optimizer.param_groups if group["params"]):
        settings = {key: value for key, value in group.items() if key not in EACH}
        first = holders.get(group["name"], 0)
        number = (this_rank() - first) if this_rank() >= first else this_rank() + 1
        for saved_as in (settings, _other(settings)):
            name = saved_as["name"]
            if saved_as is settings or name not in holders:
                key = f"optimizer.param_groups.{name}"
                groups[name] = ShardedObject(key, saved_as, (1,), (0,), replica_id=number)
    # Stages are clipped by a common norm, so a stage without anything to train has the means too.
    means = ShardedObject(
        f"optimizer.{NORM_MEANS}", optimizer.param_groups[0][NORM_MEANS], (1,), (0,), replica_id=this_rank()
    )
    return {"state": state, "param_groups": groups, NORM_MEANS: means}


def _other(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a dense group for its experts' group, or of an experts' group for its dense group.

    A run with another size of expert parallelism may have both groups or only one, so each checkpoint has both.
    """
    name, experts = settings["name"].removesuffix(EXPERTS), not settings["is_expert_parallel"]
    return {**settings, "name": name + (EXPERTS if experts else ""), "is_expert_parallel": experts}


def _stored(optimizer: Muon) -> Iterator[tuple[OptimizedParameter, str, Layout, Boxes]]:
    """Yield all state of this rank: the parameter, the key, the layout, and the boxes that this rank stores.

    Master weights have the parameter's layout. Step counts are the same on all ranks that have the parameter.
    """
    for member in placed_members(optimizer):
        for key, value in optimizer.state[member.tensor].items():
            local, state_layout = local_of(value), member.state_layouts.get(key)
            layout = (member if state_layout is None else state_layout).storage.layout
            assert layout is not None
            if key == COUNT:
                local, layout = local.view(-1), MeshLayout.replicated((local.numel(),), layout.ranks)
            yield member, key, layout, boxes_of(local, layout, layout.shape)


@torch.no_grad()
def restore(optimizer: Muon, loaded: Mapping[str, Any]) -> None:
    """Copy state and settings that dist_checkpointing has loaded for `sharded` into the optimizer.

    Raises:
        StateError: a group or a parameter's state is missing; nothing has been written then.
    """
    optimizer.finish()
    groups = {group["name"]: group for group in optimizer.param_groups if group["params"]}
    parts = [(*stored, loaded["state"].get(stored[0].name, {}).get(stored[1], {})) for stored in _stored(optimizer)]
    missing = sorted(groups.keys() - loaded["param_groups"].keys())
    missing += [f"{key} of {member.name}" for member, key, _, boxes, saved in parts if len(boxes) != len(saved)]
    if missing:
        write = f"Load into an optimizer of the same model and settings. {ANOTHERS}"
        raise StateError(explain_error(missing[0], "no state of it", "that of all groups and parameters", write))
    for name, group in groups.items():
        group.update({key: value for key, value in loaded["param_groups"][name].items() if key not in EACH})
    for group in optimizer.param_groups:
        group[NORM_MEANS] = loaded[NORM_MEANS]
    for member, key, _, boxes, saved in parts:
        for box, part in zip(boxes.values(), saved.values(), strict=True):
            box.copy_(part)
        if key == "master":
            local_of(member.tensor).copy_(local_of(optimizer.state[member.tensor][key]))
