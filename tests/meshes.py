"""Meshes that ranks make once: torch keeps three threads for every process group, and a session asks for hundreds."""

from __future__ import annotations

import functools
import math

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@functools.cache
def mesh_of(
    sizes: tuple[int, ...], ranks: tuple[int, ...] | None = None, names: tuple[str, ...] | None = None
) -> DeviceMesh:
    """A mesh over the whole world, or over these ranks in this order; all ranks of the world ask for it."""
    if ranks is None:
        return init_device_mesh("cpu", sizes, mesh_dim_names=names)
    assert len(ranks) == math.prod(sizes)
    return DeviceMesh("cpu", torch.tensor(ranks).reshape(sizes), mesh_dim_names=names)
