"""CPU: a product plus a multiple of its operand, computed by one of a few kernels that oneDNN compiles only once."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

_AN_OCTAVE = 16
"""Number of different multiples within a factor of 2."""


def add_multiple(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    factor: float | Tensor,
    scale: float | Tensor,
    out: Tensor,
    multiply: Callable[..., object] = torch.addmm,
) -> None:
    """Write scale·(A B + factor·C), one matrix.

    oneDNN, which multiplies bf16, compiles a kernel for every factor of C that it has not met before. That costs about
    a millisecond, a few hundred page faults and a place in its cache, and no two steps have the same factor. So C,
    which is B then, is multiplied by one of a few factors only, and the rest is added to the diagonal of A during the
    product. The factor is chosen so that this diagonal is as small as possible, because then its rounding matters
    least.

    Args:
        a: A, shape (rows, rows); its diagonal is written and restored.
        b: B, shape (rows, cols).
        c: C, of that shape; B if one of the numbers is a tensor.
        factor: A number that is the same at every step, or a tensor with one element.
        scale: Likewise.
        out: Shape (rows, cols), contiguous; NaN if a number is not finite.
        multiply: Writes beta·C + alpha·A B into ``out``.
    """
    fresh = isinstance(factor, Tensor) or isinstance(scale, Tensor)
    factor, scale = (number.item() if isinstance(number, Tensor) else number for number in (factor, scale))
    if not fresh or b.dtype != torch.bfloat16:
        multiply(c, a, b, beta=factor * scale, alpha=scale, out=out)
        return
    diagonal = a.diagonal()
    exact = diagonal.float()
    exact_multiple = (factor + exact.mean().item()) * scale
    if not math.isfinite(exact_multiple):  # with such a multiple one product takes oneDNN seconds
        out.fill_(math.nan)
        return
    if scale == 0:
        out.zero_()
        return
    multiple = _nearest(exact_multiple)
    diagonal.copy_(exact + (factor - multiple / scale))
    multiply(b, a, b, beta=multiple, alpha=scale, out=out)
    diagonal.copy_(exact)


def _nearest(number: float) -> float:
    """Return one of `_AN_OCTAVE` numbers an octave, at most 2.2 % away, or 0 for 0."""
    if number == 0:
        return 0.0
    return math.copysign(2.0 ** (round(math.log2(abs(number)) * _AN_OCTAVE) / _AN_OCTAVE), number)
