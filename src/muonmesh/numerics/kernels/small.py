"""All steps of small matrices in one launch, in Triton; whoever imports this file imports Triton.

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

from muonmesh.numerics.kernels.portions import SMALL_ROWS
from muonmesh.numerics.kernels.triton_launch import Launch


@triton.jit
def orthogonalize(
    x,
    out,
    times,
    rows,
    cols,
    x_batch,
    x_row,
    x_col,
    out_batch,
    out_row,
    out_col,
    times_batch,
    STEPS: tl.constexpr,
    POLYNOMIALS: tl.constexpr,
    TIMES: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Write the orthogonal factor of one matrix, times a number: rounded to bf16 where products one by one round."""
    z = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    inside = (row[:, None] < rows) & (col[None, :] < cols)
    given = tl.load(x + z * x_batch + row[:, None] * x_row + col[None, :] * x_col, mask=inside, other=0.0)
    given = given.to(tl.float32)
    # The power of two that takes the largest entry near 1, of an exponent whose negative is one too.
    bits = tl.max(tl.max(tl.abs(given), 1), 0).to(tl.int32, bitcast=True) >> 23
    power = ((254 - tl.minimum(tl.maximum(bits, 1), 253)) << 23).to(tl.float32, bitcast=True)
    held = (given * power).to(tl.bfloat16)
    # ν² is the trace of X Xᵀ, so that the order of that sum is the product's, however the matrix lies in memory. As one
    # line of numbers, because Triton 3.7 fails for sm_100 where both dims of a product are summed.
    squares = tl.where(row[:, None] == row[None, :], tl.dot(held, tl.trans(held)), 0.0)
    total = tl.sum(tl.reshape(squares, (ROWS * ROWS,)), 0)
    inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.where(total == 0, 1.0, total)))
    inverse = tl.where(total - total == 0, inverse, float("nan"))  # not 1/∞, as if there had been no gradient
    last = inverse
    if TIMES:
        last = inverse * tl.load(times + z * times_batch).to(tl.float32)
    for step in range(STEPS):
        a = 0.0
        b = 0.0
        c = 0.0
        for number in tl.static_range(STEPS):  # selected, and not unrolled, which would take STEPS times the code
            a = tl.where(step == number, POLYNOMIALS[3 * number], a)
            b = tl.where(step == number, POLYNOMIALS[3 * number + 1], b)
            c = tl.where(step == number, POLYNOMIALS[3 * number + 2], c)
        gram = (tl.dot(held, tl.trans(held)) * (inverse * inverse)).to(tl.bfloat16)
        factor = (tl.dot(gram, gram) * c + b * gram.to(tl.float32)).to(tl.bfloat16)
        scale = tl.where(step == STEPS - 1, last, 1.0)
        held = ((tl.dot(factor, held) + a * held.to(tl.float32)) * scale).to(tl.bfloat16)
    out += z * out_batch
    tl.store(out + row[:, None] * out_row + col[None, :] * out_col, held.to(out.dtype.element_ty), mask=inside)


def orthogonalizing(x: Tensor, out: Tensor, polynomials: Sequence[float], times: Tensor | None) -> Launch:
    """Return the launch of `orthogonalize`; see `Matmuls.small`."""
    batch, rows, cols = x.shape
    strides = *x.stride(), *out.stride(), 0 if times is None else times.stride(0)
    sides = SMALL_ROWS, SMALL_ROWS if cols <= SMALL_ROWS else 2 * SMALL_ROWS
    told = len(polynomials) // 3, tuple(polynomials), times is not None
    return Launch(orthogonalize, batch, (x, out, times, rows, cols, *strides, *told, *sides), {"num_warps": 4})
