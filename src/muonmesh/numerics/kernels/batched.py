"""Plain torch on a device: one batched product per entry, added up in fp32 and rounded once.

cuBLAS adds β·C in fp32 before it rounds, but only for a β that the CPU knows. It never knows numbers that depend on the
data: a after a pair of Gram steps, and s = 1/ν. So a is divided out of B, and a·s multiplies the rounded result, which
costs a rounding of B and one of the result, where nothing amplifies them. Gram matrices are left in fp32 and multiplied
there: rounded to bf16 before, they would cost up to 1.7 times the error (docs/internals/kernels.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from muonmesh.numerics.kernels.table import Matmuls, Number, Operand, Terms


def multiply(
    a: Tensor, b: Operand, terms: Terms, out: Tensor, alpha: float = 1.0, scale: Number = 1.0, symmetric: bool = True
) -> Tensor:
    """Do `Matmuls.multiply`; both triangles of a symmetric result are computed."""
    if b is None:
        return torch.mul(_exact_product(a, a.mT), scale, out=out)
    ((c, factor),) = terms
    if isinstance(factor, Tensor):
        return multiply((a / factor).to(a.dtype), b, ((c, 1.0),), out, alpha, factor * scale)
    if isinstance(scale, Tensor):
        return torch.baddbmm(c, a, b, beta=factor, alpha=alpha, out=out).mul_(scale)
    return torch.baddbmm(c, a, b, beta=factor * scale, alpha=alpha * scale, out=out)


def _exact_product(a: Tensor, b: Tensor) -> Tensor:
    """A B in fp32 or wider."""
    if a.dtype in (torch.float32, torch.float64):
        return torch.bmm(a, b)
    if a.device.type in ("cuda", "meta"):
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())  # the same but for the order of the sums


def torch_products(*, at_once: int) -> Matmuls:
    """The table for batches of at most `at_once` matrices."""
    return Matmuls(multiply=multiply, at_once=at_once, together=True, sparing=True)
