"""Triton kernels for products of batches of matrices on a GPU, by tiles. Importing this file imports Triton."""

# Triton gives the arguments of a kernel their types when it compiles, from what the kernel is called with.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from muonmesh.numerics.kernels.triton_launch import Launch


class Tile(NamedTuple):
    """The tile that one program computes at a time, and the number of its warps."""

    side: int
    """Rows and columns of the result."""
    depth: int
    """Terms of the sums that are loaded at once."""
    warps: int
    stages: int
    """Loads under way at once, on NVIDIA; AMD's have little more than half of the memory, which holds two."""


# Tiles of 256 would leave threads without registers (docs/internals/kernels.md has the figures of these).
LARGE = Tile(side=128, depth=64, warps=8, stages=3)
SMALL = Tile(side=64, depth=64, warps=4, stages=3)
ODD = Tile(side=64, depth=32, warps=4, stages=3)
"""For matrices that are not aligned: elements are loaded one by one then, each with an address and a mask."""
EXACT = Tile(side=64, depth=16, warps=8, stages=3)
"""For fp32, which NVIDIA's tensor cores would multiply as TF32."""

_LARGE_FROM = 257
"""With fewer rows or columns, large tiles would be few, and many processors idle."""
_GROUP = 8
"""Rows of tiles that are computed together, so that what they share is still in the cache."""


