"""Layouts: where a parameter of Megatron lives: how tensor parallelism cuts it, and the distributed optimizer.

How it is cut is read from Megatron's own checkpoints, as boxes of the whole parameter. The parameters' attributes can
be wrong: whole experts are marked as shards, sharded convolutions have no dim, and unequal parts are marked as one
part. ``model.sharded_state_dict()`` must be right, since Megatron reshards checkpoints by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_leaves

from muonmesh.comm.placing import mesh_layout, placements_of
from muonmesh.errors import LayoutError, explain_error
from muonmesh.layout import Declared, FlatShards, Interval, MeshLayout
from muonmesh.layout.region import row_major


class SavedBox(NamedTuple):
    """A box of the whole parameter, and its place in the local memory.

    Attributes:
        key: The key of the box's tensor in a checkpoint; one parameter may be several tensors there.
        whole: The shape of this tensor, in the dims of the parameter.
        offset: The offset of the box in this tensor.
        shape: The shape of the box.
        start: The place of the box's first element in the parameter's memory.
        strides: The strides of the box in the parameter's memory.
        resizes: Whether a checkpoint may have another number of rows, as with a padded vocabulary.
    """

    key: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    strides: tuple[int, ...]
    resizes: bool = False


def saved_boxes_of(model: nn.Module, ranks: int) -> dict[int, list[SavedBox]]:
    """Return the boxes of each parameter, by its ``id``; parameters that checkpoints do not have are left out.

    Checkpoints may add axes of layers and experts in front; these axes are removed.

    Args:
        model: A chunk without wrappers.
        ranks: The number of tensor-parallel ranks.

    Raises:
        LayoutError: the model has no ``sharded_state_dict``, and tensor parallelism may have cut its parameters.
    """
    read: Any = getattr(model, "sharded_state_dict", None)
    if read is None:
        if ranks == 1:
            return {}
        problem = f"no sharded_state_dict() under tensor parallelism over {ranks} ranks"
        needed = "this method of Megatron's modules, which says how parameters are cut"
        write = "Derive the model from megatron.core.transformer.module.MegatronModule, or set the tensor-parallel "
        raise LayoutError(explain_error(type(model).__name__, problem, needed, write + "size to 1"))
    # Megatron's own save adds this group too. A stage with layers of multi-token prediction reads it.
    metadata = ensure_metadata_has_dp_cp_group(None)
    found_boxes: dict[int, list[SavedBox]] = {}
    for entry in nested_values(read(metadata=metadata)):
        if isinstance(entry, (ShardedTensor, ShardedTensorFactory)) and isinstance(entry.data, nn.Parameter):
            parts = [entry] if isinstance(entry, ShardedTensor) else tree_leaves(entry.build())
            found_boxes[id(entry.data)] = [_saved_box(part, entry.data) for part in parts]
    return found_boxes


def _saved_box(part: Any, parameter: Tensor) -> SavedBox:
    front = part.prepend_axis_num
    start = part.data.storage_offset() - parameter.storage_offset()
    shape = tuple(part.local_shape)
    whole, offset = tuple(part.global_shape[front:]), tuple(part.global_offset[front:])
    return SavedBox(part.key, whole, offset, shape, start, part.data.stride(), part.allow_shape_mismatch)


Ranges = Sequence[tuple[int, int]]
"""For each data-parallel rank: begin and end of the elements of the flattened shard that the rank keeps."""


def layout_of(
    name: str, parameter: Tensor, boxes: Sequence[SavedBox] | None, mesh: DeviceMesh, ranges: Ranges | None
) -> Declared:
    """Return a parameter's layout for ``Muon(..., layouts=...)``: a FlatShards if it is stepped in intervals.

    Args:
        name: The parameter's name, for messages.
        parameter: The local shard.
        boxes: The boxes of this rank; None: the parameter is in no checkpoint, and so it is whole.
        mesh: The mesh (data, tensor) of all ranks that hold elements of the parameter.
        ranges: The elements of a shard that each data-parallel rank keeps; None: all of them.

    Raises:
        LayoutError: the parameter has no boxes, but its attributes mark a tensor-parallel shard; or no placement fits
            the boxes, and the boxes are not intervals of whole rows.
    """
    shape, ranks = tuple(parameter.shape), mesh.size(1)
    placement: Placement | None = Replicate()
    intervals: tuple[tuple[Interval, ...], ...] = ((Interval(0, parameter.numel(), 0),),) * ranks
    if boxes is not None:
        shape, placement, cut = _cut(name, shape, boxes, mesh.get_local_rank(1), ranks)
        intervals = cut or intervals
    elif ranks > 1 and getattr(parameter, "tensor_model_parallel", False):
        problem = "tensor_model_parallel=True and no entry in sharded_state_dict()"
        needed = "an entry there, by which its checkpoints are resharded: attributes alone are wrong too often"
        raise LayoutError(explain_error(name, problem, needed, "Give its module a sharded_state_dict()"))
    if placement is not None and ranges is None:
        return mesh, (Replicate(), placement), shape
    within = mesh_layout(mesh, shape, placements_of("", (Replicate(), placement or Replicate())))
    axes = [axis for axis, cuts in enumerate((ranges is not None, placement is None)) if cuts]

    def intervals_of(_: int, at: Sequence[int]) -> Sequence[Interval]:
        of_rank = intervals[at[1]]
        return of_rank if ranges is None else [interval.part(*ranges[at[0]]) for interval in of_rank]

    return FlatShards.on_axes(within, axes, intervals_of)


def _cut(
    name: str, local: tuple[int, ...], boxes: Sequence[SavedBox], rank: int, ranks: int
) -> tuple[tuple[int, ...], Placement | None, tuple[tuple[Interval, ...], ...]]:
    """Return the shape of the whole parameter, and how tensor parallelism cuts it; both fit all boxes of this rank.

    The cut is a torch placement over the tensor-parallel ranks. If none describes it: None, and for each of these ranks
    the intervals of the flattened whole parameter that lie in the rank's flattened memory.
    """
    shape, placed = _stacked(boxes)

    def fits(placement: Shard | _StridedShard) -> bool:
        dim = placement.dim
        if shape[dim] != local[dim] * ranks or shape[dim] % (ranks * len(placed)):
            return False
        layout = MeshLayout(shape, (ranks,), tuple(range(ranks)), placements_of("", (placement,)))
        predicted = {(block.region.offset, block.region.shape, block.start) for block in layout.blocks(rank)}
        return layout.local_shape(rank) == local and predicted == {(box.offset, box.shape, box.start) for box in placed}

    if ranks == 1 or shape == local:
        if shape == local and all(_in_place(box, shape) for box in placed):
            return shape, Replicate(), ()
    else:
        for dim in range(len(local)):
            placement = Shard(dim) if len(placed) == 1 else _StridedShard(dim, split_factor=len(placed))
            if fits(placement):
                return shape, placement, ()
        row = math.prod(shape[1:])
        if all(box.shape[1:] == local[1:] == shape[1:] and not any(box.offset[1:]) for box in placed):
            return shape, None, tuple(_intervals(placed, other - rank, row) for other in range(ranks))
    problem = f"local shape {local} and boxes {[(p.key, p.whole, p.offset, p.shape) for p in boxes]}"
    needed = f"shards along one dim over {ranks} tensor-parallel ranks"
    raise LayoutError(explain_error(name, problem, needed, "Report the module's class to muonmesh"))


def _stacked(boxes: Sequence[SavedBox]) -> tuple[tuple[int, ...], list[SavedBox]]:
    """Return the shape of the whole parameter and the boxes in it; tensors of several keys are stacked by rows."""
    first: dict[str, int] = {}
    rows = 0
    for box in sorted(boxes, key=lambda box: box.start):
        if box.key not in first:
            first[box.key] = rows
            rows += box.whole[0] if box.whole else 0
    if len(first) == 1:
        return boxes[0].whole, list(boxes)
    moved = [p._replace(offset=(p.offset[0] + first[p.key], *p.offset[1:])) for p in boxes]
    return (rows, *boxes[0].whole[1:]), moved


def _in_place(box: SavedBox, shape: tuple[int, ...]) -> bool:
    """Return whether a box has the same place in memory as in a row-major tensor of the whole shape."""
    strides = row_major(shape)
    same = all(a == b for a, b, size in zip(box.strides, strides, box.shape, strict=True) if size > 1)
    return same and box.start == sum(o * s for o, s in zip(box.offset, strides, strict=True))


def _intervals(boxes: Sequence[SavedBox], away: int, row: int) -> tuple[Interval, ...]:
    """Return the boxes, as intervals, of the rank that is ``away`` places after this rank.

    Its boxes have the same lengths; in the whole tensor, they follow (or precede) the boxes of this rank.
    """
    return tuple(Interval((p.offset[0] + away * p.shape[0]) * row, p.shape[0] * row, p.start) for p in boxes)


def ranges_of(chunks: Sequence[Any]) -> Mapping[Any, list[tuple[int, int]]]:
    """Return for each parameter of a stage's chunks begin and end of the elements that each data-parallel rank keeps.

    Megatron cuts every bucket of a flat buffer into equal parts, one for each rank of the group that reduces it
    (distributed/param_and_grad_buffer.py of megatron-core 0.16.1; optimizer/param_layout.py of 0.19.2).
    ``param_index_map`` has the parameters' places.
    """
    ranges: dict[Any, list[tuple[int, int]]] = {}
    for buffer in (buf for chunk in chunks for buf in (*chunk.buffers, *chunk.expert_parallel_buffers)):
        ranks = buffer.data_parallel_group.size()
        for parameter, (start, end, number) in buffer.param_index_map.items():
            bucket = buffer.buckets[number]
            interval, size = Interval(0, end - start, start - bucket.offset), bucket.grad_data.numel()
            shares = [interval.share(size, rank, ranks) for rank in range(ranks)]
            ranges[parameter] = [(first, first + length) for first, length, _ in shares]
    return ranges
