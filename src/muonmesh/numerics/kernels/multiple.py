"""CPU: a product plus a multiple of its operand, computed by one of a few kernels that oneDNN compiles only once."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

_AN_OCTAVE = 16
"""Multiples kept apart within a factor of 2."""


class _Multiply(Protocol):
    def __call__(self, c: Tensor, a: Tensor, b: Tensor, out: Tensor, *, beta: float, alpha: float) -> object: ...


def _at_once(c: Tensor, a: Tensor, b: Tensor, out: Tensor, *, beta: float, alpha: float) -> object:
    return torch.addmm(c, a, b, beta=beta, alpha=alpha, out=out)


def add_multiple(
    x: Tensor, b: Tensor, a: float | Tensor, s: float | Tensor, out: Tensor, multiply: _Multiply = _at_once
) -> None:
    """Write s·(a·X + B X), one matrix.

    oneDNN, which multiplies bf16, compiles a kernel for every factor of X that it has not met before. That costs about
    a millisecond, a few hundred page faults and a place in its cache, and no two steps have the same factor. So X is
    multiplied by one of a few factors only, and the rest of `a` is added to the diagonal of B during the product. The
    factor is chosen so that this diagonal is as small as possible, because then its rounding matters least.

    Args:
        x: X, shape (rows, cols).
        b: B, shape (rows, rows); its diagonal is written and restored.
        a: A number that is the same at every step, or a tensor with one element.
        s: Likewise.
        out: Shape (rows, cols), contiguous; NaN if a or s is not finite.
        multiply: Writes beta·C + alpha·A B into ``out``.
    """
    fresh = isinstance(a, Tensor) or isinstance(s, Tensor)
    factor, scale = (number.item() if isinstance(number, Tensor) else number for number in (a, s))
    if not fresh or x.dtype != torch.bfloat16:
        multiply(x, b, x, out, beta=factor * scale, alpha=scale)
        return
    diagonal = b.diagonal()
    exact = diagonal.float()
    wanted = (factor + exact.mean().item()) * scale
    if not math.isfinite(wanted):  # with such a multiple one product takes oneDNN seconds
        out.fill_(math.nan)
        return
    multiple = _nearest(wanted)
    diagonal.copy_(exact + (factor - multiple / scale))
    multiply(x, b, x, out, beta=multiple, alpha=scale)
    diagonal.copy_(exact)


def _nearest(number: float) -> float:
    """Return one of `_AN_OCTAVE` numbers an octave, at most 2.2 % away, or 0 for 0."""
    if number == 0:
        return 0.0
    return math.copysign(2.0 ** (round(math.log2(abs(number)) * _AN_OCTAVE) / _AN_OCTAVE), number)
