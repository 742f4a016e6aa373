"""Process groups: finds or makes the groups in which ranks communicate, and keeps them for the next optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from muonmesh.comm.rendezvous import seconds_of_collectives
from muonmesh.errors import PlanError, explain_error

_group_counts: Counter[tuple[int, ...]] = Counter()
"""Number of process groups that this process has made for each set of ranks; equal on all ranks of the set."""

_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
"""The process groups that optimizers use, by their ranks."""


def group_of(ranks: Sequence[int], candidates: Sequence[dist.ProcessGroup]) -> dist.ProcessGroup | None:
    """Return a process group of exactly these ranks: a candidate, the default group, or a new group.

    Only the members make a new group (``use_local_synchronization``); other ranks do not take part. The group is kept
    for the next optimizer, because each group costs threads or a communicator. None for a single rank.
    """
    if len(ranks) == 1:
        return None
    for candidate in (*candidates, dist.group.WORLD):
        if candidate is not None and sorted(dist.get_process_group_ranks(candidate)) == sorted(ranks):
            return candidate
    key = tuple(sorted(ranks))
    if _groups.get(key) not in distributed_c10d._world.pg_map:  # there is no group, or it has been destroyed
        _groups[key] = new_group(ranks)
    return _groups[key]


def new_group(ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
    """Return a new process group with the timeout of the default group. All members, and no other ranks, call this.

    With local synchronization, torch derives the group's name from its ranks and from the number of groups of this
    process. If one member is in more groups than another, the two would wait for each other under different names
    forever. So this function gives the group the same name on all members.
    """
    key, timeout = tuple(sorted(ranks)), timedelta(seconds=seconds_of_collectives())
    honest: Any = getattr(distributed_c10d, "_hash_ranks_to_str", None)
    if honest is None:
        problem = f"torch {torch.__version__}, which names groups in another way"
        write = "Install the newest muonmesh, or pass a process group of exactly these ranks (Muon(process_group=...))"
        raise PlanError(explain_error(f"a group of the ranks {key}", problem, "a version that muonmesh knows", write))
    name = f"muonmesh {key} {_group_counts[key]}"
    _group_counts[key] += 1
    distributed_c10d._hash_ranks_to_str = lambda ranks: name
    try:
        with _unbound():
            group: dist.ProcessGroup = dist.new_group(key, timeout, backend, use_local_synchronization=True)
    finally:
        distributed_c10d._hash_ranks_to_str = honest
    return group


@contextmanager
def _unbound() -> Iterator[None]:
    """Let the default group have no device inside a block.

    If it has one (``init_process_group(device_id=...)``), torch splits the communicator of all ranks for a new group.
    All of these ranks have to take part in that, and would be waited for for ever.
    """
    everyone: Any = dist.group.WORLD
    bound = everyone.bound_device_id
    if bound is None:
        yield
        return
    everyone.bound_device_id = None
    try:
        yield
    finally:
        everyone.bound_device_id = bound


def host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group of the same ranks that can reduce CPU tensors: ``group``, or a new group of all its ranks."""
    takes = "cpu:" in dist.get_backend_config(group)
    return group if takes else new_group(dist.get_process_group_ranks(group), "gloo")
