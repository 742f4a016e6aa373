"""Elementwise work on many pieces in one launch, in Triton; whoever imports this file imports Triton.

Each program reads from a table which piece is its own and where its elements lie. The table holds `WIDTH` numbers a
piece, in this order: three addresses, the piece's number, its first program, its kind, three lengths, and three strides
for each address.
"""

# Triton gives the arguments of a kernel their types when it compiles, from what the kernel is called with.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from muonmesh.numerics.kernels.rows import (
    COLS,
    FIRST_PROGRAM,
    FLAT,
    KIND,
    LENGTHS,
    NUMBER,
    ROWS,
    STRIDES,
    TRANSPOSED,
    WIDTH,
)

TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}

_WIDTH = tl.constexpr(WIDTH)
_NUMBER, _FIRST_PROGRAM, _KIND = tl.constexpr(NUMBER), tl.constexpr(FIRST_PROGRAM), tl.constexpr(KIND)
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
    on = tl.load(active + tl.load(row + _NUMBER)) != 0 if HAS_ACTIVE else True
    if kind == _FLAT:
        length = tl.load(row + _LENGTHS + 2)
        here = block * (_ROWS * _COLS) + tl.arange(0, _ROWS * _COLS)
        gradient, moving = tl.multiple_of(gradient, 16), tl.multiple_of(moving, 16)
        direction = tl.multiple_of(direction, 16)
        if (block + 1) * (_ROWS * _COLS) <= length:  # without a mask 16 bytes are moved at a time
            m, d = _folded(
                tl.load(gradient + here), tl.load(moving + here), weight, momentum, on, NESTEROV=NESTEROV, TINY=TINY
            )
            if on:
                tl.store(moving + here, m)
            if DIRECTS:
                tl.store(direction + here, d.to(D))
        else:
            inside = here < length
            g = tl.load(gradient + here, mask=inside, other=0.0)
            m = tl.load(moving + here, mask=inside, other=0.0)
            m, d = _folded(g, m, weight, momentum, on, NESTEROV=NESTEROV, TINY=TINY)
            tl.store(moving + here, m, mask=inside & on)
            if DIRECTS:
                tl.store(direction + here, d.to(D), mask=inside)
    else:
        plane, i, j, inside = _places(row, block)
        moving += _offsets(row, 1, plane, i, j)
        g = tl.load(gradient + _offsets(row, 0, plane, i, j), mask=inside, other=0.0)
        m = tl.load(moving, mask=inside, other=0.0)
        m, d = _folded(g, m, weight, momentum, on, NESTEROV=NESTEROV, TINY=TINY)
        tl.store(moving, m, mask=inside & on)
        if DIRECTS:
            direction += _offsets(row, 2, plane, i, j)
            if kind == _TRANSPOSED:  # neighbours in memory to neighbouring threads
                tl.store(tl.trans(direction), tl.trans(d.to(D)), mask=tl.trans(inside))
            else:
                tl.store(direction, d.to(D), mask=inside)


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
    number = tl.load(row + _NUMBER)
    weight, master, update = _address(row, 0, W), _address(row, 1, P), _address(row, 2, U)
    keep = tl.load(keeps + number)
    size = tl.load(sizes + number)
    on = tl.load(active + number) != 0 if HAS_ACTIVE else True
    if on:
        if kind == _FLAT:
            length = tl.load(row + _LENGTHS + 2)
            here = block * (_ROWS * _COLS) + tl.arange(0, _ROWS * _COLS)
            weight, master = tl.multiple_of(weight, 16), tl.multiple_of(master, 16)
            update = tl.multiple_of(update, 16)
            if (block + 1) * (_ROWS * _COLS) <= length:  # without a mask 16 bytes are moved at a time
                u = tl.load(update + here)
                if HAS_MASTERS:
                    new = _applied(tl.load(master + here), u, keep, size).to(P)
                    tl.store(master + here, new)
                else:
                    new = _applied(tl.load(weight + here), u, keep, size)
                tl.store(weight + here, new.to(W))
            else:
                inside = here < length
                u = tl.load(update + here, mask=inside, other=0.0)
                if HAS_MASTERS:
                    new = _applied(tl.load(master + here, mask=inside, other=0.0), u, keep, size).to(P)
                    tl.store(master + here, new, mask=inside)
                else:
                    new = _applied(tl.load(weight + here, mask=inside, other=0.0), u, keep, size)
                tl.store(weight + here, new.to(W), mask=inside)
        else:
            plane, i, j, inside = _places(row, block)
            weight += _offsets(row, 0, plane, i, j)
            update += _offsets(row, 2, plane, i, j)
            if kind == _TRANSPOSED:  # neighbours in memory to neighbouring threads
                u = tl.trans(tl.load(tl.trans(update), mask=tl.trans(inside), other=0.0))
            else:
                u = tl.load(update, mask=inside, other=0.0)
            if HAS_MASTERS:
                master += _offsets(row, 1, plane, i, j)
                new = _applied(tl.load(master, mask=inside, other=0.0), u, keep, size).to(P)
                tl.store(master, new, mask=inside)
            else:
                new = _applied(tl.load(weight, mask=inside, other=0.0), u, keep, size)
            tl.store(weight, new.to(W), mask=inside)
