"""Triton: symmetric results by one triangle of tiles, everything summed in fp32 and rounded once, on GPUs.

The products are one operator of torch, `muonmesh::multiply`; so is each kernel for norms and powers of two, `measure`,
`norms` and `rescale`. So dispatch modes and fake tensors see one operation for each launch, and Triton itself is
imported only at the first. Sums are added up in one order, which only the shape decides, so a matrix has the same bits
in every run and in every batch.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from muonmesh.numerics.kernels.product_table import SMALL_COLS, SMALL_ROWS, Matmuls, Number, Operand, Small, Terms
from muonmesh.numerics.kernels.rows import MEASURED
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


_measure = operator("measure(Tensor x, Tensor(a!) exponents, Tensor(b!) squares)", "norms.measuring")
_norms = operator(
    "norms(Tensor exponents, Tensor squares, Tensor(a!) power, Tensor(b!) inverse, Tensor(c!) inverse_square)",
    "norms.finding_norms",
)
_rescale = operator("rescale(Tensor x, Tensor(a!) out, Tensor power)", "norms.rescaling")


def normalize(x: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Do `Matmuls.normalize`.

    Args:
        x: Shape (batch, rows, cols), contiguous; bf16, fp16 or fp32.
        out: Contiguous; it may lie where x does, if it has as many bytes.
    """
    batch = len(x)
    parts = -(-x[0].numel() // MEASURED)
    exponents = torch.empty(batch, parts, dtype=torch.int32, device=x.device)
    power = torch.empty(batch, dtype=torch.int32, device=x.device)
    squares = torch.empty(batch, parts, dtype=torch.float32, device=x.device)
    inverse, inverse_square = torch.empty(2, batch, 1, 1, dtype=torch.float32, device=x.device).unbind()
    _measure(x, exponents, squares)
    _norms(exponents, squares, power, inverse, inverse_square)
    _rescale(x, out, power)
    return inverse, inverse_square


small = operator("orthogonalize(Tensor x, Tensor(a!) out, float[] polynomials)", "small.orthogonalizing")


def triton_products(*, at_once: int, rows: int = sys.maxsize, cols: int = sys.maxsize) -> Matmuls:
    """The table for batches of at most `at_once` matrices of a shape, rows ≤ cols."""
    return Matmuls(
        multiply=multiply,
        at_once=at_once,
        normalize=normalize,
        small=Small(small, DTYPES) if rows <= SMALL_ROWS and cols <= SMALL_COLS else None,
    )
