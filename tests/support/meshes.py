"""Meshes that ranks make once, and machines that they are told of.

Torch keeps three threads for every process group, and a session asks for hundreds.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@functools.cache
def mesh_of(
    sizes: tuple[int, ...],
    ranks: tuple[int, ...] | None = None,
    names: tuple[str, ...] | None = None,
    kind: str = "cpu",
) -> DeviceMesh:
    """A mesh over the whole world, or over these ranks in this order; all ranks of the world ask for it."""
    if ranks is None:
        return init_device_mesh(kind, sizes, mesh_dim_names=names)
    assert len(ranks) == math.prod(sizes)
    # Torch names a group by how many groups this process has made. If an earlier test made one on some ranks only, two
    # groups would have one name, and a rank might read an address of the other group's from the store, and hang.
    counts: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(counts, distributed_c10d._world.group_count)
    distributed_c10d._world.group_count = max(counts)
    return DeviceMesh(kind, torch.tensor(ranks).reshape(sizes), mesh_dim_names=names)


@contextmanager
def machines(ranks: int) -> Iterator[None]:
    """What torchrun says on machines of so many ranks."""
    environment = {"LOCAL_WORLD_SIZE": str(ranks), "LOCAL_RANK": str(dist.get_rank() % max(1, ranks))}
    before = {key: os.environ.get(key) for key in environment}
    os.environ |= environment
    try:
        yield
    finally:
        for key, value in before.items():
            os.environ.pop(key)
            if value is not None:
                os.environ[key] = value
