"""Layouts: where a parameter of Megatron's lives, whole in DistributedDataParallel or in the flat buffers of its
distributed optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from torch.distributed import tensor as distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import _StridedShard

from muonmesh.comm.storage import Declared
from muonmesh.integrations.megatron.saved_boxes import Cut
from muonmesh.layout import FlatShards, Interval, MeshLayout, Placement, Replicate, StridedShard

Ranges = Sequence[tuple[int, int]]
"""For each data-parallel rank the elements from .. to .. of the flattened shard that it keeps."""


def declared(cut: Cut, mesh: DeviceMesh, ranges: Ranges | None) -> Declared:
    """Return an entry of ``Muon(..., layouts=...)``.

    Args:
        cut: How tensor parallelism cuts the parameter.
        mesh: (data, tensor), all ranks that hold some of it.
        ranges: What each data-parallel rank keeps of a shard; None: all of it.
    """
    if cut.placement is not None and ranges is None:
        return mesh, (distributed.Replicate(), _torch(cut.placement)), cut.shape
    grid = mesh.mesh.tolist()
    ranks = tuple(rank for row in grid for rank in row)
    if cut.placement is None:
        within, intervals = MeshLayout.replicated(cut.shape, ranks), cut.intervals
    else:
        within = MeshLayout(cut.shape, tuple(mesh.mesh.shape), ranks, (Replicate(), cut.placement))
        intervals = ((Interval(0, prod(within.local_shape(ranks[0])), 0),),) * len(grid[0])
    size = sum(interval.length for interval in intervals[0])
    kept = [(0, size)] * len(grid) if ranges is None else ranges
    cuts = [tuple(interval.part(*some) for interval in each) for some in kept for each in intervals]
    sizes = tuple(sum(interval.length for interval in some) for some in cuts)
    if ranges is None:
        replicas = tuple(tuple(row) for row in grid)
    elif isinstance(cut.placement, Replicate):
        replicas = tuple(zip(*grid, strict=True))
    else:
        replicas = (ranks,)
    return FlatShards(within, tuple(cuts), sizes, replicas)


def _torch(placement: Placement) -> Any:
    if isinstance(placement, Replicate):
        return distributed.Replicate()
    if isinstance(placement, StridedShard):
        return _StridedShard(placement.dim, split_factor=placement.split_factor)
    return distributed.Shard(placement.dim)


def buffer_ranges(buffer: Any) -> dict[Any, list[tuple[int, int]]]:
    """Return for each parameter of a flat buffer which of its elements each data-parallel rank keeps, from .. to ..

    Every bucket is cut into equal parts, one for each rank of the group over which it is reduced
    (distributed/param_and_grad_buffer.py of megatron-core 0.16.1); parameters lie in it as ``param_index_map`` says.
    """
    ranks = buffer.data_parallel_group.size()
    found = {}
    for parameter, (start, end, number) in buffer.param_index_map.items():
        bucket = buffer.buckets[number]
        part = bucket.grad_data.numel() // ranks
        lows = [bucket.offset + rank * part for rank in range(ranks)]
        found[parameter] = within([(low, low + part) for low in lows], start, end)
    return found


def within(ranges: Ranges, low: int, high: int) -> list[tuple[int, int]]:
    """Return which of the elements low to high each range holds, counted from low."""
    return [(min(max(a, low), high) - low, max(min(b, high), low) - low) for a, b in ranges]


def ranges_of(chunks: Sequence[Any]) -> Mapping[Any, list[tuple[int, int]]]:
    """Return `buffer_ranges` of all buffers of the chunks of a stage, of experts too."""
    found: dict[Any, list[tuple[int, int]]] = {}
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            found.update(buffer_ranges(buffer))
    return found
