"""Plain torch on a device: one batched product per entry, summed and multiplied by numbers in fp32, rounded once.

cuBLAS adds β·C in fp32 before it rounds, but only for a β that the host knows. What follows from the data, a after a
pair of Gram steps and s = 1/ν, never is: such a product is left in fp32, multiplied and added there. Rounded to bf16
before, it would cost up to 1.7 times the error (docs/internals/kernels.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from muonmesh.numerics.kernels.table import Matmuls


def gram(x: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """scale·X Xᵀ."""
    return torch.mul(_exact_product(x, x.mT), scale, out=out)


def polynomial(a: Tensor, b: float, c: float, out: Tensor) -> Tensor:
    """b·A + c·A²."""
    return torch.baddbmm(a, a, a, beta=b, alpha=c, out=out)


def product(a: Tensor, b: Tensor, c: Tensor, factor: float, out: Tensor) -> Tensor:
    """factor·C + A B."""
    return torch.baddbmm(c, a, b, beta=factor, out=out)


def apply(x: Tensor, b: Tensor, a: float | Tensor, s: float | Tensor, out: Tensor) -> Tensor:
    """s·(a·X + B X)."""
    if not isinstance(a, Tensor) and not isinstance(s, Tensor):
        return torch.baddbmm(x, b, x, beta=a * s, alpha=s, out=out)
    exact = _exact_product(b, x)
    scaled = isinstance(s, Tensor) or s != 1
    target = exact if scaled else out
    if isinstance(a, Tensor):
        torch.addcmul(exact, x, a, out=target)
    else:
        torch.add(exact, x, alpha=a, out=target)
    return torch.mul(exact, s, out=out) if scaled else out


def _exact_product(a: Tensor, b: Tensor) -> Tensor:
    """A B in fp32 or wider."""
    if a.dtype in (torch.float32, torch.float64):
        return torch.bmm(a, b)
    if a.device.type in ("cuda", "meta"):
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())  # the same but for the order of the sums


def torch_products(*, at_once: int) -> Matmuls:
    """The table for batches of at most `at_once` matrices."""
    return Matmuls(
        gram=gram, polynomial=polynomial, product=product, full=product, apply=apply, at_once=at_once, together=True
    )
