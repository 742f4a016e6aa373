"""Share: the boxes of a whole tensor that one rank stores, in a form for `torch.distributed.checkpoint`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from muonmesh.comm.storage import this_rank
from muonmesh.layout import Layout

Boxes = dict[tuple[int, ...], Tensor]
"""Boxes of a whole tensor, by their offsets in the tensor."""


def boxes_of(local: Tensor, layout: Layout | None, shape: tuple[int, ...]) -> Boxes:
    """Return the boxes of a whole tensor that this rank stores, as views.

    Args:
        local: This rank's local tensor, contiguous; a flat buffer may also contain other tensors.
        layout: The layout of the whole tensor; None means that each rank stores all of it.
        shape: The shape of the whole tensor.
    """
    if layout is None or not math.prod(shape):
        return {(0,) * len(shape): local.view(shape) if layout is None else local.new_empty(shape)}
    start = local.storage_offset()
    return {
        block.region.offset: local.as_strided(block.region.shape, block.strides, start + block.start)
        for block in layout.blocks(this_rank())
        if block.region.numel
    }


class Share(Tensor):
    """The boxes of one whole tensor that this rank stores, or will read.

    A Share has the shape and dtype of the whole tensor, but no memory of its own, and does not support computation.
    `torch.distributed.checkpoint` writes the boxes of a Share, or reads into them, as it does with the shard of a
    DTensor. So a tensor may be cut differently at the save and at the load.
    """

    boxes: Boxes

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype, boxes: Mapping[tuple[int, ...], Tensor]) -> Share:
        """Create a Share from the shape and dtype of the whole tensor, and this rank's boxes by their offsets."""
        share: Share = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype)
        share.boxes = dict(boxes)
        return share

    def __repr__(self) -> str:  # type: ignore[override]
        """Return the shape, and the boxes by their offsets."""
        return f"Share(shape={tuple(self.shape)}, boxes={ {at: tuple(box.shape) for at, box in self.boxes.items()} })"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Raise NotImplementedError: a Share does not support computation."""
        raise NotImplementedError(f"{func} of a Share, which is a description of memory and no operand")

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties(dtype=self.dtype), self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(at), box.size()) for at, box in self.boxes.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.boxes[tuple(index.offset)]
