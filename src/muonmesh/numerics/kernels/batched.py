"""Plain torch on a device: one batched product per entry, added up in fp32 and rounded once.

cuBLAS takes only numbers that the CPU knows, and never 1/ν. Squares are left in fp32 and multiplied there. X is
multiplied by it in its own memory, after it was rounded to fp16, whose three more bits do not show in bf16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from muonmesh.numerics.kernels.product_table import Matmuls, Number, Operand, Terms


def multiply(
    a: Tensor,
    b: Operand,
    terms: Terms,
    out: Tensor,
    alpha: float = 1.0,
    scale: Number = 1.0,
    symmetric: bool = True,
    identity: float = 0.0,
) -> Tensor:
    """Do `Matmuls.multiply`; both triangles of a symmetric result are computed."""
    same_size = out.dtype.itemsize == a.dtype.itemsize
    if same_size and isinstance(scale, Tensor) and b is not None and not symmetric:
        product = multiply(a, b, terms, out.view(a.dtype), alpha, symmetric=False)
        return torch.mul(product, scale, out=out)
    if not same_size or isinstance(scale, Tensor) or any(isinstance(factor, Tensor) for _, factor in terms):
        exact = _exact_product(a, a.mT if b is None else b).mul_(alpha)
        for c, factor in terms:
            exact.add_(c * factor)
        exact.diagonal(dim1=-2, dim2=-1).add_(identity)
        return torch.mul(exact, scale, out=out)
    (c, factor), *others = terms or ((out, 0.0),)  # with 0 it is not read
    torch.baddbmm(c, a, a.mT if b is None else b, beta=float(factor) * scale, alpha=alpha * scale, out=out)
    for d, delta in others:
        out.add_(d, alpha=float(delta) * scale)
    if identity:
        out.diagonal(dim1=-2, dim2=-1).add_(identity * scale)
    return out


def _exact_product(a: Tensor, b: Tensor) -> Tensor:
    """A B in fp32 or wider."""
    if a.dtype in (torch.float32, torch.float64):
        return torch.bmm(a, b)
    if a.device.type in ("cuda", "meta"):
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())  # the same but for the order of the sums


def torch_products(*, batch_limit: int) -> Matmuls:
    """The table for batches of at most `batch_limit` matrices."""
    return Matmuls(multiply=multiply, batch_limit=batch_limit)
