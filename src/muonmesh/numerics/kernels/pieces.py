"""Elementwise work on many pieces in one launch, in Triton; whoever imports this file imports Triton.

Each program reads from a table which piece is its own and where its elements lie. The table holds `WIDTH` numbers a
piece, in this order: three addresses, the piece's entry in vectors, its first program, its kind, three lengths, and
three strides for each address.
"""

# Triton gives the arguments of a kernel their types when it compiles, from what the kernel is called with.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from muonmesh.numerics.kernels.rows import (
    COLS,
    ENTRY,
    FIRST_PROGRAM,
    FLAT,
    KIND,
    LENGTHS,
    ROWS,
    STRIDES,
    TRANSPOSED,
    WIDTH,
)

TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}

_WIDTH = tl.constexpr(WIDTH)
_ENTRY, _FIRST_PROGRAM, _KIND = tl.constexpr(ENTRY), tl.constexpr(FIRST_PROGRAM), tl.constexpr(KIND)
_LENGTHS, _STRIDES = tl.constexpr(LENGTHS), tl.constexpr(STRIDES)
_FLAT, _TRANSPOSED = tl.constexpr(FLAT), tl.constexpr(TRANSPOSED)
_ROWS, _COLS = tl.constexpr(ROWS), tl.constexpr(COLS)


@triton.jit
def _row_of(table, pieces, program):
    """The row of the last piece whose first program is not after this one, by halving."""
    low = 0
    high = pieces
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(table + middle * _WIDTH + _FIRST_PROGRAM) <= program
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return table + low * _WIDTH


@triton.jit
def _address(row, which: tl.constexpr, TYPE: tl.constexpr):
    return tl.load(row + which).to(tl.pointer_type(TYPE))


@triton.jit
def _places(row, block):
    """Plane, rows and columns of a block of a piece, and which of its elements exist."""
    down = tl.load(row + _LENGTHS + 1)
    across = tl.load(row + _LENGTHS + 2)
    wide = tl.cdiv(across, _COLS)
    in_plane = tl.cdiv(down, _ROWS) * wide
    i = block % in_plane // wide * _ROWS + tl.arange(0, _ROWS)
    j = block % wide * _COLS + tl.arange(0, _COLS)
    return block // in_plane, i, j, (i[:, None] < down) & (j[None, :] < across)


@triton.jit
def _offsets(row, which: tl.constexpr, plane, i, j):
    strides = row + _STRIDES + 3 * which
    return plane * tl.load(strides) + i[:, None] * tl.load(strides + 1) + j[None, :] * tl.load(strides + 2)


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


@triton.jit(do_not_specialize=["pieces"])
def fold(
    table,
    pieces,
    active,
    weight,
    momentum,
    HAS_ACTIVE: tl.constexpr,
    DIRECTS: tl.constexpr,
    NESTEROV: tl.constexpr,
    TINY: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
):
    """Momentum ← lerp(momentum, gradient, weight), direction ← lerp(gradient, momentum, μ), one block of one piece."""
    program = tl.program_id(0)
    row = _row_of(table, pieces, program)
    block = program - tl.load(row + _FIRST_PROGRAM)
    kind = tl.load(row + _KIND)
    gradient, moving, direction = _address(row, 0, G), _address(row, 1, M), _address(row, 2, D)
    on = tl.load(active + tl.load(row + _ENTRY)) != 0 if HAS_ACTIVE else True
    if kind == _FLAT:
        length = tl.load(row + _LENGTHS + 2)
        here = block * (_ROWS * _COLS) + tl.arange(0, _ROWS * _COLS)
        # Not _address: a hint that is given to what a function returns is lost when the function is inlined.
        g_flat = tl.multiple_of(tl.load(row + 0).to(tl.pointer_type(G)), 16) + here
        m_flat = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(M)), 16) + here
        d_flat = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(D)), 16) + here
        if (block + 1) * (_ROWS * _COLS) <= length:  # without a mask 16 bytes are moved at a time
            m_whole, d_whole = _folded(
                tl.load(g_flat), tl.load(m_flat), weight, momentum, on, NESTEROV=NESTEROV, TINY=TINY
            )
            if on:
                tl.store(m_flat, m_whole)
            if DIRECTS:
                tl.store(d_flat, d_whole.to(D))
        else:
            left = here < length
            g_tail = tl.load(g_flat, mask=left, other=0.0)
            m_tail = tl.load(m_flat, mask=left, other=0.0)
            m_tail, d_tail = _folded(g_tail, m_tail, weight, momentum, on, NESTEROV=NESTEROV, TINY=TINY)
            tl.store(m_flat, m_tail, mask=left & on)
            if DIRECTS:
                tl.store(d_flat, d_tail.to(D), mask=left)
    else:
        plane, i, j, inside = _places(row, block)
        m_at = moving + _offsets(row, 1, plane, i, j)
        g = tl.load(gradient + _offsets(row, 0, plane, i, j), mask=inside, other=0.0)
        m = tl.load(m_at, mask=inside, other=0.0)
        m, d = _folded(g, m, weight, momentum, on, NESTEROV=NESTEROV, TINY=TINY)
        tl.store(m_at, m, mask=inside & on)
        if DIRECTS:
            d_at = direction + _offsets(row, 2, plane, i, j)
            if kind == _TRANSPOSED:  # neighbors in memory to neighboring threads
                tl.store(tl.trans(d_at), tl.trans(d.to(D)), mask=tl.trans(inside))
            else:
                tl.store(d_at, d.to(D), mask=inside)


