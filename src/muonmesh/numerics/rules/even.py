"""Even: norms of rows, columns and matrices, for rules that scale all rows or columns of a matrix to the same norm."""

from __future__ import annotations

import torch
from torch import Tensor


def unit(x: Tensor, dim: int) -> Tensor:
    """Return x with norm 1 along a dim; zeros stay zero, and rows or columns that are not finite become NaN.

    Args:
        x: Any shape, fp32 or wider.
        dim: -1 for rows, -2 for columns.
    """
    largest, rest = _norm(x, dim)
    return over(over(x, largest), rest)


def norm(x: Tensor, dim: int) -> Tensor:
    """Return the norms along a dim, which is kept, of a tensor with elements of at most 1.

    Args:
        x: Any shape, fp32 or wider.
        dim: -1 for rows, -2 for columns.
    """
    largest, rest = _norm(x, dim)
    return largest * rest


def _norm(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the norms along a dim as two factors: the largest elements, and the norms of x divided by them.

    So no square vanishes or overflows, and no epsilon is needed: rows of 1e-30 count as much as others, and multiplying
    x by a power of two changes no bit.
    """
    largest = x.abs().amax(dim, keepdim=True)
    return largest, over(x, largest).square_().sum(dim, keepdim=True).sqrt_()


def frobenius(x: Tensor) -> Tensor:
    """Return Frobenius norms of matrices that are neither tiny nor huge, (..., 1, 1).

    Rows are summed first, because a single fp32 sum of ten million terms would stop growing.
    """
    return x.square().sum(-1, keepdim=True).sum(-2, keepdim=True).sqrt_()


def over(x: Tensor, divisor: Tensor) -> Tensor:
    """Return x divided by ``divisor``, and x itself where ``divisor`` is zero."""
    return x / torch.where(divisor == 0, 1.0, divisor)
