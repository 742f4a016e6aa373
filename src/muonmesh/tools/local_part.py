"""The part of a whole tensor that a rank stores."""

from __future__ import annotations

from torch import Tensor

from muonmesh.comm.storage import this_rank
from muonmesh.layout import Layout


def local_part(whole: Tensor, layout: Layout) -> Tensor:
    """Return this rank's part of a whole tensor in memory of its own, with zeros outside the layout's blocks."""
    local = whole.new_zeros(layout.local_shape(this_rank()))
    for block in layout.blocks(this_rank()):
        region = block.region
        box = tuple(slice(low, low + size) for low, size in zip(region.offset, region.shape, strict=True))
        local.as_strided(region.shape, block.strides, block.start).copy_(whole[box])
    return local
