"""Ranks: what this process knows of the ranks around it, without asking them."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

from muonmesh.comm.storage import Storage, this_rank, world_size


def ranks_of_a_machine() -> int:
    """Return the number of ranks of each machine according to the launcher; 0 if it is unknown.

    torchrun sets ``LOCAL_WORLD_SIZE`` and ``LOCAL_RANK``. The result is 0 unless ranks are numbered machine by machine.
    """
    size, rank = os.environ.get("LOCAL_WORLD_SIZE", "0"), this_rank()
    count = int(size) if size.isdecimal() else 0
    return count if count and os.environ.get("LOCAL_RANK", str(rank % count)) == str(rank % count) else 0


def device_without_parameters() -> torch.device:
    """Return the device that a rank without parameters uses in collectives.

    The result is its accelerator if the ranks have a backend for it other than gloo, else the CPU.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True) if world_size() > 1 else None
    if accelerator is not None:
        backends = dict(pair.split(":", 1) for pair in dist.get_backend_config().split(","))
        if backends.get(accelerator.type, "gloo") != "gloo":
            return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return torch.device("cpu")


def connected_ranks(storages: Sequence[Storage]) -> tuple[int, ...]:
    """Return the ranks that hold any of these parameters, and this rank, in order."""
    ranks = {this_rank()}
    for layout in {id(storage.layout): storage.layout for storage in storages}.values():
        ranks.update(layout.ranks if layout is not None else ())
    return tuple(sorted(ranks))


def mesh_groups(storages: Sequence[Storage]) -> list[dist.ProcessGroup]:
    """Return the process groups of the one-dimensional meshes that hold any of the parameters."""
    meshes = {id(storage.mesh): storage.mesh for storage in storages}
    return [mesh.get_group() for mesh in meshes.values() if mesh is not None and mesh.ndim == 1]
