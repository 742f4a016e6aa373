"""Triton kernels for elementwise work on many pieces in one launch. Importing this file imports Triton.

Each program reads from a table which piece is its own and where its elements lie. The table holds `WIDTH` numbers a
piece, in this order: the numbers of three addresses in ``bases``, the piece's entry in vectors, its first program, its
kind, where it starts in its storage and in its buffer, three lengths, and three strides in each of the two.
"""

# Triton gives the arguments of a kernel their types when it compiles, from what the kernel is called with.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from muonmesh.numerics.kernels import rows
from muonmesh.numerics.kernels.triton_launch import Launch, are_aligned

TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}

_WIDTH = tl.constexpr(rows.WIDTH)
_ENTRY, _FIRST_PROGRAM, _KIND = tl.constexpr(rows.ENTRY), tl.constexpr(rows.FIRST_PROGRAM), tl.constexpr(rows.KIND)
_STARTS, _LENGTHS, _STRIDES = tl.constexpr(rows.STARTS), tl.constexpr(rows.LENGTHS), tl.constexpr(rows.STRIDES)
_EVEN, _TRANSPOSED = tl.constexpr(rows.EVEN), tl.constexpr(rows.TRANSPOSED)
_ROWS, _COLS, _STRIDED = tl.constexpr(rows.ROWS), tl.constexpr(rows.COLS), tl.constexpr(rows.STRIDED_ROWS)


@triton.jit
def _row_of(table, pieces, BLOCKS: tl.constexpr):
    """The row of the last piece whose first program is not after this one, by halving, and this one's first block."""
    program = tl.program_id(0)
    low = 0
    high = pieces
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(table + middle * _WIDTH + _FIRST_PROGRAM) <= program
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    row = table + low * _WIDTH
    return row, (program - tl.load(row + _FIRST_PROGRAM)) * BLOCKS


@triton.jit
def _end(row, first, BLOCKS: tl.constexpr, HIGH: tl.constexpr):
    """The end of this program's blocks of a piece."""
    down, across = tl.load(row + _LENGTHS + 1), tl.load(row + _LENGTHS + 2)
    blocks = tl.load(row + _LENGTHS) * tl.cdiv(down, HIGH) * tl.cdiv(across, _COLS)
    return tl.minimum(first + BLOCKS, blocks)


@triton.jit
def _block(bases, row, column, SIDE, TYPE, block, HIGH, TURNED):
    """Where the elements of a block of a piece lie in one of its tensors, and which of them exist.

    SIDE is 0 for a storage and 1 for a buffer. A block of `_ROWS` is one of an even or transposed piece, of which the
    compiler is told what is aligned. With TURNED its columns are contiguous, and come first.
    """
    down, across = tl.load(row + _LENGTHS + 1), tl.load(row + _LENGTHS + 2)
    wide = tl.cdiv(across, _COLS)
    in_plane = tl.cdiv(down, HIGH) * wide
    first_row, first_col = block % in_plane // wide * HIGH, block % wide * _COLS
    strides = row + _STRIDES + 3 * SIDE
    plane, next_row, next_col = tl.load(strides), tl.load(strides + 1), tl.load(strides + 2)
    base = tl.load(bases + tl.load(row + column)).to(tl.pointer_type(TYPE))
    start = tl.load(row + _STARTS + SIDE)
    if HIGH == _ROWS:
        base, start, plane = tl.multiple_of(base, 16), tl.multiple_of(start, 16), tl.multiple_of(plane, 16)
        first_row, first_col = tl.multiple_of(first_row, 16), tl.multiple_of(first_col, 16)
        across = tl.multiple_of(across, 16)
        if TURNED:
            down = tl.multiple_of(down, 16)
            next_row, next_col = 1, tl.multiple_of(next_col, 16)
        else:
            next_row, next_col = tl.multiple_of(next_row, 16), 1
    piece_start = base + start + block // in_plane * plane
    i, j = first_row + tl.arange(0, HIGH), first_col + tl.arange(0, _COLS)
    if TURNED:
        at = piece_start + j[:, None] * next_col + i[None, :] * next_row
        inside = (j[:, None] < across) & (i[None, :] < down)
    else:
        at = piece_start + i[:, None] * next_row + j[None, :] * next_col
        inside = (i[:, None] < down) & (j[None, :] < across)
    return at, inside


