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

from muonmesh.numerics.kernels.product_table import (
    SMALL_COLS,
    SMALL_ROWS,
    TORCH_FROM,
    Matmuls,
    Number,
    Operand,
    Small,
    SquareFunctions,
    Terms,
)
from muonmesh.numerics.kernels.rows import MEASURED
from muonmesh.numerics.kernels.toolchain import DTYPES
from muonmesh.numerics.kernels.triton_launch import operator

_operation = operator(
    "multiply(Tensor a, Tensor b, Tensor? c, float alpha, float factor, Tensor? factors, float scale, Tensor? scales, "
    "bool symmetric, Tensor(a!) out, Tensor? d, float delta, float identity)",
    "tiles.multiplying",
)


_EIGHT = 8
"""Elements of fp16 in 16 bytes, to which cuBLAS's fastest kernels are bound."""


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
    """Multiply as `Matmuls.multiply` says; the factor of the second of two terms is no tensor.

    Torch is given one matrix at a time, so that the bits of a matrix follow from its shape alone.
    """
    more = symmetric or terms or identity or a.dtype != out.dtype
    if b is None or more or isinstance(scale, Tensor) or not _is_for_torch(out):
        return by_triton(a, b, terms, out, alpha, scale, symmetric, identity)
    for factor, matrix, result in zip(a, b, out, strict=True):
        torch.addmm(result, factor, matrix, beta=0, alpha=alpha * scale, out=result)
    return out


def _is_for_torch(out: Tensor) -> bool:
    _, *sides = out.shape
    return min(sides) >= TORCH_FROM.get(out.dtype, sys.maxsize) and not any(side % _EIGHT for side in sides)


def by_triton(
    a: Tensor,
    b: Operand,
    terms: Terms,
    out: Tensor,
    alpha: float = 1.0,
    scale: Number = 1.0,
    symmetric: bool = True,
    identity: float = 0.0,
) -> Tensor:
    """Multiply as `multiply` says, by one kernel."""
    summands = [(c, number) for c, number in terms if isinstance(number, Tensor) or number]
    (c, factor), (d, delta) = (*summands, (None, 0.0), (None, 0.0))[:2]
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
    power, inverse, inverse_square = _normed(x)
    _rescale(x, out, power)
    return inverse, inverse_square


def norm(x: Tensor) -> Tensor:
    """Do `Matmuls.norm`, for matrices as in `normalize`."""
    power, inverse, _ = _normed(x)
    return torch.ldexp(inverse.reciprocal(), -power.view_as(inverse))


def _normed(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the exponents of the powers of two that scale matrices, and 1/ν and 1/ν² of the scaled ones."""
    batch = len(x)
    parts = -(-x[0].numel() // MEASURED)
    exponents = torch.empty(batch, parts, dtype=torch.int32, device=x.device)
    power = torch.empty(batch, dtype=torch.int32, device=x.device)
    squares = torch.empty(batch, parts, dtype=torch.float32, device=x.device)
    inverse, inverse_square = torch.empty(2, batch, 1, 1, dtype=torch.float32, device=x.device).unbind()
    _measure(x, exponents, squares)
    _norms(exponents, squares, power, inverse, inverse_square)
    return power, inverse, inverse_square


small = operator("orthogonalize(Tensor x, Tensor(a!) out, float[] polynomials)", "small.orthogonalizing")


_signs = operator("signs(Tensor(a!) out)", "roots.giving_signs")
_whiten = operator(
    "whiten(Tensor(a!) gram, Tensor(b!) memory, float shift, float slope, float[] steps)", "roots.whitening"
)
_soften = operator(
    "soften(Tensor(a!) gram, Tensor inverse, Tensor(b!) memory, float unit, float slope, float[] shares, "
    "float[] steps)",
    "roots.softening",
)
_OF_SQUARES = SquareFunctions(_whiten, _soften)


def triton_products(*, batch_limit: int, rows: int = sys.maxsize, cols: int = sys.maxsize) -> Matmuls:
    """The table for batches of at most `batch_limit` matrices of a shape, rows ≤ cols."""
    return Matmuls(
        multiply=multiply,
        batch_limit=batch_limit,
        by_torch=rows >= min(TORCH_FROM.values(), default=sys.maxsize),
        normalize=normalize,
        norm=norm,
        signs=_signs,
        small=Small(small, DTYPES) if rows <= SMALL_ROWS and cols <= SMALL_COLS else None,
        # AMD's compiler does not make a barrier wait for what is stored to the device's memory.
        of_squares=None if torch.version.hip else _OF_SQUARES,
    )
