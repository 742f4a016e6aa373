"""Layouts: where a parameter of Megatron lives, in DistributedDataParallel alone or with the distributed optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from muonmesh.comm.placing import mesh_layout, placements_of
from muonmesh.integrations.megatron.saved_boxes import Cut
from muonmesh.layout import Declared, FlatShards, Interval

Ranges = Sequence[tuple[int, int]]
"""For each data-parallel rank: begin and end of the elements of the flattened shard that the rank keeps."""


def declared(cut: Cut, mesh: DeviceMesh, ranges: Ranges | None) -> Declared:
    """Return a parameter's layout for ``Muon(..., layouts=...)``.

    Args:
        cut: How tensor parallelism cuts the parameter.
        mesh: The mesh (data, tensor) of all ranks that hold elements of the parameter.
        ranges: The elements of a shard that each data-parallel rank keeps; None: all of them.
    """
    if cut.placement is not None and ranges is None:
        return mesh, (Replicate(), cut.placement), cut.shape
    within = mesh_layout(mesh, cut.shape, placements_of("", (Replicate(), cut.placement or Replicate())))
    whole = Interval(0, prod(within.local_shape(within.ranks[0])), 0)
    intervals = cut.intervals or ((whole,),) * within.mesh[1]
    axes = [axis for axis, cuts in enumerate((ranges is not None, cut.placement is None)) if cuts]

    def held(_: int, at: Sequence[int]) -> Sequence[Interval]:
        mine = intervals[at[1]]
        return mine if ranges is None else [interval.part(*ranges[at[0]]) for interval in mine]

    return FlatShards.on_axes(within, axes, held)


def within(ranges: Ranges, low: int, high: int) -> list[tuple[int, int]]:
    """Return the part of each range that lies between the elements low and high, counted from low."""
    return [(min(max(a, low), high) - low, max(min(b, high), low) - low) for a, b in ranges]


def ranges_of(chunks: Sequence[Any]) -> Mapping[Any, list[tuple[int, int]]]:
    """Return for each parameter of a stage's chunks begin and end of the elements that each data-parallel rank keeps.

    Megatron cuts every bucket of a flat buffer into equal parts, one for each rank of the group that reduces it
    (distributed/param_and_grad_buffer.py of megatron-core 0.16.1). ``param_index_map`` has the parameters' places.
    """
    found: dict[Any, list[tuple[int, int]]] = {}
    for buffer in (each for chunk in chunks for each in (*chunk.buffers, *chunk.expert_parallel_buffers)):
        ranks = buffer.data_parallel_group.size()
        for parameter, (start, end, number) in buffer.param_index_map.items():
            bucket = buffer.buckets[number]
            part = bucket.grad_data.numel() // ranks
            lows = [bucket.offset + rank * part for rank in range(ranks)]
            found[parameter] = within([(low, low + part) for low in lows], start, end)
    return found
