"""Saved boxes: which boxes of the whole parameter a local shard consists of, as Megatron's own checkpoints have it.

Attributes of parameters lie: experts are stamped sharded though whole, convolutions sharded without a dim, unequal
parts as if they were one. ``model.sharded_state_dict()`` is what checkpoints are resharded by, so it is right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_leaves

from muonmesh.comm.storage import placements_of
from muonmesh.errors import LayoutError, explain_error
from muonmesh.layout import Interval, MeshLayout
from muonmesh.layout.region import row_major


class SavedBox(NamedTuple):
    """A box of the whole parameter and where it lies in the local memory.

    Attributes:
        key: Of the tensor in a checkpoint that it is a part of; a parameter may be several tensors there.
        whole: Shape of that tensor, (dims of the parameter).
        offset: Of the box in it.
        shape: Of the box.
        start: Place of its first element in the parameter's memory.
        strides: There.
        resizes: Whether a checkpoint may hold other many rows, those to which a vocabulary is padded.
    """

    key: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    strides: tuple[int, ...]
    resizes: bool = False


class Cut(NamedTuple):
    """How tensor parallelism cuts a parameter.

    Attributes:
        shape: Of the whole parameter.
        placement: Torch's, over the tensor-parallel ranks, or None where placements cannot say it.
        intervals: Then for each of these ranks intervals of the whole parameter, flattened, in its flattened memory.
    """

    shape: tuple[int, ...]
    placement: Placement | None
    intervals: tuple[tuple[Interval, ...], ...] = ()


def saved_boxes_of(model: nn.Module) -> dict[int, list[SavedBox]]:
    """Return the boxes of each parameter, by its identity; a parameter that no checkpoint holds is left out.

    Axes that checkpoints put in front, of layers and experts, are no dims of the parameter.
    """
    model_state: Any = model
    found: dict[int, list[SavedBox]] = {}
    # With the group that Megatron's own save adds: a stage with layers of multi-token prediction reads it.
    metadata = ensure_metadata_has_dp_cp_group(None)
    for entry in nested_values(model_state.sharded_state_dict(metadata=metadata)):
        if isinstance(entry, (ShardedTensor, ShardedTensorFactory)) and isinstance(entry.data, nn.Parameter):
            parts = [entry] if isinstance(entry, ShardedTensor) else tree_leaves(entry.build())
            found[id(entry.data)] = [_saved_box(part, entry.data) for part in parts]
    return found


def _saved_box(part: Any, parameter: Tensor) -> SavedBox:
    front = part.prepend_axis_num
    start = part.data.storage_offset() - parameter.storage_offset()
    shape = tuple(part.local_shape)
    whole, offset = tuple(part.global_shape[front:]), tuple(part.global_offset[front:])
    return SavedBox(part.key, whole, offset, shape, start, part.data.stride(), part.allow_shape_mismatch)


def cut_of(name: str, local: tuple[int, ...], boxes: Sequence[SavedBox], rank: int, ranks: int) -> Cut:
    """Return how a parameter is cut, proved on this rank against all of its boxes.

    Args:
        name: For messages.
        local: Shape of the shard.
        boxes: Of this rank.
        rank: Of this rank among those of tensor parallelism.
        ranks: How many they are.

    Raises:
        LayoutError: no placement fits, and the boxes are no intervals of whole rows.
    """
    shape, placed = _together(boxes)
    if ranks == 1 or shape == local:
        if shape == local and all(_in_place(box, shape) for box in placed):
            return Cut(shape, Replicate())
    else:
        for dim in range(len(local)):
            placement = Shard(dim) if len(placed) == 1 else _StridedShard(dim, split_factor=len(placed))
            if _fits(placement, shape, local, placed, rank, ranks):
                return Cut(shape, placement)
        row = math.prod(shape[1:])
        if all(box.shape[1:] == local[1:] == shape[1:] and not any(box.offset[1:]) for box in placed):
            return Cut(shape, None, tuple(_intervals(placed, other - rank, row) for other in range(ranks)))
    found = f"local shape {local} and boxes {[(p.key, p.whole, p.offset, p.shape) for p in boxes]}"
    needed = f"shards along one dim over {ranks} tensor-parallel ranks"
    raise LayoutError(explain_error(name, found, needed, "Report the module's class to muonmesh"))


def _together(boxes: Sequence[SavedBox]) -> tuple[tuple[int, ...], list[SavedBox]]:
    """Return the shape of the parameter and its boxes in it; tensors of several keys follow each other by rows."""
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
    """Whether a box lies in memory where it does in the whole."""
    strides = row_major(shape)
    same = all(a == b for a, b, size in zip(box.strides, strides, box.shape, strict=True) if size > 1)
    return same and box.start == sum(o * s for o, s in zip(box.offset, strides, strict=True))


def _fits(
    placement: Shard | _StridedShard,
    shape: tuple[int, ...],
    local: tuple[int, ...],
    boxes: Sequence[SavedBox],
    rank: int,
    ranks: int,
) -> bool:
    dim = placement.dim
    if shape[dim] != local[dim] * ranks or shape[dim] % (ranks * len(boxes)):
        return False
    layout = MeshLayout(shape, (ranks,), tuple(range(ranks)), placements_of("", (placement,)))
    said = {(block.region.offset, block.region.shape, block.start) for block in layout.blocks(rank)}
    return layout.local_shape(rank) == local and said == {(p.offset, p.shape, p.start) for p in boxes}


def _intervals(boxes: Sequence[SavedBox], away: int, row: int) -> tuple[Interval, ...]:
    """Return the boxes of the rank that is so many places away, which are as long and follow or precede these."""
    return tuple(Interval((p.offset[0] + away * p.shape[0]) * row, p.shape[0] * row, p.start) for p in boxes)


def expert_of(place: int, boxes: Sequence[SavedBox]) -> tuple[int, int, tuple[int, int], list[SavedBox]]:
    """Return the elements low to high of a weight that are one expert, its shape (in, out), and its boxes.

    Args:
        place: Of the expert among those of this rank.
        boxes: Of the weight, as Megatron's checkpoints have it: boxes of (experts, out, in), which follow each other
            along the last dim of the memory.
    """
    rows, cols = boxes[0].shape[2], sum(box.shape[1] for box in boxes)
    found, start = [], 0
    for box in boxes:
        whole, offset, shape = ((sizes[2], sizes[1]) for sizes in (box.whole, box.offset, box.shape))
        found.append(SavedBox(box.key, whole, offset, shape, start, (cols, 1)))
        start += box.shape[1]
    size = rows * cols
    return place * size, (place + 1) * size, (rows, cols), found
