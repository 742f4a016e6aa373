"""Megatron-FSDP: reads where its parameters lie, v1 of megatron-core 0.16.1 and the experimental v2.

Its parameters are DTensors, but mesh axes cut whole buffers, in which parameters lie end to end. So a rank seldom holds
the rows that ``Shard(0)`` of a parameter describes. Where a parameter begins in its buffer, Megatron-FSDP keeps beside
it: v1 in ``orig_param._gbuf``, and v2 in the ``main_weight.layout`` of ``_mfsdp_parameter_group``.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as TorchShard

from muonmesh.comm.placing import mesh_layout, placements_of
from muonmesh.layout import FlatShards, Interval, Layout

_OF_V1, _OF_V2 = "megatron_fsdp_dist_index", "_mfsdp_parameter_group"
"""The attributes by which parameters of each version are known."""


def read_layout(name: str, tensor: Tensor) -> Layout | None:
    """Return the layout of a parameter that Megatron-FSDP shards; None for other tensors.

    Raises:
        LayoutError: an axis that does not cut the buffer has a placement that is not torch's.
    """
    if not isinstance(tensor, DTensor) or not (hasattr(tensor, _OF_V1) or hasattr(tensor, _OF_V2)):
        return None
    mesh, axes, placements = tensor.device_mesh, [*range(tensor.device_mesh.ndim)], tensor.placements
    if (dims := getattr(tensor, _OF_V1, None)) is not None:
        axes = [axis for axis in axes if (mesh.mesh_dim_names or ())[axis] in (dims.dp_outer_dim, dims.dp_shard_dim)]
    cut = [axis for axis in axes if isinstance(placements[axis], TorchShard)]  # v2's Flat is a Shard too
    if not cut:
        return None  # whole parameters: their placements are right
    interval, size = _place_in_buffer(tensor)
    replicated = [Replicate() if axis in cut else placement for axis, placement in enumerate(placements)]
    within = mesh_layout(mesh, tuple(tensor.shape), placements_of(name, replicated))
    return FlatShards.in_buffer(within, cut, interval, size)


def _place_in_buffer(tensor: Any) -> tuple[Interval, int]:
    """Return the place of a parameter in its buffer, and the size of the buffer."""
    if hasattr(tensor, _OF_V1):
        parameter = tensor.orig_param
        item = parameter._gbuf.item_index_map[parameter._item_id]
        return Interval(0, item.size, item.global_data_index), parameter._gbuf.bucket_index.size
    group = tensor._mfsdp_parameter_group()
    layout = group.main_weight.layout
    index = next(i for i, fsdp_parameter in enumerate(group.fsdp_parameters) if fsdp_parameter.sharded is tensor)
    return Interval(0, math.prod(layout.tensor_shapes[index]), layout.tensor_to_offset[index]), layout.size