@triton.jit
def _nonzero_blocks(bases, row, first, entry, BLOCKS, G, HIGH):
    """Store 1 if a block of one program has a non-zero element, unless another program has stored it already."""
    block, end = first, _end(row, first, BLOCKS, HIGH)
    while block < end:
        at, inside = _block(bases, row, 0, 0, G, block, HIGH, False)
        values = tl.load(at, mask=inside, other=0.0)
        block += 1
        if tl.max(tl.max((values != 0).to(tl.int32), 1), 0) > 0:
            tl.store(entry, 1)  # other programs write the same value
            block = end
        elif tl.load(entry, volatile=True) != 0:
            block = end


@triton.jit(do_not_specialize=["pieces"])
def nonzero(table, bases, pieces, flags, BLOCKS: tl.constexpr, G: tl.constexpr):
    """Store 1 if some blocks of one piece have an element that is not zero."""
    row, first = _row_of(table, pieces, BLOCKS)
    entry = flags + tl.load(row + _ENTRY)
    if tl.load(row + _KIND) == _EVEN:
        _nonzero_blocks(bases, row, first, entry, BLOCKS, G, _ROWS)
    else:
        _nonzero_blocks(bases, row, first, entry, BLOCKS, G, _STRIDED)


@triton.jit
def _lerp(start, end, weight):
    """The formula of torch.lerp, exact at both ends; the product is not rounded."""
    near = tl.abs(weight) < 0.5
    factor = tl.where(near, weight, weight - 1.0)
    return tl.fma(tl.zeros_like(start) + factor, end - start, tl.where(near, start, end))


@triton.jit
def _fold_blocks(bases, row, first, weight, momentum, on, BLOCKS, DIRECTS, NESTEROV, TINY, G, M, D, HIGH, TURNED):
    """Fold the blocks of one program of a piece, in the momentum's dtype; with TURNED its direction lies transposed."""
    for block in range(first, _end(row, first, BLOCKS, HIGH)):
        g_at, inside = _block(bases, row, 0, 0, G, block, HIGH, False)
        m_at, _ = _block(bases, row, 1, 0, M, block, HIGH, False)
        gradient = tl.load(g_at, mask=inside, other=0.0).to(M).to(tl.float32)
        old = tl.load(m_at, mask=inside, other=0.0).to(tl.float32)
        new = _lerp(old, gradient, weight).to(M).to(tl.float32)
        new = tl.where(tl.abs(new) < TINY, 0.0, new)
        new = tl.where(on, new, old)
        tl.store(m_at, new.to(M), mask=(inside & on) != 0)  # a mask in the interpreter of Triton 3.9 too
        if DIRECTS:
            direction = new
            if NESTEROV:  # without the gradient where the piece is not active: it may be anything there
                direction = tl.where(on, _lerp(gradient, new, momentum), new)
            direction = direction.to(M).to(D)
            d_at, in_buffer = _block(bases, row, 2, 1, D, block, HIGH, TURNED)
            tl.store(d_at, tl.trans(direction) if TURNED else direction, mask=in_buffer)


@triton.jit(do_not_specialize=["pieces"])
def fold(
    table,
    bases,
    pieces,
    active,
    weight,
    momentum,
    BLOCKS: tl.constexpr,
    DIRECTS: tl.constexpr,
    NESTEROV: tl.constexpr,
    TINY: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
):
    """Momentum ← lerp(momentum, gradient, weight), direction ← lerp(gradient, momentum, μ): blocks of one piece."""
    row, first = _row_of(table, pieces, BLOCKS)
    kind = tl.load(row + _KIND)
    on = tl.load(active + tl.load(row + _ENTRY)) != 0
    if kind == _EVEN:
        _fold_blocks(bases, row, first, weight, momentum, on, BLOCKS, DIRECTS, NESTEROV, TINY, G, M, D, _ROWS, False)
    elif kind == _TRANSPOSED:
        _fold_blocks(bases, row, first, weight, momentum, on, BLOCKS, DIRECTS, NESTEROV, TINY, G, M, D, _ROWS, True)
    else:
        _fold_blocks(bases, row, first, weight, momentum, on, BLOCKS, DIRECTS, NESTEROV, TINY, G, M, D, _STRIDED, False)


@triton.jit
def _followed(p, w):
    """A master, or its weight where this is not the rounded master: then other code has written it."""
    rounded = p.to(w.dtype).to(tl.float32)
    return tl.where(rounded == w.to(tl.float32), p, w.to(p.dtype))


