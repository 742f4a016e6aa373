"""Kernels for the work of Newton–Schulz other than products on a device: norms and powers of two.

Each kernel is an operator of torch's: `muonmesh::measure`, `norms` and `rescale`. Sums are added up in one
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
_rescale = operator("rescale(Tensor x, Tensor(a!) out, Tensor power)", "lines.rescaling")


def normalize(x: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Do `Matmuls.normalize`.

    Args:
        x: Shape (batch, rows, cols), contiguous, or of one matrix each row; bf16, fp16 or fp32.
        out: Contiguous; it may lie where a contiguous x of as many bytes does.
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
