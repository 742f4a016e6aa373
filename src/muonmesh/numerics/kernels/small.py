"""A Triton kernel for all steps of small matrices in one launch. Importing this file imports Triton.

A program takes one matrix from its memory to its result, and holds it in registers and shared memory meanwhile. Nothing
that one thread writes to the device's memory is read there by another.
"""

# Triton gives the arguments of a kernel their types when it compiles, from what the kernel is called with.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from muonmesh.numerics.kernels.product_table import SMALL_ROWS
from muonmesh.numerics.kernels.triton_launch import Launch

_ROWS = tl.constexpr(SMALL_ROWS)


@triton.jit
def numbers_of(step, NUMBERS: tl.constexpr):
    """The three numbers of a step: selected, since an unrolled loop over steps would take as many times the code."""
    COUNT: tl.constexpr = len(NUMBERS) // 3
    a = 0.0
    b = 0.0
    c = 0.0
    for number in tl.static_range(COUNT):
        a = tl.where(step == number, NUMBERS[3 * number], a)
        b = tl.where(step == number, NUMBERS[3 * number + 1], b)
        c = tl.where(step == number, NUMBERS[3 * number + 2], c)
    return a, b, c


@triton.jit
def orthogonalize(x, out, rows, cols, POLYNOMIALS: tl.constexpr, TALL: tl.constexpr, COLS: tl.constexpr):
    """Write the orthogonal factor of one matrix, rounded to bf16 between products."""
    STEPS: tl.constexpr = len(POLYNOMIALS) // 3
    z = tl.program_id(0).to(tl.int64)
    x += z * rows * cols
    out += z * rows * cols
    row = tl.arange(0, _ROWS)
    col = tl.arange(0, COLS)
    inside = (row[:, None] < rows) & (col[None, :] < cols)
    places = row[:, None] + col[None, :] * rows if TALL else row[:, None] * cols + col[None, :]
    entries = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    # The power of two that takes the largest entry near 1, of an exponent whose negative is one too.
    bits = tl.max(tl.max(tl.abs(entries), 1), 0).to(tl.int32, bitcast=True) >> 23
    power = ((254 - tl.minimum(tl.maximum(bits, 1), 253)) << 23).to(tl.float32, bitcast=True)
    iterate = (entries * power).to(tl.bfloat16)
    # ν² is the trace of X Xᵀ, so that the order of that sum is the product's, however the matrix lies in memory. As one
    # line of numbers, because Triton 3.7 fails for sm_100 where both dims of a product are summed.
    squares = tl.where(row[:, None] == row[None, :], tl.dot(iterate, tl.trans(iterate)), 0.0)
    total = tl.sum(tl.reshape(squares, (_ROWS * _ROWS,)), 0)
    # 1/∞ is 0, and the ∞ in X Xᵀ times 0 is NaN, which is everywhere after a step.
    inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.where(total == 0, 1.0, total)))
    for step in range(STEPS):
        a, b, c = numbers_of(step, POLYNOMIALS)
        gram = (tl.dot(iterate, tl.trans(iterate)) * (inverse * inverse)).to(tl.bfloat16)
        factor = (tl.dot(gram, gram) * c + b * gram.to(tl.float32)).to(tl.bfloat16)
        scale = tl.where(step == STEPS - 1, inverse, 1.0)
        iterate = ((tl.dot(factor, iterate) + a * iterate.to(tl.float32)) * scale).to(tl.bfloat16)
    tl.store(out + places, iterate.to(out.dtype.element_ty), mask=inside)


def orthogonalizing(x: Tensor, out: Tensor, polynomials: Sequence[float]) -> Launch:
    """Return the launch of `orthogonalize`; see `Matmuls.small`."""
    batch, (rows, cols), tall = len(x), sorted(x.shape[1:]), x.shape[1] > x.shape[2]
    width = SMALL_ROWS if cols <= SMALL_ROWS else 2 * SMALL_ROWS
    arguments = (x.contiguous(), out, rows, cols, tuple(polynomials), tall, width)
    return Launch(orthogonalize, batch, arguments, {"num_warps": 4})
