"""CPU: symmetric results by column blocks, only the upper block triangle multiplied, the rest mirrored.

A full product costs 2·rows²·n operations, with blocks of width w only (1 + w/rows)/2 of them. What makes it pay
[measured]: 2-D operands that are contiguous or the transpose of something contiguous (oneDNN copies every other
layout), the large operand on the left (the right one is repacked on every call), and results in a contiguous
scratch buffer: mirrored from `out` itself, whose rows are often a power of two apart, they miss the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from muonmesh.numerics.kernels.memory import keep
from muonmesh.numerics.kernels.multiple import add_multiple
from muonmesh.numerics.kernels.table import Matmuls

BLOCK = 128


class _Column(NamedTuple):
    """Memory for one column block, entries [:stop, start:stop] of a symmetric result, and views of it.

    Attributes:
        block: Shape (stop, width).
        transposed: The same memory, shape (width, stop).
        mirror: Other memory of that shape: torch transposes fast only into contiguous memory.
        diagonal: The last rows of `block`, shape (width, width).
        mirrored_diagonal: The last columns of `mirror`.
        left: The other columns of `mirror`, entries [start:stop, :start] of the result.
        lower: 1 below the diagonal, 0 elsewhere, shape (width, width).
    """

    start: int
    stop: int
    block: Tensor
    transposed: Tensor
    mirror: Tensor
    diagonal: Tensor
    mirrored_diagonal: Tensor
    left: Tensor
    lower: Tensor


def _columns(rows: int, dtype: torch.dtype) -> list[_Column]:
    memory, mirrors = (torch.empty(rows * BLOCK, dtype=dtype) for _ in range(2))
    columns = []
    for start in range(0, rows, BLOCK):
        stop = min(start + BLOCK, rows)
        width = stop - start
        block, mirror = memory[: stop * width].view(stop, width), mirrors[: stop * width].view(width, stop)
        lower = torch.ones(width, width, dtype=dtype).tril_(-1)
        columns.append(
            _Column(start, stop, block, block.mT, mirror, block[start:], mirror[:, start:], mirror[:, :start], lower)
        )
    return columns


def _fill_symmetric(out: Tensor, multiply: Callable[[int, int, Tensor], object]) -> None:
    """Fill out (rows, rows) by column blocks; `multiply(i, j, block)` writes the entries [:j, i:j] into `block`.

    Every operation counts: after a product the interpreter and torch's dispatch are out of the thread's cache, and ten
    microseconds go by before the next begins [measured]. So what can be made once is kept.
    """
    rows, dtype = out.shape[0], out.dtype
    for column in keep(("columns", rows, dtype), lambda: _columns(rows, dtype)):
        i, j = column.start, column.stop
        multiply(i, j, column.block)
        column.mirror.copy_(column.transposed)
        # The block on the diagonal need not be symmetric: rounded A and B commute only nearly, and fp32 sums run in
        # another order on the other side. Left so, it costs Gram up to half of its accuracy [measured].
        column.diagonal.lerp_(column.mirrored_diagonal, column.lower)  # by 0 or by 1, which is exact
        out[:j, i:j].copy_(column.block)
        if i:
            out[i:j, :i].copy_(column.left)


def gram(x: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """scale·X Xᵀ."""
    (x2,), alpha = x, scale.item()  # a number is multiplied in before rounding; on a CPU reading it waits for nothing
    _fill_symmetric(out[0], lambda i, j, block: torch.addmm(block, x2[:j], x2[i:j].mT, beta=0, alpha=alpha, out=block))
    return out


def polynomial(a: Tensor, b: float, c: float, out: Tensor) -> Tensor:
    """b·A + c·A²."""
    (a2,) = a
    _fill_symmetric(
        out[0],
        lambda i, j, block: torch.addmm(a2[:j, i:j], a2[:j], a2[i:j].mT, beta=b, alpha=c, out=block),
    )
    return out


def product(a: Tensor, b: Tensor, c: Tensor, factor: float, out: Tensor) -> Tensor:
    """factor·C + A B, for A and B that commute."""
    (a2,), (b2,), (c2,) = a, b, c
    _fill_symmetric(out[0], lambda i, j, block: torch.addmm(c2[:j, i:j], a2[:j], b2[i:j].mT, beta=factor, out=block))
    return out


def full(a: Tensor, b: Tensor, c: Tensor, factor: float, out: Tensor) -> Tensor:
    """factor·C + A B, both triangles."""
    torch.addmm(c[0], a[0], b[0], beta=factor, out=out[0])
    return out


def apply(x: Tensor, b: Tensor, a: float | Tensor, s: float | Tensor, out: Tensor) -> Tensor:
    """s·(a·X + B X)."""
    (x2,), (b2,) = x, b
    add_multiple(x2, b2, a, s, out[0])
    return out


BLOCKED = Matmuls(gram=gram, polynomial=polynomial, product=product, full=full, apply=apply, at_once=1, together=False)
"""For one matrix at a time: a batch of matrices this large gains nothing."""
