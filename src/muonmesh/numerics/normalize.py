"""Bring matrices of any magnitude to norm 1 without an epsilon."""

from __future__ import annotations

import torch
from torch import Tensor


def normalize(matrices: Tensor, out: Tensor, *, batched: bool) -> None:
    """Write matrices to `out`, wide and with Frobenius norm 1.

    In two stages: first times a power of two near 1 / max|x|, which is exact, so that squares neither overflow nor
    vanish; then divided by the norm. Zero stays zero; a non-finite entry makes non-finite entries.

    Args:
        matrices: Shape (batch, m, n), any strides, any floating-point dtype.
        out: Shape (batch, min(m, n), max(m, n)), contiguous, compute dtype.
        batched: Whether one reduction may serve several matrices. On a CPU its bits would depend on how many.
    """
    if batched:
        _normalize(matrices, out)
    else:
        for matrix, target in zip(matrices, out, strict=True):
            _normalize(matrix, target)


def _normalize(x: Tensor, out: Tensor) -> None:
    """Normalise one matrix (m, n) or all of (batch, m, n)."""
    if x.dtype == torch.float16:
        x = x.float()
    scaled = x * _inverse_power_of_two(x)
    _write(scaled, out)
    # By rows first: one running fp32 sum over a whole matrix would stop growing after some ten million terms.
    # Of what was written, not of `scaled`, so that a transposed matrix sums in the same order.
    exact = torch.promote_types(out.dtype, torch.float32)
    rows = torch.linalg.vector_norm(out, dim=-1, keepdim=True, dtype=exact)
    norm = torch.linalg.vector_norm(rows, dim=(-2, -1), keepdim=x.ndim == 3)
    norm = torch.where(norm == 0, 1.0, norm)
    if scaled.dtype == out.dtype:
        out.div_(norm)
    else:
        _write(scaled.div_(norm), out)  # rounds once; dividing what is rounded already would round twice


def _write(x: Tensor, out: Tensor) -> None:
    """Write x to `out`, wide and in its dtype."""
    if x.shape == out.shape:
        out.copy_(x)
    else:
        out.copy_(x.to(out.dtype).mT)  # cast first: torch transposes fast only within one dtype


def _inverse_power_of_two(x: Tensor) -> Tensor:
    """The power of two that brings max|x| near 1; a scalar, or shape (batch, 1, 1)."""
    if x.ndim == 2:
        low, high = x.aminmax()
        largest = torch.maximum(-low, high)
    else:
        largest = x.abs().amax(dim=(-2, -1), keepdim=True)
    if largest.dtype == torch.bfloat16:
        largest = largest.float()
    # Within these limits the power is a normal number; what remains of the magnitude is left to the norm.
    smallest_normal = torch.finfo(largest.dtype).tiny
    largest = largest.clamp(smallest_normal, 0.25 / smallest_normal)
    mantissa, _ = torch.frexp(largest)
    return (mantissa / largest).to(x.dtype)  # the quotient is a power of two, so the division is exact


def rescale_rows(x: Tensor, gram: Tensor) -> None:
    """Divide each row in place by the root of its absolute sum in X Xᵀ: almost-orthogonal-layer (AOL) rescaling.

    The result has spectral norm at most 1 and, where the rows are nearly orthogonal, singular values near 1.
    Turbo-Muon, arXiv 2512.04632; the rescaling is from arXiv 2208.03160.

    Args:
        x: Shape (batch, rows, cols), rows ≤ cols.
        gram: X Xᵀ, shape (batch, rows, rows).
    """
    exact = torch.promote_types(x.dtype, torch.float32)
    sums = gram.abs().sum(-1, keepdim=True, dtype=exact)
    x.div_(torch.where(sums == 0, 1.0, sums).sqrt())
