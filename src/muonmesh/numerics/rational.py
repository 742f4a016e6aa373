"""The rational step of QDWH: x (a + b·x²) / (1 + c·x²) on the singular values, by one inverse.

Applied to X, the step is P X with P = b/c + (a − b/c) (1 + c·X Xᵀ)⁻¹. The matrix to invert is symmetric and positive
definite, and the ratio of its largest to its smallest eigenvalue is at most 1 + c. So fp32 and a Cholesky factorization
are exact enough (Nakatsukasa, Bai and Gygi 2010, doi 10.1137/090774999). X Xᵀ in bf16 would not be exact enough,
because c is 16 000.
"""

from __future__ import annotations

import torch
from torch import Tensor

from muonmesh.numerics.kernels import KernelName, select
from muonmesh.numerics.kernels.memory import scratch
from muonmesh.numerics.kernels.threads import run_on_one_thread
from muonmesh.numerics.normalize import sums
from muonmesh.numerics.precision import exact_fp32

_ABOVE = 1.005
"""Factor on the bound of the largest singular value, because X is rounded."""


def rational_step(x: Tensor, norm: Tensor, step: tuple[float, float, float], kernels: KernelName) -> Tensor:
    """Write P X over X, and return the divisor of X in addition to its norm, (batch, 1, 1).

    P is not rounded, because a dominating singular value appears in P only as a small difference of its entries. With P
    in bf16, one entry a million times larger than the others became 25 in place of about 1 at 384 rows; for a matrix of
    equal rows it was 13 (measured).

    On a CPU each matrix has one thread, because the rounding of sums depends on the number of threads, also in products
    and in LAPACK.

    Args:
        x: The matrices times their norms, shape (batch, rows, cols), rows ≤ cols, compute dtype.
        norm: Their Frobenius norms, shape (batch, 1, 1).
        step: (a, b, c).
        kernels: Implementation of the products.
    """
    if x.device.type != "cpu":
        return _step(x, norm, step, kernels)

    def each() -> Tensor:  # in fp32 a batch has other bits than a matrix alone
        return torch.cat(
            [_step(*one, step, kernels) for one in zip(torch.split(x, 1), torch.split(norm, 1), strict=True)]
        )

    return run_on_one_thread(each, device=x.device)


def _step(x: Tensor, norm: Tensor, step: tuple[float, float, float], kernels: KernelName) -> Tensor:
    a, b, c = step
    exact = torch.promote_types(x.dtype, torch.float32)
    count, rows, cols = x.shape
    with exact_fp32(exact):
        wide = x
        if x.dtype != exact or x.device.type == "cpu":
            wide = scratch("rational x", x.shape, dtype=exact, device=x.device).copy_(x)
        square = scratch("rational square", (count, rows, rows), dtype=exact, device=x.device)
        taken = kernels if kernels != "compiled" else "auto"  # compiled kernels are for bf16
        matmuls = select(taken, device=x.device, dtype=exact, rows=rows, cols=cols)
        gram = matmuls.multiply(wide, None, [], square, scale=norm.square().reciprocal())
        # ‖X Xᵀ‖² is the sum of the fourth powers of the singular values, so its fourth root bounds the largest.
        fourth = sums(sums(gram.square().flatten(0, 1)).view(-1, rows))[:, None, None]
        bound = torch.where(fourth == 0, 1.0, fourth.sqrt().sqrt() * _ABOVE)
        gram.mul_(c / bound.square()).diagonal(dim1=-2, dim2=-1).add_(1.0)
        lower, _ = torch.linalg.cholesky_ex(gram)
        inverse = torch.cholesky_inverse(lower).mul_(a - b / c).contiguous()
        moved = scratch("rational result", x.shape, dtype=exact, device=x.device)
        x.copy_(matmuls.multiply(inverse, wide, [(wide, b / c)], moved, symmetric=False))
    return bound
