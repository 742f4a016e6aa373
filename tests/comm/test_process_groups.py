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

COVERS = (
    "comm.process_groups.host_group",
    "comm.process_groups.new_group",
    "comm.ranks.mesh_groups",
)


def of_two_while_the_default_group_has_a_device() -> tuple[float, Any, Any]:
    """Ranks 0 and 1 make a group, which torch would make from the communicator of all three."""
    everyone: Any = dist.group.WORLD
    bound = everyone.bound_device_id = torch.device("cuda", 0)
    total = torch.ones(())
    try:
        if dist.get_rank() == 2:
            return 2.0, None, everyone.bound_device_id == bound
        group: Any = process_groups.new_group([0, 1])
        dist.all_reduce(total, group=group)
        return float(total), group.bound_device_id, everyone.bound_device_id == bound
    finally:
        everyone.bound_device_id = None


def test_a_group_of_some_ranks_is_not_split_from_the_group_of_all(workers: Any) -> None:
    assert workers(3).run(of_two_while_the_default_group_has_a_device) == [(2.0, None, True)] * 3


def with_another_torch() -> str:
    honest = distributed_c10d._hash_ranks_to_str
    del distributed_c10d._hash_ranks_to_str
    try:
        process_groups.new_group([0, 1])
    except PlanError as error:
        return str(error)
    finally:
        distributed_c10d._hash_ranks_to_str = honest
    return ""


def test_a_torch_that_names_groups_otherwise_is_refused(workers: Any) -> None:
    """Members that are in other numbers of groups would wait for each other for ever."""
    for message in workers(2).run(with_another_torch):
        assert "which names groups in another way; needed a version that muonmesh knows" in message


def test_a_lack_of_memory_is_not_told_as_ranks_that_did_not_come() -> None:
    with pytest.raises(torch.OutOfMemoryError), rendezvous.naming_missing_ranks((0, 1), "key", "step 1", "a gather"):
        raise torch.OutOfMemoryError("CUDA out of memory")


def by_which_device(index: int | None) -> str:
    """Send an object in a group of GPUs. This torch has none: it says who asks for which."""
    group = dist.new_group([0, 1], backend="cuda:gloo")
    objects.send_objects_by(torch.device("cpu") if index is None else torch.device("cuda", index))
    try:
        objects.gather_objects("mine", group=group)
    except (RuntimeError, AssertionError) as error:
        return str(error)
    finally:
        objects.send_objects_by(torch.device("cpu"))
        dist.destroy_process_group(group)
    return ""


def test_messages_ask_for_the_device_of_the_parameters(workers: Any) -> None:
    """Torch would take the current device, which several ranks may have in common."""
    assert all("Cannot access accelerator device" in message for message in workers(2).run(by_which_device, 1))
    assert all("not compiled with CUDA" in message for message in workers(2).run(by_which_device, None))


def after_a_plan() -> tuple[str, list[str]]:
    """A plan takes the device of its own parameters, whatever an earlier one took."""
    objects.send_objects_by(torch.device("cuda", 1))
    weight = torch.nn.Parameter(torch.ones(4, 4))
    weight.grad = torch.ones(4, 4)
    mm.Muon([weight], process_group="world").step()
    return str(objects._device), objects.gather_objects(f"rank {dist.get_rank()}")


def test_a_plan_says_by_which_device_ranks_talk(workers: Any) -> None:
    assert workers(2).run(after_a_plan) == [("cpu", ["rank 0", "rank 1"])] * 2
