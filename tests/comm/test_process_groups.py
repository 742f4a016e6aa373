"""Process groups of some ranks: those outside do not take part, whatever the default group is bound to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import muonmesh as mm
from muonmesh.comm import gather_objects as objects
from muonmesh.comm import process_groups, rendezvous
from muonmesh.errors import PlanError
from tests.support.on_ranks import on_ranks

COVERS = (
    "comm.process_groups.host_group",
    "comm.process_groups.new_group",
    "comm.ranks.mesh_groups",
)


@on_ranks(3)
def test_a_group_of_some_ranks_is_not_split_from_the_group_of_all() -> None:
    """Ranks 0 and 1 make a group, which torch would make from the communicator of all three."""
    everyone: Any = dist.group.WORLD
    bound = everyone.bound_device_id = torch.device("cuda", 0)
    total = torch.ones(())
    try:
        if dist.get_rank() < 2:
            group: Any = process_groups.new_group([0, 1])
            dist.all_reduce(total, group=group)
            assert (float(total), group.bound_device_id) == (2.0, None)
        assert everyone.bound_device_id == bound
    finally:
        everyone.bound_device_id = None


@on_ranks(2)
def test_a_torch_that_names_groups_otherwise_is_refused() -> None:
    """Members that are in other numbers of groups would wait for each other for ever."""
    honest = distributed_c10d._hash_ranks_to_str
    del distributed_c10d._hash_ranks_to_str
    try:
        with pytest.raises(PlanError, match="names groups in another way; needed a version that muonmesh knows"):
            process_groups.new_group([0, 1])
    finally:
        distributed_c10d._hash_ranks_to_str = honest


def test_a_lack_of_memory_is_not_told_as_ranks_that_did_not_come() -> None:
    with pytest.raises(torch.OutOfMemoryError), rendezvous.naming_missing_ranks((0, 1), "key", "step 1", "a gather"):
        raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("index", "message"), [(1, "Cannot access accelerator device"), (None, "not compiled with CUDA")]
)
@on_ranks(2)
def test_messages_ask_for_the_device_of_the_parameters(index: int | None, message: str) -> None:
    """Torch would take the current device, which several ranks may have in common.

    An object is sent in a group of GPUs. This torch has none: it says who asks for which.
    """
    group = dist.new_group([0, 1], backend="cuda:gloo")
    objects.send_objects_by(torch.device("cpu") if index is None else torch.device("cuda", index))
    try:
        with pytest.raises((RuntimeError, AssertionError), match=message):
            objects.gather_objects("mine", group=group)
    finally:
        objects.send_objects_by(torch.device("cpu"))
        dist.destroy_process_group(group)


@on_ranks(2)
def test_a_plan_says_by_which_device_ranks_talk() -> None:
    """A plan takes the device of its own parameters, whatever an earlier one took."""
    objects.send_objects_by(torch.device("cuda", 1))
    weight = torch.nn.Parameter(torch.ones(4, 4))
    weight.grad = torch.ones(4, 4)
    mm.Muon([weight], process_group="world").step()
    assert str(objects._device) == "cpu"
    assert objects.gather_objects(f"rank {dist.get_rank()}") == ["rank 0", "rank 1"]