@triton.jit
def _applied(w, u, keep, size):
    """Each product and the difference rounded by itself, as torch does."""
    return w.to(tl.float32) * keep - u.to(tl.float32) * size


@triton.jit(do_not_specialize=["pieces"])
def apply(
    table,
    pieces,
    active,
    keeps,
    sizes,
    HAS_ACTIVE: tl.constexpr,
    HAS_MASTERS: tl.constexpr,
    W: tl.constexpr,
    P: tl.constexpr,
    U: tl.constexpr,
):
    """Weight ← weight·keep − size·update, one block of one piece, computed on the master where there is one."""
    program = tl.program_id(0)
    row = _row_of(table, pieces, program)
    block = program - tl.load(row + _FIRST_PROGRAM)
    kind = tl.load(row + _KIND)
    entry = tl.load(row + _ENTRY)
    weight, master, update = _address(row, 0, W), _address(row, 1, P), _address(row, 2, U)
    keep = tl.load(keeps + entry)
    size = tl.load(sizes + entry)
    on = tl.load(active + entry) != 0 if HAS_ACTIVE else True
    if on:
        if kind == _FLAT:
            length = tl.load(row + _LENGTHS + 2)
            here = block * (_ROWS * _COLS) + tl.arange(0, _ROWS * _COLS)
            w_flat = tl.multiple_of(tl.load(row + 0).to(tl.pointer_type(W)), 16) + here
            p_flat = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(P)), 16) + here
            u_flat = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(U)), 16) + here
            if (block + 1) * (_ROWS * _COLS) <= length:  # without a mask 16 bytes are moved at a time
                whole = _applied(tl.load(p_flat if HAS_MASTERS else w_flat), tl.load(u_flat), keep, size)
                if HAS_MASTERS:
                    tl.store(p_flat, whole.to(P))
                tl.store(w_flat, (whole.to(P) if HAS_MASTERS else whole).to(W))
            else:
                left = here < length
                u_tail = tl.load(u_flat, mask=left, other=0.0)
                tail = tl.load(p_flat if HAS_MASTERS else w_flat, mask=left, other=0.0)
                changed = _applied(tail, u_tail, keep, size)
                if HAS_MASTERS:
                    tl.store(p_flat, changed.to(P), mask=left)
                tl.store(w_flat, (changed.to(P) if HAS_MASTERS else changed).to(W), mask=left)
        else:
            plane, i, j, inside = _places(row, block)
            w_at = weight + _offsets(row, 0, plane, i, j)
            p_at = master + _offsets(row, 1, plane, i, j)
            u_at = update + _offsets(row, 2, plane, i, j)
            if kind == _TRANSPOSED:  # neighbors in memory to neighboring threads
                u = tl.trans(tl.load(tl.trans(u_at), mask=tl.trans(inside), other=0.0))
            else:
                u = tl.load(u_at, mask=inside, other=0.0)
            new = _applied(tl.load(p_at if HAS_MASTERS else w_at, mask=inside, other=0.0), u, keep, size)
            if HAS_MASTERS:
                tl.store(p_at, new.to(P), mask=inside)
            tl.store(w_at, (new.to(P) if HAS_MASTERS else new).to(W), mask=inside)
