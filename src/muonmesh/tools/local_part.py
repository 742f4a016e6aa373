"""The part of a whole tensor that a rank stores."""

from __future__ import annotations

from torch import Tensor

from muonmesh.checkpoint.record import boxes_of
from muonmesh.comm.storage import this_rank
from muonmesh.layout import Layout


def local_part(whole: Tensor, layout: Layout) -> Tensor:
    """Return this rank's part of a whole tensor in memory of its own, with zeros outside the layout's blocks."""
    local = whole.new_zeros(layout.local_shape(this_rank()))
    for offset, box in boxes_of(local, layout, layout.shape).items():
        box.copy_(whole[tuple(slice(low, low + size) for low, size in zip(offset, box.shape, strict=True))])
    return local
