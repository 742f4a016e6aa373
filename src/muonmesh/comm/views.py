"""Views: views of a piece's elements in a storage or in a matrix, and memory for transfers."""

from __future__ import annotations

import torch
from torch import Tensor

from muonmesh.layout import Piece


def view_in_matrix(piece: Piece, matrix: Tensor) -> Tensor:
    """Return a view of a piece's elements in its whole, contiguous matrix."""
    if piece.matrix_start == 0 and piece.shape == matrix.shape and piece.matrix_strides == matrix.stride():
        return matrix  # the common case of a matrix that one rank holds
    return matrix.as_strided(piece.shape, piece.matrix_strides, matrix.storage_offset() + piece.matrix_start)


def view_in_storage(storage: Tensor, piece: Piece) -> Tensor:
    """Return a view of a piece's elements in a contiguous local storage."""
    if piece.storage_start == 0 and piece.shape == storage.shape:
        return storage  # the common case: the piece is the whole storage
    start = storage.storage_offset() + piece.storage_start
    return storage.as_strided(piece.shape, piece.storage_strides, start)


def memory_of(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uninitialized memory that may be kept between steps."""
    with torch.inference_mode(False):  # tensors made in inference mode cannot be written outside of it
        return torch.empty(numel, dtype=dtype, device=device)