@triton.jit
def _apply_blocks(bases, row, first, keep, size, BLOCKS, HAS_MASTERS, W, P, U, HIGH, TURNED):
    """Step the blocks of one program of a piece; with TURNED its update lies transposed.

    Each product and the difference are rounded by themselves, as torch does.
    """
    for block in range(first, _end(row, first, BLOCKS, HIGH)):
        w_at, inside = _block(bases, row, 0, 0, W, block, HIGH, False)
        p_at, _ = _block(bases, row, 1, 0, P, block, HIGH, False)
        u_at, in_buffer = _block(bases, row, 2, 1, U, block, HIGH, TURNED)
        u = tl.load(u_at, mask=in_buffer, other=0.0)
        weight = tl.load(w_at, mask=inside, other=0.0)
        old = _followed(tl.load(p_at, mask=inside, other=0.0), weight) if HAS_MASTERS else weight
        new = old.to(tl.float32) * keep - (tl.trans(u) if TURNED else u).to(tl.float32) * size
        if HAS_MASTERS:
            tl.store(p_at, new.to(P), mask=inside)
        tl.store(w_at, (new.to(P) if HAS_MASTERS else new).to(W), mask=inside)


@triton.jit(do_not_specialize=["pieces"])
def apply(
    table,
    bases,
    pieces,
    active,
    keeps,
    sizes,
    BLOCKS: tl.constexpr,
    HAS_MASTERS: tl.constexpr,
    W: tl.constexpr,
    P: tl.constexpr,
    U: tl.constexpr,
):
    """Weight ← weight·keep − size·update: blocks of one piece, computed on the master if there is one."""
    row, first = _row_of(table, pieces, BLOCKS)
    kind = tl.load(row + _KIND)
    entry = tl.load(row + _ENTRY)
    keep = tl.load(keeps + entry)
    size = tl.load(sizes + entry)
    if tl.load(active + entry) != 0:
        if kind == _EVEN:
            _apply_blocks(bases, row, first, keep, size, BLOCKS, HAS_MASTERS, W, P, U, _ROWS, False)
        elif kind == _TRANSPOSED:
            _apply_blocks(bases, row, first, keep, size, BLOCKS, HAS_MASTERS, W, P, U, _ROWS, True)
        else:
            _apply_blocks(bases, row, first, keep, size, BLOCKS, HAS_MASTERS, W, P, U, _STRIDED, False)


_OPTIONS = {"enable_fp_fusion": False}
"""Compiler options without fused multiply-add, so that the bits of an element do not depend on the memory layout."""


def _launch(
    kernel: Any,
    pieces: int,
    columns: Sequence[Sequence[Tensor]],
    buffers: Sequence[Tensor],
    vectors: Sequence[Tensor],
    *numbers: float,
    choices: tuple[Any, ...] = (),
) -> Launch:
    """Return the launch of one of the kernels.

    Args:
        kernel: The kernel.
        pieces: `PieceRows.number`.
        columns: The tensors of each column but the last.
        buffers: Those of the last column.
        vectors: The kernel's vectors with one entry for each matrix.
        numbers: Its numbers.
        choices: What it is compiled for, besides the dtypes of the columns.
    """
    piece_rows = rows.rows_of(pieces)
    table, bases, count, programs, *_ = piece_rows.of(*columns, buffers=buffers)
    whole = [vector.contiguous() for vector in vectors]
    vectors = [vector.view(torch.uint8) if vector.dtype == torch.bool else vector for vector in whole]
    dtypes, choices = (
        tuple([column[0].dtype for column in (*columns, buffers) if column]),
        (piece_rows.blocks, *choices),
    )
    arguments = (table, bases, count, *vectors, *numbers, *choices, *(TYPES[dtype] for dtype in dtypes))
    code = kernel.__name__, dtypes, choices, are_aligned(table, bases, *vectors)
    return Launch(kernel, programs, arguments, _OPTIONS, code)


def finding(gradients: Sequence[Tensor], pieces: int, flags: Tensor) -> Launch:
    """Return the launch of `nonzero`."""
    return _launch(nonzero, pieces, [gradients], (), [flags])


def folding(*arguments: Any) -> Launch:
    """Return the launch of `fold`."""
    gradients, momenta, buffers, pieces, active, momentum, nesterov = arguments
    choices = len(buffers) > 0, nesterov, torch.finfo(momenta[0].dtype).tiny
    columns, numbers = (gradients, momenta), (float(1 - momentum), float(momentum))
    return _launch(fold, pieces, columns, buffers or momenta, [active], *numbers, choices=choices)


def applying(*arguments: Any) -> Launch:
    """Return the launch of `apply`."""
    weights, masters, buffers, pieces, active, keep, size = arguments
    columns, choices = (weights, masters or weights), (len(masters) > 0,)
    return _launch(apply, pieces, columns, buffers, [active, keep, size], choices=choices)
