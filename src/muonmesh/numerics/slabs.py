"""Slabs: some columns of a matrix, (rows, width), of which other ranks hold the rest.

With X = [X₁ … X_P], X Xᵀ = Σ X_r X_rᵀ and ‖X‖² = Σ ‖X_r‖². Whoever adds these up can go through the steps of
`orthogonalize` slab by slab: `gram_factor` says from the sum what each slab is multiplied by.
"""

from __future__ import annotations

import torch
from torch import Tensor

from muonmesh.numerics.kernels import select
from muonmesh.numerics.normalize import CACHED
from muonmesh.numerics.precision import exact_fp32


def norms_of(squares: Tensor) -> Tensor:
    """Return Frobenius norms from sums of squares, both fp64 (n,): 1 for a matrix of zeros, NaN if not finite."""
    norms = squares.sqrt()
    return torch.where(norms == 0, 1.0, torch.where(norms.isfinite(), norms, torch.nan))


def divide(slab: Tensor, norm: Tensor) -> None:
    """Divide a slab in place, in fp64 and rounded once.

    Squares of fp32 numbers neither overflow nor vanish in fp64, so their norm is exact enough at any scale.

    Args:
        slab: Contiguous, fp32 or fp64.
        norm: 0-d, fp64.
    """
    flat = slab.view(-1)
    for part in torch.split(flat, CACHED if slab.device.type == "cpu" else max(1, flat.numel())):
        part.copy_(part.double() / norm)


def gram_of(slab: Tensor, out: Tensor) -> None:
    """Write X_r X_rᵀ into ``out``, contiguous (rows, rows); zeros for a slab without columns."""
    if not slab.numel():
        out.zero_()
        return
    rows, width = slab.shape
    kernels = select("auto", device=slab.device, dtype=slab.dtype, rows=rows, cols=width)
    with exact_fp32(slab.dtype):
        kernels.gram(slab[None], torch.ones((1, 1, 1), dtype=slab.dtype, device=slab.device), out[None])


def multiply(factor: Tensor, slab: Tensor, out: Tensor) -> None:
    """Write F X_r into ``out``, contiguous and of the slab's shape, which has columns; F has shape (rows, rows)."""
    rows, width = slab.shape
    kernels = select("auto", device=slab.device, dtype=slab.dtype, rows=rows, cols=width)
    with exact_fp32(slab.dtype):
        kernels.apply(slab[None], factor[None], 0.0, 1.0, out[None])


def added(parts: Tensor) -> Tensor:
    """Return the sum of tensors along dim 0, by halves: in an order that depends on nothing but their number.

    An all-reduce adds in an order that depends on the place of an element and on how the ranks are connected, so
    replicas, whose ranks add up the same numbers elsewhere, would drift apart.
    """
    while len(parts) > 1:
        half = len(parts) // 2
        parts = torch.cat([parts[:half] + parts[half : 2 * half], parts[2 * half :]])
    return parts[0]
