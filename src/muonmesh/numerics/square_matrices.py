"""Elementwise work on rows × rows matrices on a CPU, computed in fp32 or wider and rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

from muonmesh.numerics.kernels.threads import scratch
from muonmesh.numerics.normalize import CACHED


def symmetric_part(x: Tensor, spare: Tensor, out: Tensor) -> Tensor:
    """Return (X + Xᵀ)/2 in `out`.

    Args:
        x: Shape (batch, rows, rows).
        spare: A buffer of the same shape.
        out: Another buffer of this shape, for the result.
    """
    for matrix, transposed in zip(x, spare, strict=True):  # torch transposes fast only two dims at a time
        transposed.copy_(matrix.mT)
    return torch.lerp(x, spare, 0.5, out=out)


def add_scaled(x: Tensor, y: Tensor, a: float, z: Tensor, b: float, out: Tensor) -> Tensor:
    """Return X + a·Y + b·Z in `out`. All tensors are contiguous and of the same shape; X may be overwritten."""
    exact = torch.promote_types(x.dtype, torch.float32)
    flat = [t.view(-1) for t in (x, y, z, out)]
    for x_part, y_part, z_part, target in zip(*(torch.split(t, CACHED) for t in flat), strict=True):
        wide = scratch("wide", x_part.shape, dtype=exact, device=x.device).copy_(x_part).add_(y_part, alpha=a)
        target.copy_(wide.add_(z_part, alpha=b))
    return out


def row_products(x: Tensor, y: Tensor) -> Tensor:
    """Return the sum of X * Y over each row, the diagonal of X Yᵀ.

    A few rows at a time. Wider copies of all rows would be allocated from the system and freed on every
    call, which costs more than the sums.

    Args:
        x: Shape (batch, rows, rows).
        y: Shape (batch, rows, rows).

    Returns:
        Shape (batch, rows), fp32 or wider.
    """
    exact = torch.promote_types(x.dtype, torch.float32)
    few = max(1, 2 * CACHED // x.shape[-1])
    sums = [
        [
            scratch("wide", part.shape, dtype=exact, device=x.device).copy_(part).mul_(other).sum(-1)
            for part, other in zip(a.split(few), b.split(few), strict=True)
        ]
        for a, b in zip(x, y, strict=True)
    ]
    return torch.stack([torch.cat(parts) for parts in sums])


def row_squares(x: Tensor) -> Tensor:
    """Return the sum of squares of each row, the diagonal of X Xᵀ, as `row_products` does.

    `torch.linalg.vector_norm` alone would write a wider copy of all of X into new memory from the system.
    """
    exact = torch.promote_types(x.dtype, torch.float32)
    few = max(1, 2 * CACHED // x.shape[-1])
    rows = torch.split(x.reshape(-1, x.shape[-1]), few)
    norms = [
        torch.linalg.vector_norm(scratch("wide", part.shape, dtype=exact, device=x.device).copy_(part), dim=-1)
        for part in rows
    ]
    return torch.cat(norms).square_().view(x.shape[:-1])


def set_centred_diagonal(square: Tensor, diagonal: Tensor) -> Tensor:
    """Write a diagonal minus its mean, fp32 or wider (batch, rows), rounded once; return the mean, (batch, 1, 1)."""
    mean = diagonal.mean(-1, keepdim=True)
    square.diagonal(dim1=-2, dim2=-1).copy_(diagonal - mean)
    return mean[..., None]
