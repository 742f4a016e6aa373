"""Normalize: brings matrices of any magnitude into the compute dtype, and computes norms, without an epsilon."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from muonmesh.numerics.kernels.threads import scratch

CACHED = 1 << 17
"""Number of elements that a CPU works on at a time, so that wider copies stay in its cache. With fewer elements, calls
would cost more than the saved memory traffic (measured)."""

_SUMMED_BY_ONE_THREAD = 1 << 14
"""Number of columns of a row that torch always adds up on one thread; torch does so below 1 << 15."""

_LEAST = 1e-12
"""A number below the scaled norm of every non-zero matrix; the square of its inverse is finite."""


def load(matrices: Tensor, out: Tensor, *, as_batch: bool) -> Tensor:
    """Write matrices to `out`, in wide orientation and times a power of two; return the Frobenius norms of the result.

    The power of two is near 1 / max|x|. The multiplication is exact, and squares then neither overflow nor vanish.

    Args:
        matrices: Shape (batch, m, n), any strides, any floating-point dtype.
        out: Shape (batch, min(m, n), max(m, n)), contiguous, compute dtype; may be `matrices`.
        as_batch: Whether one operation may take all matrices.

    Returns:
        The norms, (batch, 1, 1), at least fp32; above 0 even for a matrix of zeros, NaN if an entry is not finite.
    """
    if as_batch:
        return _load(matrices, out)
    return torch.stack([_load(x, target)[None, None] for x, target in zip(matrices, out, strict=True)])


def _load(x: Tensor, out: Tensor) -> Tensor:
    """Do `load` for one matrix (m, n), with a scalar norm, or for all matrices (batch, m, n)."""
    if x.dtype == torch.float16:
        x = x.float()
    exact = torch.promote_types(out.dtype, torch.float32)
    power = _inverse_power_of_two(x)
    if x.dtype == out.dtype and x.shape == out.shape:
        torch.mul(x, power, out=out)
    elif x.shape == out.shape:
        out.copy_(x * power)
    else:
        out.copy_((x * power).to(out.dtype).mT)  # cast first: torch transposes fast only within one dtype
    # By rows first: one running fp32 sum over a whole matrix would stop growing after some ten million terms. Of
    # what was written, so that a transposed matrix sums in the same order.
    if out.device.type != "cpu":  # whose sums are trees; in few launches
        norm: Tensor = torch.linalg.vector_norm(out, dim=(-2, -1), keepdim=True, dtype=exact)
        return norm.clamp_(min=_LEAST).nan_to_num_(nan=torch.nan, posinf=torch.nan)
    # A few rows at a time: for wider copies of all rows, the system would have to clear new memory.
    few = torch.split(out.view(-1, out.shape[-1]), max(1, 2 * CACHED // out.shape[-1]))
    squares = (scratch("squares", part.shape, dtype=exact, device=out.device).copy_(part).square_() for part in few)
    rows = torch.cat([sums(part) for part in squares])
    if x.ndim == 3:
        norm = sums(rows.view(out.shape[:2]))[:, None, None].sqrt_()
    else:
        norm = torch.linalg.vector_norm(rows.sqrt_())
    norm = torch.where(norm == 0, 1.0, norm)
    # Not infinity: dividing by infinity gives zeros, as if there were no gradient.
    return torch.where(norm.isfinite(), norm, torch.nan)


def normalize(matrices: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Do `Matmuls.normalize` by torch's operations, for any dtype, orientation and strides of the matrices."""
    loaded = out.view(torch.bfloat16) if out.dtype == torch.float16 else out  # whose range is large enough
    norm = load(matrices, loaded, as_batch=True)
    power = 2.0**13 * _inverse_power_of_two_of(norm)
    torch.mul(loaded, power, out=out)
    inverse = (norm * power).reciprocal()
    return inverse, inverse.square()


def sums(rows: Tensor) -> Tensor:
    """Return the sum of each row of a (rows, cols) tensor, in an order that depends only on the number of columns.

    Torch would add up a single long row on all threads, but one row among others on one thread.
    """
    parts = [part.sum(-1) for part in torch.split(rows, _SUMMED_BY_ONE_THREAD, dim=1)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def _inverse_power_of_two(x: Tensor) -> Tensor:
    """Return the power of two that brings max|x| near 1; a scalar, or shape (batch, 1, 1)."""
    if x.ndim == 2:
        low, high = x.aminmax()
        largest = torch.maximum(-low, high)
    else:
        largest = torch.maximum(x.amax((-2, -1), keepdim=True), -x.amin((-2, -1), keepdim=True))
    if largest.dtype == torch.bfloat16:
        largest = largest.float()
    return _inverse_power_of_two_of(largest).to(x.dtype)


def _inverse_power_of_two_of(largest: Tensor) -> Tensor:
    """Return the powers of two that bring positive numbers near 1, fp32 or fp64, in their shape."""
    # Within these limits the power is a normal number; the norm takes the rest of the magnitude.
    smallest_normal = torch.finfo(largest.dtype).tiny
    largest = largest.clamp(smallest_normal, 0.25 / smallest_normal)
    mantissa, _ = torch.frexp(largest)
    return mantissa / largest  # the quotient is a power of two, so the division is exact


def store(matrices: Tensor, out: Tensor) -> None:
    """Write wide matrices to `out`, in the orientation and dtype of `out`.

    Args:
        matrices: Shape (batch, rows, cols), wide.
        out: Shape (batch, rows, cols) or (batch, cols, rows), contiguous, any floating-point dtype.
    """
    cast = matrices.to(out.dtype)  # cast first: torch transposes fast only within one dtype
    out.copy_(cast if cast.shape == out.shape else cast.mT)


def sums_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of each tensor, fp64 (n,), computed in fp64; the CPU does not wait.

    Args:
        tensors: At least one; any shapes, strides and real dtypes, on one device.
    """
    if tensors[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float64)).square()
    return torch.stack([_sum_of_squares(tensor) for tensor in tensors])


def _sum_of_squares(tensor: Tensor) -> Tensor:
    parts = [part.double() for part in torch.split(tensor.reshape(-1), CACHED // 2)]
    return torch.stack([torch.dot(part, part) for part in parts]).sum()
