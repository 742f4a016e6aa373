"""Triton kernels for elementwise work on many pieces in one launch. Importing this file imports Triton.

Each program reads from a table which piece is its own and where its elements lie. The table holds `WIDTH` numbers a
piece, in this order: the numbers of three addresses in ``bases``, the piece's entry in vectors, its first program, its
kind, where it starts in its storage and in its buffer, three lengths, and three strides in each of the two.
"""

# Triton gives the arguments of a kernel their types when it compiles, from what the kernel is called with.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from muonmesh.numerics.kernels.rows import (
    BLOCKS,
    COLS,
    ENTRY,
    FIRST_PROGRAM,
    FLAT,
    KIND,
    LENGTHS,
    ROWS,
    STARTS,
    STRIDED_ROWS,
    STRIDES,
    TRANSPOSED,
    WIDTH,
)

TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}

_WIDTH = tl.constexpr(WIDTH)
_ENTRY, _FIRST_PROGRAM, _KIND = tl.constexpr(ENTRY), tl.constexpr(FIRST_PROGRAM), tl.constexpr(KIND)
_STARTS, _LENGTHS, _STRIDES = tl.constexpr(STARTS), tl.constexpr(LENGTHS), tl.constexpr(STRIDES)
_FLAT, _TRANSPOSED = tl.constexpr(FLAT), tl.constexpr(TRANSPOSED)
_ROWS, _COLS, _STRIDED_ROWS = tl.constexpr(ROWS), tl.constexpr(COLS), tl.constexpr(STRIDED_ROWS)
_SIZE, _BLOCKS = tl.constexpr(ROWS * COLS), tl.constexpr(BLOCKS)


@triton.jit
def row_of(table, pieces, program, WIDTH: tl.constexpr, FIRST: tl.constexpr):
    """The row of the last piece whose first program, its number FIRST of WIDTH, is not after this one, by halving."""
    low = 0
    high = pieces
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(table + middle * WIDTH + FIRST) <= program
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return table + low * WIDTH


@triton.jit
def _blocks(row, HIGH: tl.constexpr):
    """How many blocks a piece has that is not flat."""
    down, across = tl.load(row + _LENGTHS + 1), tl.load(row + _LENGTHS + 2)
    return tl.load(row + _LENGTHS) * tl.cdiv(down, HIGH) * tl.cdiv(across, _COLS)


