"""Kernels for the work of Newton–Schulz other than products on a device: norms, powers of two, a factor's diagonal.

Each kernel is an operator of torch's: `muonmesh::measure`, `norms`, `rescale` and `centre`. Sums are added up in one
order, which only the shape decides, so a matrix has the same bits in every run and in every batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from muonmesh.numerics.kernels.rows import MEASURED
from muonmesh.numerics.kernels.triton_launch import operator

_measure = operator("measure(Tensor x, Tensor(a!) exponents, Tensor(b!) squares)", "lines.measuring")
_norms = operator(
    "norms(Tensor exponents, Tensor squares, Tensor(a!) power, Tensor(b!) inverse, Tensor(c!) inverse_square)",
    "lines.finding_norms",
)
_rescale = operator("rescale(Tensor(a!) x, Tensor power)", "lines.rescaling")
_centre = operator("centre(Tensor diagonal, Tensor(a!) out, float constant, Tensor(b!) mean)", "lines.centring")


def normalize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Bring matrices near norm 1 if they are far from it, and return the inverses of their norms.

    A matrix whose largest entry is between 2⁻³² and 2³² stays as it is: its products neither overflow nor vanish in
    fp32 or bf16, and a power of two changes no bit of them. Any other is multiplied by the power of two that takes its
    largest entry near 1. So memory is read once and hardly ever written.

    Args:
        x: Shape (batch, rows, cols), contiguous, or of one matrix each row; bf16 or fp32; written.

    Returns:
        1/ν and 1/ν² of what x is then, fp32 (batch, 1, 1) each: 1 for a matrix of zeros, NaN where one has an entry
        that is not finite.
    """
    batch = len(x)
    parts = -(-x[0].numel() // MEASURED)
    exponents = torch.empty(batch, parts, dtype=torch.int32, device=x.device)
    squares = torch.empty(batch, parts, dtype=torch.float32, device=x.device)
    power, inverse, inverse_square = torch.empty(3, batch, 1, 1, dtype=torch.float32, device=x.device).unbind()
    _measure(x, exponents, squares)
    _norms(exponents, squares, power, inverse, inverse_square)
    _rescale(x, power)
    return inverse, inverse_square


def centre(diagonal: Tensor, factor: Tensor, constant: float) -> Tensor:
    """Give matrices a diagonal less its mean, rounded once, and return the mean plus a constant, fp32 (batch, 1, 1).

    Args:
        diagonal: Contiguous fp32 (batch, rows).
        factor: Shape (batch, rows, rows), contiguous; its diagonal is written.
        constant: The constant that is added to the mean.
    """
    mean = torch.empty(len(factor), 1, 1, dtype=torch.float32, device=factor.device)
    _centre(diagonal, factor.diagonal(dim1=-2, dim2=-1), constant, mean)
    return mean
