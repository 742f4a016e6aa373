"""Whole tensors as the pieces of a launch, for tests of the kernels that read tables of pieces."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from muonmesh.numerics.kernels.rows import BLOCKS, PieceRows, Place


def pieces_of(
    tensors: Sequence[Tensor], buffers: Sequence[Tensor], entries: Sequence[int] | None = None, blocks: int = BLOCKS
) -> PieceRows:
    """One piece for each tensor and buffer, which have equal shapes; ``entries`` are by default in their order."""
    entries = range(len(tensors)) if entries is None else entries
    return PieceRows(
        [
            Place(number, number, entry, tuple(tensor.shape), 0, tensor.stride(), 0, buffer.stride())
            for number, (tensor, buffer, entry) in enumerate(zip(tensors, buffers, entries, strict=True))
        ],
        blocks,
    )