@triton.jit
def _first(bases, row, which: tl.constexpr, SIDE: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Where the first element of a piece lies in one of its tensors; SIDE is 0 for a storage and 1 for a buffer."""
    base = tl.load(bases + tl.load(row + which)).to(tl.pointer_type(TYPE))
    start = tl.load(row + _STARTS + SIDE)
    if ALIGNED:  # told here, since the compiler forgets what it is told of the result of a call
        base, start = tl.multiple_of(base, 16), tl.multiple_of(start, 16)
    return base + start


@triton.jit
def _block(
    bases,
    row,
    which: tl.constexpr,
    SIDE: tl.constexpr,
    TYPE: tl.constexpr,
    block,
    HIGH: tl.constexpr,
    TURNED: tl.constexpr,
):
    """Where the elements of a block of a piece that is not flat lie in one of its tensors, and which of them exist.

    A block of `_ROWS` is one of a transposed piece, of which the compiler is told that all is aligned. With TURNED its
    columns are contiguous, and come first.
    """
    down, across = tl.load(row + _LENGTHS + 1), tl.load(row + _LENGTHS + 2)
    wide = tl.cdiv(across, _COLS)
    in_plane = tl.cdiv(down, HIGH) * wide
    top, left = block % in_plane // wide * HIGH, block % wide * _COLS
    strides = row + _STRIDES + 3 * SIDE
    plane, next_row, next_col = tl.load(strides), tl.load(strides + 1), tl.load(strides + 2)
    here = _first(bases, row, which, SIDE, TYPE, HIGH == _ROWS)
    if HIGH == _ROWS:
        down, across = tl.multiple_of(down, 16), tl.multiple_of(across, 16)
        top, left = tl.multiple_of(top, 16), tl.multiple_of(left, 16)
        plane = tl.multiple_of(plane, 16)
        if TURNED:
            next_row, next_col = 1, tl.multiple_of(next_col, 16)
        else:
            next_row, next_col = tl.multiple_of(next_row, 16), 1
    i, j = top + tl.arange(0, HIGH), left + tl.arange(0, _COLS)
    here += block // in_plane * plane
    if TURNED:
        at = here + j[:, None] * next_col + i[None, :] * next_row
        inside = (j[:, None] < across) & (i[None, :] < down)
    else:
        at = here + i[:, None] * next_row + j[None, :] * next_col
        inside = (i[:, None] < down) & (j[None, :] < across)
    return at, inside


@triton.jit
def _lerp(start, end, weight):
    """The formula of torch.lerp, exact at both ends; the product is not rounded."""
    near = tl.abs(weight) < 0.5
    factor = tl.where(near, weight, weight - 1.0)
    return tl.fma(tl.zeros_like(start) + factor, end - start, tl.where(near, start, end))


@triton.jit
def _folded(g, m, weight, momentum, on, NESTEROV: tl.constexpr, TINY: tl.constexpr):
    """Momentum and direction of one block, both in the momentum's dtype."""
    gradient = g.to(m.dtype).to(tl.float32)
    old = m.to(tl.float32)
    new = _lerp(old, gradient, weight).to(m.dtype).to(tl.float32)
    new = tl.where(tl.abs(new) < TINY, 0.0, new)
    new = tl.where(on, new, old)
    direction = new
    if NESTEROV:  # without the gradient where the piece is not active: it may be anything there
        direction = tl.where(on, _lerp(gradient, new, momentum), new)
    return new.to(m.dtype), direction.to(m.dtype)


@triton.jit
def _fold_blocks(bases, row, first, weight, momentum, on, DIRECTS, NESTEROV, TINY, G, M, D, HIGH, TURNED):
    """Fold the blocks of one program of a piece that is not flat; with TURNED its direction lies transposed."""
    for block in range(first, tl.minimum(first + _BLOCKS, _blocks(row, HIGH))):
        g_at, inside = _block(bases, row, 0, 0, G, block, HIGH, False)
        m_at, _ = _block(bases, row, 1, 0, M, block, HIGH, False)
        d_at, there = _block(bases, row, 2, 1, D, block, HIGH, TURNED)
        g, m = tl.load(g_at, mask=inside, other=0.0), tl.load(m_at, mask=inside, other=0.0)
        m, d = _folded(g, m, weight, momentum, on, NESTEROV=NESTEROV, TINY=TINY)
        tl.store(m_at, m, mask=inside & on)
        if DIRECTS:
            tl.store(d_at, tl.trans(d.to(D)) if TURNED else d.to(D), mask=there)


@triton.jit(do_not_specialize=["pieces"])
def fold(
    table,
    bases,
    pieces,
    active,
    weight,
    momentum,
    DIRECTS: tl.constexpr,
    NESTEROV: tl.constexpr,
    TINY: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
):
    """Momentum ← lerp(momentum, gradient, weight), direction ← lerp(gradient, momentum, μ), one block of one piece."""
    program = tl.program_id(0)
    row = row_of(table, pieces, program, _WIDTH, _FIRST_PROGRAM)
    first = (program - tl.load(row + _FIRST_PROGRAM)) * _BLOCKS
    kind = tl.load(row + _KIND)
    g_flat = _first(bases, row, 0, 0, G, True)
    m_flat = _first(bases, row, 1, 0, M, True)
    d_flat = _first(bases, row, 2, 1, D, True)
    on = tl.load(active + tl.load(row + _ENTRY)) != 0
    if kind == _FLAT:
        length = tl.load(row + _LENGTHS + 2)
        for block in range(first, tl.minimum(first + _BLOCKS, tl.cdiv(length, _SIZE))):
            here = block * _SIZE + tl.arange(0, _SIZE)
            if (block + 1) * _SIZE <= length:  # without a mask 16 bytes are moved at a time
                g_whole, m_whole = tl.load(g_flat + here), tl.load(m_flat + here)
                m_whole, d_whole = _folded(g_whole, m_whole, weight, momentum, on, NESTEROV=NESTEROV, TINY=TINY)
                if on:
                    tl.store(m_flat + here, m_whole)
                if DIRECTS:
                    tl.store(d_flat + here, d_whole.to(D))
            else:
                left = here < length
                g_tail = tl.load(g_flat + here, mask=left, other=0.0)
                m_tail = tl.load(m_flat + here, mask=left, other=0.0)
                m_tail, d_tail = _folded(g_tail, m_tail, weight, momentum, on, NESTEROV=NESTEROV, TINY=TINY)
                tl.store(m_flat + here, m_tail, mask=left & on)
                if DIRECTS:
                    tl.store(d_flat + here, d_tail.to(D), mask=left)
    elif kind == _TRANSPOSED:
        _fold_blocks(bases, row, first, weight, momentum, on, DIRECTS, NESTEROV, TINY, G, M, D, _ROWS, True)
    else:
        _fold_blocks(bases, row, first, weight, momentum, on, DIRECTS, NESTEROV, TINY, G, M, D, _STRIDED_ROWS, False)


@triton.jit
def _applied(w, u, keep, size):
    """Each product and the difference rounded by itself, as torch does."""
    return w.to(tl.float32) * keep - u.to(tl.float32) * size


@triton.jit
def _followed(p, w):
    """A master, or its weight where this is not the rounded master: then other code has written it."""
    rounded = p.to(w.dtype).to(tl.float32)
    return tl.where(rounded == w.to(tl.float32), p, w.to(p.dtype))


@triton.jit
def _apply_blocks(bases, row, first, keep, size, HAS_MASTERS, W, P, U, HIGH, TURNED):
    """Step the blocks of one program of a piece that is not flat; with TURNED its update lies transposed."""
    for block in range(first, tl.minimum(first + _BLOCKS, _blocks(row, HIGH))):
        w_at, inside = _block(bases, row, 0, 0, W, block, HIGH, False)
        p_at, _ = _block(bases, row, 1, 0, P, block, HIGH, False)
        u_at, there = _block(bases, row, 2, 1, U, block, HIGH, TURNED)
        u = tl.load(u_at, mask=there, other=0.0)
        held = tl.load(w_at, mask=inside, other=0.0)
        old = _followed(tl.load(p_at, mask=inside, other=0.0), held) if HAS_MASTERS else held
        new = _applied(old, tl.trans(u) if TURNED else u, keep, size)
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
    HAS_MASTERS: tl.constexpr,
    W: tl.constexpr,
    P: tl.constexpr,
    U: tl.constexpr,
):
    """Weight ← weight·keep − size·update, one block of one piece, computed on the master if there is one."""
    program = tl.program_id(0)
    row = row_of(table, pieces, program, _WIDTH, _FIRST_PROGRAM)
    first = (program - tl.load(row + _FIRST_PROGRAM)) * _BLOCKS
    kind = tl.load(row + _KIND)
    entry = tl.load(row + _ENTRY)
    w_flat = _first(bases, row, 0, 0, W, True)
    p_flat = _first(bases, row, 1, 0, P, True)
    u_flat = _first(bases, row, 2, 1, U, True)
    keep = tl.load(keeps + entry)
    size = tl.load(sizes + entry)
    on = tl.load(active + entry) != 0
    if on:
        if kind == _FLAT:
            length = tl.load(row + _LENGTHS + 2)
            for block in range(first, tl.minimum(first + _BLOCKS, tl.cdiv(length, _SIZE))):
                here = block * _SIZE + tl.arange(0, _SIZE)
                if (block + 1) * _SIZE <= length:  # without a mask 16 bytes are moved at a time
                    held = tl.load(w_flat + here)
                    given = _followed(tl.load(p_flat + here), held) if HAS_MASTERS else held
                    whole = _applied(given, tl.load(u_flat + here), keep, size)
                    if HAS_MASTERS:
                        tl.store(p_flat + here, whole.to(P))
                    tl.store(w_flat + here, (whole.to(P) if HAS_MASTERS else whole).to(W))
                else:
                    left = here < length
                    u_tail = tl.load(u_flat + here, mask=left, other=0.0)
                    rest = tl.load(w_flat + here, mask=left, other=0.0)
                    tail = _followed(tl.load(p_flat + here, mask=left, other=0.0), rest) if HAS_MASTERS else rest
                    changed = _applied(tail, u_tail, keep, size)
                    if HAS_MASTERS:
                        tl.store(p_flat + here, changed.to(P), mask=left)
                    tl.store(w_flat + here, (changed.to(P) if HAS_MASTERS else changed).to(W), mask=left)
        elif kind == _TRANSPOSED:
            _apply_blocks(bases, row, first, keep, size, HAS_MASTERS, W, P, U, _ROWS, True)
        else:
            _apply_blocks(bases, row, first, keep, size, HAS_MASTERS, W, P, U, _STRIDED_ROWS, False)
