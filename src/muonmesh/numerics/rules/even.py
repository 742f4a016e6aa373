"""Even rows or columns, for rules that scale those of a whole matrix to one norm."""

from __future__ import annotations

import torch
from torch import Tensor


def unit(x: Tensor, dim: int) -> Tensor:
    """Return x with norm 1 along a dim; what is zero stays zero, and what is not finite becomes NaN.

    Args:
        x: Any shape, fp32 or wider.
        dim: -1 for rows, -2 for columns.
    """
    largest, rest = _norm(x, dim)
    return over(over(x, largest), rest)


def norm(x: Tensor, dim: int) -> Tensor:
    """Return norms along a dim, which is kept, of what is not larger than 1.

    Args:
        x: Any shape, fp32 or wider.
        dim: -1 for rows, -2 for columns.
    """
    largest, rest = _norm(x, dim)
    return largest * rest


def _norm(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the norms along a dim as products of the largest elements and of the norms without these.

    So no square vanishes or overflows and there is no epsilon: rows of 1e-30 count as much as others, and multiplying x
    by a power of two changes no bit.
    """
    largest = x.abs().amax(dim, keepdim=True)
    return largest, over(x, largest).square_().sum(dim, keepdim=True).sqrt_()


def frobenius(x: Tensor) -> Tensor:
    """Return Frobenius norms of matrices that are neither tiny nor huge, (..., 1, 1).

    By rows first: one fp32 sum of ten million terms would stop growing.
    """
    return x.square().sum(-1, keepdim=True).sum(-2, keepdim=True).sqrt_()


def over(x: Tensor, divisor: Tensor) -> Tensor:
    """Return x divided by numbers, and x itself where they are zero."""
    return x / torch.where(divisor == 0, 1.0, divisor)
