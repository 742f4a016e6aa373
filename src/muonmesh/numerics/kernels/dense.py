"""CPU: one batched product per entry."""

from __future__ import annotations

import torch
from torch import Tensor

from muonmesh.numerics.kernels.memory import scratch
from muonmesh.numerics.kernels.multiple import add_multiple
from muonmesh.numerics.kernels.table import Matmuls


def gram(x: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """scale·X Xᵀ."""
    return scaled(torch.bmm(x, x.mT, out=out), scale)


def polynomial(a: Tensor, b: float, c: float, out: Tensor) -> Tensor:
    """b·A + c·A²."""
    return torch.baddbmm(a, a, a, beta=b, alpha=c, out=out)


def product(a: Tensor, b: Tensor, c: Tensor, factor: float, out: Tensor) -> Tensor:
    """factor·C + A B."""
    return torch.baddbmm(c, a, b, beta=factor, out=out)


def apply(x: Tensor, b: Tensor, a: float | Tensor, s: float | Tensor, out: Tensor) -> Tensor:
    """s·(a·X + B X)."""
    if isinstance(a, Tensor):
        for x2, b2, number, target in zip(x, b, a.flatten(), out, strict=True):
            add_multiple(x2, b2, number, 1.0, target)  # multiplied in before rounding
    else:
        torch.baddbmm(x, b, x, beta=a, out=out)
    return scaled(out, s)


def scaled(out: Tensor, s: float | Tensor) -> Tensor:
    """Multiply in place by a number, or by one number a matrix."""
    if not isinstance(s, Tensor):
        return out if s == 1 else out.mul_(s)
    if len(out) == 1:
        out.mul_(s.squeeze())  # by a scalar, which a CPU does ten times faster than by a 1 × 1 matrix
    elif out.device.type != "cpu" or torch.promote_types(out.dtype, s.dtype) == out.dtype:
        out.mul_(s)
    else:  # torch would take fresh memory for both in the wider dtype, and each page of it would be a fault
        wide = scratch("scaled", out.shape, dtype=s.dtype, device=out.device)
        out.copy_(wide.copy_(out).mul_(s))
    return out


def dense(*, at_once: int) -> Matmuls:
    """The table for batches of at most `at_once` matrices."""
    together = at_once > 1
    return Matmuls(
        gram=gram, polynomial=polynomial, product=product, full=product, apply=apply, at_once=at_once, together=together
    )
