"""Views: cuts the elements of a piece out of a storage or a matrix, and allocates memory for what travels."""

from __future__ import annotations

import torch
from torch import Tensor

from muonmesh.layout import Piece


def view_in_matrix(piece: Piece, matrix: Tensor) -> Tensor:
    """Return a piece's elements within its whole, contiguous matrix."""
    if piece.matrix_start == 0 and piece.shape == matrix.shape and piece.matrix_strides == matrix.stride():
        return matrix  # the common case of a matrix that one rank holds
    return matrix.as_strided(piece.shape, piece.matrix_strides, matrix.storage_offset() + piece.matrix_start)


def view_in_storage(storage: Tensor, piece: Piece) -> Tensor:
    """Return the elements of a contiguous local storage that a piece names."""
    if piece.storage_start == 0 and piece.shape == storage.shape:
        return storage  # the common case: the whole of what is stored
    start = storage.storage_offset() + piece.storage_start
    return storage.as_strided(piece.shape, piece.storage_strides, start)


def memory_of(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uninitialized memory, to be kept."""
    with torch.inference_mode(False):  # what is made in inference mode cannot be written outside of it
        return torch.empty(numel, dtype=dtype, device=device)
