"""Plain torch: one batched product per entry, on any device."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from muonmesh.numerics.kernels.table import Matmuls


def gram(x: Tensor, scale: Tensor, out: Tensor, *, together: bool) -> Tensor:
    """scale·X Xᵀ."""
    torch.bmm(x, x.mT, out=out)
    if together:
        return out.mul_(scale)
    for matrix, number in zip(out, scale.flatten(), strict=True):
        matrix.mul_(number)  # by a scalar, which a CPU does ten times faster than by a 1 × 1 matrix
    return out


def polynomial(a: Tensor, b: float, c: float, out: Tensor) -> Tensor:
    """b·A + c·A²."""
    return torch.baddbmm(a, a, a, beta=b, alpha=c, out=out)


def product(a: Tensor, b: Tensor, c: Tensor, factor: float, out: Tensor) -> Tensor:
    """factor·C + A B."""
    return torch.baddbmm(c, a, b, beta=factor, out=out)


def apply(x: Tensor, b: Tensor, a: float | Tensor, out: Tensor, *, together: bool) -> Tensor:
    """a·X + B X."""
    if not isinstance(a, Tensor):
        return torch.baddbmm(x, b, x, beta=a, out=out)
    if together:
        torch.mul(x, a, out=out)
        return torch.baddbmm(out, b, x, out=out)
    for x2, b2, number, target in zip(x, b, a.flatten(), out, strict=True):
        torch.addmm(x2, b2, x2, beta=number.item(), out=target)  # multiplied in before rounding
    return out


def dense(*, at_once: int, together: bool) -> Matmuls:
    """The table for batches of at most `at_once` matrices."""
    return Matmuls(
        gram=partial(gram, together=together),
        polynomial=polynomial,
        product=product,
        apply=partial(apply, together=together),
        at_once=at_once,
        together=together,
    )
