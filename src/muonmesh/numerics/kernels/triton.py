"""Triton: symmetric results by one triangle of tiles, everything summed in fp32 and rounded once, on GPUs.

The products are one operator of torch, `muonmesh::multiply`. So dispatch modes and fake tensors see one operation for
each launch, and Triton itself is imported only at the first product.
"""

from __future__ import annotations

import sys

from torch import Tensor

from muonmesh.numerics.kernels import beside
from muonmesh.numerics.kernels.table import SMALL_COLS, SMALL_ROWS, Matmuls, Number, Operand, Small, Terms
from muonmesh.numerics.kernels.toolchain import DTYPES
from muonmesh.numerics.kernels.triton_launch import operator

_operation = operator(
    "multiply(Tensor a, Tensor b, Tensor? c, float alpha, float factor, Tensor? factors, float scale, Tensor? scales, "
    "bool symmetric, Tensor(a!) out, Tensor? d, float delta, float identity)",
    "tiles.multiplying",
)


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
    """Multiply as `Matmuls.multiply` says, by one kernel; the factor of the second of two terms is no tensor."""
    given = [(c, number) for c, number in terms if isinstance(number, Tensor) or number]
    (c, factor), (d, delta) = (*given, (None, 0.0), (None, 0.0))[:2]
    factors, scales = (number if isinstance(number, Tensor) else None for number in (factor, scale))
    _operation(
        *(a, a.mT if b is None else b, c, alpha),
        *(factor if factors is None else 0.0, factors, scale if scales is None else 0.0, scales),
        *(symmetric, out, d, delta, identity),
    )
    return out


small = operator("orthogonalize(Tensor x, Tensor(a!) out, float[] polynomials)", "small.orthogonalizing")


def triton_products(*, at_once: int, rows: int = sys.maxsize, cols: int = sys.maxsize) -> Matmuls:
    """The table for batches of at most `at_once` matrices of a shape, rows ≤ cols."""
    return Matmuls(
        multiply=multiply,
        at_once=at_once,
        together=True,
        normalize=beside.normalize,
        small=Small(small, DTYPES) if rows <= SMALL_ROWS and cols <= SMALL_COLS else None,
    )
