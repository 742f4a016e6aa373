"""Checkpoint: describes optimizer state as boxes of whole tensors, for Megatron's dist_checkpointing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from muonmesh.checkpoint.record import Boxes, CheckpointedOptimizer, boxes_of
from muonmesh.comm.gather_objects import gather_objects
from muonmesh.comm.storage import local_of, this_rank
from muonmesh.errors import StateError, explain_error
from muonmesh.integrations.megatron.param_groups import EACH
from muonmesh.layout import Layout, MeshLayout
from muonmesh.optimizer import Muon
from muonmesh.settings import NORM_MEANS
from muonmesh.step.connection import placed_members
from muonmesh.step.members import OptimizedParameter
from muonmesh.step.state_layout import COUNT

ANOTHERS = "To begin with new state, as after another optimizer such as Megatron's Adam, write --no-load-optim"
"""What to write if a checkpoint lacks state."""


_OWN = (*EACH, "name", "is_expert_parallel")
"""Keys of a group that a checkpoint does not have: they follow from the model and its parallel sizes."""


class _KeyToLoad(str):
    """The key of a tensor to load, which says what to write when Megatron tells that a checkpoint lacks it.

    Only `dist_checkpointing.load` knows what a checkpoint has. Its message formats the key; nothing else does.
    """

    __slots__ = ()

    def __format__(self, _: str) -> str:
        return f"{str(self)!r} ({ANOTHERS})"


def sharded(optimizer: Muon, saved: Mapping[str, tuple[str, int, bool]], *, is_loading: bool) -> dict[str, Any]:
    """Return state as Megatron's ShardedTensors, and settings; missing state is created first. All ranks call it.

    Settings are saved for each parameter, in what Megatron saves of rank 0 alone, so all ranks have all of them.

    Args:
        optimizer: The optimizer to save or to load into.
        saved: For each parameter by name: its name in checkpoints, the number of this copy, and whether a checkpoint
            may have another number of rows.
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
    # Stages are clipped by a common norm, so a stage without anything to train has the means too.
    means = ShardedObject(
        f"optimizer.{NORM_MEANS}", optimizer.param_groups[0][NORM_MEANS], (1,), (0,), replica_id=this_rank()
    )
    settings = {} if is_loading else {"param_groups": _settings_of_parameters(optimizer, saved)}
    return {"state": state, NORM_MEANS: means, **settings}


def _settings_of_parameters(optimizer: Muon, saved: Mapping[str, tuple[str, int, bool]]) -> dict[str, dict[str, Any]]:
    """Return the settings of the groups of all ranks, by the parameters' names in checkpoints."""
    of_groups = [{key: value for key, value in group.items() if key not in _OWN} for group in optimizer.param_groups]
    on_rank = {}
    for member in placed_members(optimizer):
        assert member.storage.layout is not None
        if member.storage.layout.ranks[0] == this_rank():  # the others that hold it have the same
            on_rank[saved[member.name][0]] = of_groups[member.group]
    return {name: settings for of_rank in gather_objects(on_rank, group="world") for name, settings in of_rank.items()}


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
def restore(optimizer: Muon, saved: Mapping[str, tuple[str, int, bool]], loaded: Mapping[str, Any]) -> None:
    """Copy state and settings that dist_checkpointing has loaded for `sharded` into the optimizer.

    A group gets the settings with which all its parameters were saved. Where these differ, it keeps its own.

    Raises:
        StateError: a parameter's state or settings are missing, or another rule's; nothing has been written then.
    """
    optimizer.finish()
    parts = [(*stored, loaded["state"].get(stored[0].name, {}).get(stored[1], {})) for stored in _stored(optimizer)]
    groups = [
        (group, {name: loaded["param_groups"].get(saved[name][0]) for name in group["param_names"]})
        for group in optimizer.param_groups
        if group["params"]
    ]
    missing = [f"settings of {name}" for _, entries in groups for name, entry in entries.items() if entry is None]
    missing += [
        f"{key} of {member.name}" for member, key, _, boxes, loaded_boxes in parts if len(boxes) != len(loaded_boxes)
    ]
    if missing:
        write = f"Load into an optimizer of the same model and settings. {ANOTHERS}"
        raise StateError(explain_error(missing[0], "no state of it", "that of all parameters", write))
    for group, entries in groups:
        for name, entry in entries.items():
            if entry["algorithm"] != group["algorithm"]:
                needed = f"that of rule {group['algorithm']!r}, by which this optimizer updates it"
                problem, write = f"state of rule {entry['algorithm']!r}", "Train it by the rule that has saved it"
                raise StateError(explain_error(name, problem, needed, write))
    for group, entries in groups:
        first, *others = entries.values()
        group.update({key: first[key] for key in first if all(other.get(key) == first[key] for other in others)})
    for group in optimizer.param_groups:
        group[NORM_MEANS] = loaded[NORM_MEANS]
    for member, key, _, boxes, loaded_boxes in parts:
        for box, part in zip(boxes.values(), loaded_boxes.values(), strict=True):
            box.copy_(part)
        if key == "master":
            local_of(member.tensor).copy_(local_of(optimizer.state[member.tensor][key]))