@triton.jit
def _tile_of(down, across, program, SYMMETRIC: tl.constexpr, GROUP: tl.constexpr):
    """Return what a program computes: a row i and a column j of tiles, and the number of their matrix."""
    if SYMMETRIC:  # the tiles (i, j) with i <= j, by columns: j·(j + 1)/2 lie before column j
        tiles = down * (down + 1) // 2
        number = program % tiles
        j = ((tl.sqrt(8.0 * number.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
        j = tl.where(j * (j + 1) // 2 > number, j - 1, j)  # the root is rounded
        j = tl.where((j + 1) * (j + 2) // 2 <= number, j + 1, j)
        i = number - j * (j + 1) // 2
    else:  # a few rows of tiles at a time, by columns
        tiles = down * across
        number = program % tiles
        first = number // (GROUP * across) * GROUP
        height = tl.minimum(down - first, GROUP)
        i = first + number % (GROUP * across) % height
        j = number % (GROUP * across) // height
    return i, j, (program // tiles).to(tl.int64)


def _multiply(
    out,
    a,
    b,
    c,
    factor,
    scale,
    d,
    alpha,
    delta,
    identity,
    rows,
    cols,
    terms,
    out_batch,
    out_row,
    out_col,
    a_batch,
    a_row,
    a_term,
    b_batch,
    b_term,
    b_col,
    c_batch,
    c_row,
    c_col,
    d_batch,
    d_row,
    d_col,
    factor_batch,
    scale_batch,
    SYMMETRIC: tl.constexpr,
    ADDS: tl.constexpr,
    ADDS_TWO: tl.constexpr,
    IDENTITY: tl.constexpr,
    FACTORS: tl.constexpr,
    SCALES: tl.constexpr,
    SIDE: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Write scale·(alpha·A B + factor·C + delta·D + identity·I): a tile of it, and its mirror image if it is symmetric.

    All of it in fp32, rounded once. Each sum is added up by one program in one order, so a matrix has the same bits in
    every run and in every batch.
    """
    i, j, z = _tile_of(tl.cdiv(rows, SIDE), tl.cdiv(cols, SIDE), tl.program_id(0), SYMMETRIC, GROUP)

    # Where the tile begins is told in 64 bits, where an element lies in the tile in as few as will do: registers are
    # what limits the size of a tile.
    down_tile = tl.arange(0, SIDE)
    term = tl.arange(0, DEPTH)
    row = i * SIDE + down_tile
    col = j * SIDE + down_tile
    near = down_tile.to(OFFSET)
    along = term.to(OFFSET)
    top = (i * SIDE).to(tl.int64)
    side = (j * SIDE).to(tl.int64)
    a_tile = a + z * a_batch + top * a_row
    b_tile = b + z * b_batch + side * b_col
    in_a = near[:, None] * a_row + along[None, :] * a_term
    in_b = along[:, None] * b_term + near[None, :] * b_col
    sums = tl.zeros((SIDE, SIDE), dtype=tl.float32)
    for start in range(0, terms, DEPTH):
        x = tl.load(a_tile + in_a, mask=(row[:, None] < rows) & (term[None, :] < terms - start), other=0.0)
        y = tl.load(b_tile + in_b, mask=(term[:, None] < terms - start) & (col[None, :] < cols), other=0.0)
        sums = tl.dot(x, y, sums, input_precision="ieee")  # or fp32 would be multiplied as TF32
        a_tile += DEPTH * tl.cast(a_term, tl.int64)
        b_tile += DEPTH * tl.cast(b_term, tl.int64)

    inside = (row[:, None] < rows) & (col[None, :] < cols)
    sums *= alpha
    if ADDS:
        added = c + z * c_batch + top * c_row + side * c_col + near[:, None] * c_row + near[None, :] * c_col
        multiple = tl.load(factor + z * factor_batch) if FACTORS else factor
        sums += multiple.to(tl.float32) * tl.load(added, mask=inside, other=0.0).to(tl.float32)
    if ADDS_TWO:
        added = d + z * d_batch + top * d_row + side * d_col + near[:, None] * d_row + near[None, :] * d_col
        sums += delta * tl.load(added, mask=inside, other=0.0).to(tl.float32)
    if IDENTITY:
        sums += tl.where(row[:, None] == col[None, :], identity, 0.0)
    multiple = tl.load(scale + z * scale_batch) if SCALES else scale
    sums = sums * multiple.to(tl.float32)
    result = sums.to(out.dtype.element_ty)
    out += z * out_batch
    if SYMMETRIC:
        turned = tl.trans(result)
        if i == j:  # the upper half of a tile on the diagonal, twice
            result = tl.where(down_tile[:, None] <= down_tile[None, :], result, turned)
        else:  # no mask but the edges, so that 16 bytes are stored at a time
            mirrored = out + side * out_row + top * out_col + near[:, None] * out_row + near[None, :] * out_col
            tl.store(mirrored, turned, mask=(col[:, None] < rows) & (row[None, :] < cols))
    out += top * out_row + side * out_col
    tl.store(out + near[:, None] * out_row + near[None, :] * out_col, result, mask=inside)


_POINTERS = ["out", "a", "b", "c", "factor", "scale", "d"]
_NUMBERS = [name for name in inspect.signature(_multiply).parameters if name.islower() and name not in _POINTERS]

# Triton compiles a kernel again for arguments that are 1 or multiples of 16, or for addresses that are. So there are
# two: one for matrices of which all that holds, whose rows are copied 16 bytes at a time while the product before
# them is computed, and one for all others, so that no odd size asks for a kernel of its own.
_aligned = triton.jit(_multiply, do_not_specialize_on_alignment=["factor", "scale"])
_any = triton.jit(_multiply, do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)


_FAR = 1 << 24
"""Sums of both strides from which on an offset within a tile may not fit in 32 bits."""


def multiplication(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    alpha: float,
    factor: float | Tensor,
    scale: float | Tensor,
    out: Tensor,
    *,
    symmetric: bool,
    d: Tensor | None = None,
    delta: float = 0.0,
    identity: float = 0.0,
    stages: int | None = None,
    warps: int | None = None,
) -> Launch:
    """Return the launch that writes scale·(alpha·A B + factor·C + delta·D + identity·I).

    Args:
        a: A, shape (batch, rows, terms), any strides; bf16, fp16 or fp32.
        b: B, shape (batch, terms, cols), likewise; the same dtype.
        c: C, shape (batch, rows, cols), likewise; None: nothing is added.
        alpha: A number.
        factor: A number, or a tensor with one a matrix.
        scale: Likewise.
        out: Shape (batch, rows, cols), any strides, sharing no memory with the others; it may be C if ``symmetric`` is
            False, because a program reads of C what it writes.
        symmetric: Whether the result is symmetric. Only one triangle of it is computed then.
        d: D, as C; None: nothing more is added.
        delta: A number.
        identity: A number.
        stages: Loads under way at once; None: as many as the tile is made for.
        warps: Of a large tile; None: as many as it is made for.
    """
    aligned = not any(tensor.data_ptr() % 16 for tensor in (out, a, b, c, d) if tensor is not None)
    kinds = tuple(None if tensor is None else (tensor.dtype, tensor.stride()) for tensor in (out, a, b, c, d))
    choices = {"symmetric": symmetric, "aligned": aligned, "stages": stages, "warps": warps}
    launch, numbers, constants = _launch_of(out.shape, a.shape[2], kinds, **choices)
    (factor, factor_batch), (scale, scale_batch) = _number(factor, len(out)), _number(scale, len(out))
    types = [number.dtype if isinstance(number, Tensor) else None for number in (factor, scale)]
    arguments = (
        *(out, a, b, c, factor, scale, d, float(alpha), float(delta), float(identity)),
        *(*numbers, factor_batch, scale_batch, symmetric, c is not None, d is not None),
        *(identity != 0, isinstance(factor, Tensor), isinstance(scale, Tensor), *constants),
    )
    return launch._replace(arguments=arguments, code=(launch.code, identity != 0, *types, factor_batch, scale_batch))


def multiplying(*arguments: Any) -> Launch:
    """Return the launch for an operator's arguments: ``factors`` and ``scales`` have one number a matrix instead."""
    a, b, c, alpha, factor, factors, scale, scales, symmetric, out, d, delta, identity = arguments
    factor, scale = factor if factors is None else factors, scale if scales is None else scales
    more = {"symmetric": symmetric, "d": d, "delta": delta, "identity": identity}
    return multiplication(a, b, c, alpha, factor, scale, out, **more, **_tile_options(a.device))


@cache
def _tile_options(device: torch.device) -> dict[str, Any]:
    """Return how the tiles of a device differ: measured on 9.0, by the compiler's figures on AMD's.

    docs/internals/kernels.md has both.
    """
    if torch.version.hip:
        return {"stages": 2}
    is_there = device.type == "cuda" and torch.cuda.is_available()
    return {"warps": 4} if is_there and torch.cuda.get_device_capability(device) == (9, 0) else {}


@cache
def _launch_of(
    shape: tuple[int, int, int],
    terms: int,
    kinds: tuple[tuple[torch.dtype, tuple[int, int, int]] | None, ...],
    *,
    symmetric: bool,
    aligned: bool,
    stages: int | None,
    warps: int | None,
) -> tuple[Launch, tuple[int, ...], tuple[Any, ...]]:
    """Return what shapes, strides and dtypes of a product decide: all but its addresses and its numbers.

    That is the launch without arguments; of these the ones from ``rows`` to ``d_col``; and those from ``SIDE`` on.

    Args:
        shape: Of out: batch, rows, cols.
        terms: Of each sum.
        kinds: dtype and strides of out, A, B, C and D; None for one that is not there.
        symmetric: As in `multiplication`.
        aligned: Whether all of their addresses are multiples of 16.
        stages: As in `multiplication`.
        warps: Likewise.
    """
    batch, rows, cols = shape
    # The stride of a batch of one can be anything.
    strides = [kind and ((0, *kind[1][1:]) if batch == 1 else kind[1]) for kind in kinds]
    lengths = ((rows, cols), (rows, terms), (terms, cols), (rows, cols), (rows, cols))
    operands = [(length, of) for length, of in zip(lengths, strides, strict=True) if of is not None]
    aligned = aligned and all(_is_aligned(length, of) for length, of in operands)
    assert kinds[1] is not None
    tile = tile_for(rows, cols, kinds[1][0], aligned=aligned)
    down, across = (triton.cdiv(length, tile.side) for length in (rows, cols))
    if warps is not None and tile is LARGE:
        tile = tile._replace(warps=warps)
    far = max(row + col for _, (_, row, col) in operands) >= _FAR
    programs = batch * (down * (down + 1) // 2 if symmetric else down * across)
    options = {"num_warps": tile.warps, "num_stages": tile.stages if stages is None else stages}
    code = object()  # made once for this launch
    numbers = rows, cols, terms, *(stride for of in strides for stride in of or (0, 0, 0))
    constants = tile.side, tile.depth, _GROUP, tl.int64 if far else tl.int32
    return Launch(_aligned if aligned else _any, programs, (), options, code), numbers, constants


def tile_for(rows: int, cols: int, dtype: torch.dtype, *, aligned: bool) -> Tile:
    """Return the tile for a result of this shape: nothing else decides, so a matrix has the same bits in any batch."""
    if dtype == torch.float32:
        return EXACT
    if not aligned:
        return ODD
    return LARGE if min(rows, cols) >= _LARGE_FROM else SMALL


def _number(number: float | Tensor, batch: int) -> tuple[float | Tensor, int]:
    """Return what the kernel is given for a number, and the stride from one matrix's to the next."""
    if not isinstance(number, Tensor):
        return float(number), 0
    return number, number.flatten().stride(0) if number.numel() == batch > 1 else 0


def _is_aligned(lengths: tuple[int, int], strides: tuple[int, int, int]) -> bool:
    batch, row, col = strides
    lengths_and_stride = (*lengths, batch, row if col == 1 else col)
    return 1 in (row, col) and not any(length % 16 for length in lengths_and_stride)
