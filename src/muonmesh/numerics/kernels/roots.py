"""Triton kernels for deflation: signs, and functions of small Gram matrices in one launch. Importing it imports Triton.

A program takes one matrix from its memory to its result. It keeps the operands of products in the device's memory, and
reads there what its threads have written before a barrier: registers have room for a fifth of them. What the functions
are for, `muonmesh.numerics.device_deflation` says.
"""

# Triton gives the arguments of a kernel their types when it compiles, from what the kernel is called with.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from muonmesh.numerics.kernels.product_table import SMALL_ROWS
from muonmesh.numerics.kernels.small import numbers_of
from muonmesh.numerics.kernels.triton_launch import Launch

_ROWS = tl.constexpr(SMALL_ROWS)
_DEPTH = tl.constexpr(16)
"""Terms of the sums that are loaded at once, as in products of fp32: with more, threads would lack registers."""

_BLOCK = 2048
"""Number of signs that a program makes."""


@triton.jit
def _square(gram, memory, rows):
    """The addresses of a program's matrix and memory, the places in its memory, which are inside, and the identity."""
    row = tl.arange(0, _ROWS)
    inside = (row[:, None] < rows) & (row[None, :] < rows)
    identity = tl.where((row[:, None] == row[None, :]) & inside, 1.0, 0.0)
    gram += tl.program_id(0).to(tl.int64) * rows * rows + row[:, None] * rows + row[None, :]
    memory += tl.program_id(0).to(tl.int64) * 3 * _ROWS * _ROWS
    return gram, memory, row[:, None] * _ROWS, row[None, :], inside, identity


@triton.jit
def _product(a, b, down, across):
    """A B in fp32, of squares in memory that no thread writes meanwhile."""
    term = tl.arange(0, _DEPTH)
    sums = tl.zeros((_ROWS, _ROWS), dtype=tl.float32)
    for start in range(0, _ROWS, _DEPTH):
        x = tl.load(a + down + (start + term)[None, :])
        y = tl.load(b + (start + term)[:, None] * _ROWS + across)
        sums = tl.dot(x, y, sums, input_precision="ieee")  # or it would be multiplied as TF32
    return sums


@triton.jit
def _joint_factor(r, identity, memory, down, across, STEPS: tl.constexpr):
    """The product of steps 1 + lead·(R² + u·R), each of whose next R is growth·(1 + Z) R (1 + Z)."""
    COUNT: tl.constexpr = len(STEPS) // 3
    SIZE: tl.constexpr = _ROWS * _ROWS
    at = down + across
    r_memory, z_memory, other = memory, memory + SIZE, memory + 2 * SIZE
    product = identity
    for step in range(COUNT):
        u, lead, growth = numbers_of(step, STEPS)
        tl.store(r_memory + at, r)
        tl.store(other + at, product)
        tl.debug_barrier()
        z = (_product(r_memory, r_memory, down, across) + u * r) * lead
        tl.store(z_memory + at, z)
        tl.debug_barrier()
        product += _product(z_memory, other, down, across)
        half = _product(z_memory, r_memory, down, across) + r
        tl.debug_barrier()
        tl.store(other + at, half)
        tl.debug_barrier()
        r = (_product(z_memory, other, down, across) + half) * growth
        tl.debug_barrier()
    return product


@triton.jit
def whiten(gram, memory, rows, shift, slope, STEPS: tl.constexpr):
    """Replace a Gram matrix G by (G + shift·tr G)^-½ about."""
    gram, memory, down, across, inside, identity = _square(gram, memory, rows)
    r = tl.load(gram, mask=inside, other=0.0)
    trace = tl.sum(tl.reshape(r * identity, (_ROWS * _ROWS,)), 0)
    trace = tl.where(trace == 0, 1.0, trace)
    r = tl.div_rn(r, trace) + shift * identity
    product = _joint_factor(r, identity, memory, down, across, STEPS)
    tl.store(gram, product * tl.div_rn(slope, tl.sqrt_rn(trace)), mask=inside)


@triton.jit
def soften(
    gram,
    inverse,
    memory,
    rows,
    unit,
    slope,
    outside_share,
    inside_share,
    floor,
    share_left,
    narrowed,
    STEPS: tl.constexpr,
):
    """Replace a Gram matrix S² by (1 − f(S)/S)/S²."""
    gram, memory, down, across, inside, identity = _square(gram, memory, rows)
    g = tl.load(gram, mask=inside, other=0.0)
    captured = tl.sum(tl.reshape(g * identity, (_ROWS * _ROWS,)), 0)
    largest = tl.sqrt_rn(tl.sum(tl.reshape(g * g, (_ROWS * _ROWS,)), 0))
    largest = tl.where(largest == 0, 1.0, largest)
    norm = tl.div_rn(unit, tl.load(inverse + tl.program_id(0)))
    total = norm * norm
    outside = total - captured
    target = tl.maximum(outside * outside_share, captured * inside_share)
    target = tl.maximum(target, largest * floor)
    alike = tl.sqrt_rn(tl.div_rn(largest, total))
    higher = tl.maximum(target, total * narrowed * alike * tl.sqrt_rn(alike))
    target = tl.where(outside < total * share_left, higher, target)
    bound = tl.div_rn(largest, target) + 1.0
    r = tl.div_rn(g, bound * target) + tl.div_rn(identity, bound)
    root = _joint_factor(r, identity, memory, down, across, STEPS)
    tl.store(memory + down + across, root)
    tl.debug_barrier()
    square = _product(memory, memory, down, across) * tl.div_rn(slope * slope, bound)
    other = memory + _ROWS * _ROWS
    tl.store(other + down + across, square)
    tl.debug_barrier()
    high = tl.sqrt_rn(bound)
    less = _product(other, memory, down, across) * (slope * 0.5)
    tl.store(gram, (square * high - less) * tl.div_rn(1.0, high * target), mask=inside)


@triton.jit
def signs(out, numel, BLOCK: tl.constexpr):
    """Write 1 and −1 as if drawn at random, by the finalizer of MurmurHash3 (A. Appleby) of each element's number."""
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits = number.to(tl.uint32)
    bits ^= bits >> 16
    bits *= 0x85EBCA6B
    bits ^= bits >> 13
    bits *= 0xC2B2AE35
    bits ^= bits >> 16
    tl.store(out + number, (1.0 - 2.0 * (bits & 1).to(tl.float32)).to(out.dtype.element_ty), mask=number < numel)


def giving_signs(out: Tensor) -> Launch:
    """Return the launch of `signs`; see `Matmuls.signs`."""
    return Launch(signs, -(-out.numel() // _BLOCK), (out, out.numel(), _BLOCK), {})


def whitening(gram: Tensor, memory: Tensor, shift: float, slope: float, steps: Sequence[float]) -> Launch:
    """Return the launch of `whiten`; see `SmallSquares`."""
    arguments = (gram, memory, gram.shape[1], shift, slope, tuple(steps))
    return Launch(whiten, len(gram), arguments, {"num_warps": 8, "num_stages": 1})


def softening(
    gram: Tensor,
    inverse: Tensor,
    memory: Tensor,
    unit: float,
    slope: float,
    shares: Sequence[float],
    steps: Sequence[float],
) -> Launch:
    """Return the launch of `soften`; see `SmallSquares`."""
    arguments = (gram, inverse, memory, gram.shape[1], unit, slope, *shares, tuple(steps))
    return Launch(soften, len(gram), arguments, {"num_warps": 8, "num_stages": 1})
