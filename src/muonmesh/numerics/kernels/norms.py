"""Triton kernels for norms and powers of two. Importing this file imports Triton."""

# Triton gives the arguments of a kernel their types when it compiles, from what the kernel is called with.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from muonmesh.numerics.kernels.rows import MEASURED
from muonmesh.numerics.kernels.triton_launch import Launch

_BLOCK = 2048
"""Number of elements that a program works on at a time."""
_NORM = 12
"""Matrices are brought to norms from 2 to the power of this up to twice that: fp16 then holds entries exactly that are
2⁻³⁰ of the norm, and no product of an iteration overflows."""


@triton.jit
def _power_of_two(exponent):
    """2 to an exponent of at most 127; 0 below the smallest normal number."""
    return (tl.maximum(exponent + 127, 0) << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["parts"])
def measure(x, exponents, squares, numel, parts, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Store the exponent e of the largest entry of a part of a matrix, and the sum of squares of the entries · 2⁻ᵉ."""
    program = tl.program_id(0)
    x += (program // parts).to(tl.int64) * numel
    first = (program % parts).to(tl.int64) * CHUNK
    lanes = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, CHUNK, BLOCK):
        positions = first + start + lanes
        values = tl.load(x + positions, mask=positions < numel, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(values))
    bits = tl.max(largest, 0).to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(bits, 1), 253) - 127  # so that its negative is one too; denormals count as 2⁻¹²⁶
    power = _power_of_two(-exponent)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, CHUNK, BLOCK):
        positions = first + start + lanes
        values = tl.load(x + positions, mask=positions < numel, other=0.0).to(tl.float32) * power
        sums += values * values
    tl.store(exponents + program, exponent)
    tl.store(squares + program, tl.sum(sums, 0))


@triton.jit(do_not_specialize=["parts"])
def norms(exponents, squares, power, inverse, inverse_square, parts, BLOCK: tl.constexpr, NORM: tl.constexpr):
    """Store the exponent of the power of two that scales a matrix, and 1/ν and 1/ν² of the scaled one, ν its norm."""
    matrix = tl.program_id(0)
    exponents += matrix * parts
    squares += matrix * parts
    lanes = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), -126, dtype=tl.int32)
    for start in range(0, parts, BLOCK):
        positions = start + lanes
        largest = tl.maximum(largest, tl.load(exponents + positions, mask=positions < parts, other=-126))
    exponent = tl.max(largest, 0)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, parts, BLOCK):
        positions = start + lanes
        smaller = tl.load(exponents + positions, mask=positions < parts, other=-126) - exponent
        sums += tl.load(squares + positions, mask=positions < parts, other=0.0) * _power_of_two(2 * smaller)
    total = tl.sum(sums, 0)
    root = tl.sqrt_rn(tl.where(total == 0, 1.0, total))
    down = NORM + 127 - (root.to(tl.int32, bitcast=True) >> 23)
    is_finite = total - total == 0
    # Not 1/∞, as if there had been no gradient.
    one_over = tl.where(is_finite, tl.div_rn(1.0, root * _power_of_two(tl.where(is_finite, down, 0))), float("nan"))
    tl.store(power + matrix, tl.where(is_finite & (total > 0), down - exponent, 0))
    tl.store(inverse + matrix, one_over)
    tl.store(inverse_square + matrix, one_over * one_over)


@triton.jit(do_not_specialize=["parts"])
def rescale(x, out, power, numel, parts, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Write a part of a matrix times a power of two, which may lie where the matrix is."""
    program = tl.program_id(0)
    matrix = program // parts
    exponent = tl.load(power + matrix)
    half = exponent // 2  # in two steps, since a power for denormals is no number of fp32
    first, second = _power_of_two(half), _power_of_two(exponent - half)
    x += matrix.to(tl.int64) * numel
    out += matrix.to(tl.int64) * numel
    for start in range(0, CHUNK, BLOCK):
        positions = (program % parts).to(tl.int64) * CHUNK + start + tl.arange(0, BLOCK)
        values = tl.load(x + positions, mask=positions < numel, other=0.0).to(tl.float32)
        tl.store(out + positions, (values * first * second).to(out.dtype.element_ty), mask=positions < numel)


def measuring(x: Tensor, exponents: Tensor, squares: Tensor) -> Launch:
    """Return the launch of `measure`."""
    assert x.is_contiguous()
    batch, parts = exponents.shape
    return Launch(measure, batch * parts, (x, exponents, squares, x[0].numel(), parts, MEASURED, _BLOCK), {})


def finding_norms(exponents: Tensor, squares: Tensor, power: Tensor, inverse: Tensor, inverse_square: Tensor) -> Launch:
    """Return the launch of `norms`."""
    batch, parts = exponents.shape
    arguments = (exponents, squares, power, inverse, inverse_square, parts, _BLOCK, _NORM)
    return Launch(norms, batch, arguments, {})


def rescaling(x: Tensor, out: Tensor, power: Tensor) -> Launch:
    """Return the launch of `rescale`."""
    numel = x[0].numel()
    parts = -(-numel // MEASURED)
    return Launch(rescale, len(x) * parts, (x, out, power, numel, parts, MEASURED, _BLOCK), {})
