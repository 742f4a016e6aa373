"""CPU: symmetric results by column blocks, only the upper block triangle multiplied, the rest mirrored.

A full product costs 2·rows²·n operations, with blocks of width w only (1 + w/rows)/2 of them. What makes it pay
[measured]: 2-D operands that are contiguous or the transpose of something contiguous (oneDNN copies every other
layout), the large operand on the left (the right one is repacked on every call), and results in a contiguous
scratch buffer: mirrored from `out` itself, whose rows are often a power of two apart, they miss the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from muonmesh.numerics.kernels.memory import keep
from muonmesh.numerics.kernels.multiple import add_multiple
from muonmesh.numerics.kernels.table import Matmuls

BLOCK = 128

ROWS = 512
"""Rows of one call of a product that is not symmetric, from twice as many on."""

_KEPT = 32
"""Squares whose panels a thread keeps: five of each size that the matrices of a model have."""


class _Panel(NamedTuple):
    """What is read from and written to a square matrix A for one column block, entries [:stop, start:stop]."""

    above: Tensor
    """A[:stop, start:stop]."""
    rows: Tensor
    """A[:stop]."""
    column: Tensor
    """A[start:stop]ᵀ, the whole column block if A is symmetric."""
    left: Tensor
    """A[start:stop, :start]."""


class _Block(NamedTuple):
    """Memory for one column block, and views of it."""

    entries: Tensor
    """Shape (stop, width)."""
    transposed: Tensor
    """The same memory, shape (width, stop)."""
    mirror: Tensor
    """Other memory of that shape: torch transposes fast only into contiguous memory."""
    diagonal: Tensor
    """The last rows of `entries`, shape (width, width)."""
    mirrored_diagonal: Tensor
    """The last columns of `mirror`."""
    left: Tensor
    """The other columns of `mirror`."""
    below: Tensor
    """1 below the diagonal, 0 elsewhere, shape (width, width)."""


def _spans(rows: int) -> list[tuple[int, int]]:
    return [(start, min(start + BLOCK, rows)) for start in range(0, rows, BLOCK)]


def _blocks(rows: int, dtype: torch.dtype) -> list[_Block]:
    memory, mirrors = (torch.empty(rows * BLOCK, dtype=dtype, device="cpu") for _ in range(2))
    blocks = []
    for start, stop in _spans(rows):
        width = stop - start
        entries, mirror = memory[: stop * width].view(stop, width), mirrors[: stop * width].view(width, stop)
        below = torch.ones(width, width, dtype=dtype, device="cpu").tril_(-1)
        blocks.append(_Block(entries, entries.mT, mirror, entries[start:], mirror[:, start:], mirror[:, :start], below))
    return blocks


def _panels(a: Tensor) -> Sequence[_Panel]:
    """Return the panels of a contiguous square, those that were made before where it is memory that was seen before.

    What is kept keeps its memory alive, so no other can come to lie at its address. Squares are the iteration's
    buffers, which the thread keeps anyway.
    """
    kept: dict[object, Sequence[_Panel]] = keep("panels", dict)
    key = a.data_ptr(), len(a), a.stride(), a.dtype
    if key not in kept:
        if len(kept) == _KEPT:
            del kept[next(iter(kept))]
        kept[key] = [_Panel(a[:j, i:j], a[:j], a[i:j].mT, a[i:j, :i]) for i, j in _spans(len(a))]
    return kept[key]


def _fill_symmetric(out: Tensor, multiply: Callable[[int, Tensor], object]) -> None:
    """Fill out (rows, rows); `multiply(number, entries)` writes those of a column block, down to the diagonal's.

    Every call counts: after a product the interpreter and torch's dispatch are out of the thread's cache, and calls
    take two to three times as long as in a loop [measured]. So what can be made once is kept, down to the views.
    """
    rows, dtype = len(out), out.dtype
    blocks = keep(("blocks", rows, dtype), lambda: _blocks(rows, dtype))
    for number, (block, panel) in enumerate(zip(blocks, _panels(out), strict=True)):
        multiply(number, block.entries)
        _place(number, block, panel)


def _place(number: int, block: _Block, panel: _Panel) -> None:
    """Write the entries of a column block into the square, and their mirror images."""
    block.mirror.copy_(block.transposed)
    # The block on the diagonal need not be symmetric: rounded A and B commute only nearly, and fp32 sums run in
    # another order on the other side. Left so, it costs Gram up to half of its accuracy [measured].
    block.diagonal.lerp_(block.mirrored_diagonal, block.below)  # by 0 or by 1, which is exact
    panel.above.copy_(block.entries)
    if number:
        panel.left.copy_(block.left)


def _fill_rows(out: Tensor, multiply: Callable[[slice, Tensor], object]) -> None:
    """Fill out (rows, cols), a few hundred rows at a time; `multiply(some, target)` writes some of its rows."""
    rows = len(out)
    each = ROWS if rows >= 2 * ROWS else rows  # too few to divide
    for start in range(0, rows, each):
        some = slice(start, min(start + each, rows))
        multiply(some, out[some])


def _blocked_products() -> Matmuls:
    """Return the table for one matrix at a time, since a batch of matrices this large gains nothing."""

    def by_rows(c: Tensor, a: Tensor, b: Tensor, out: Tensor, *, beta: float, alpha: float) -> None:
        def multiply(some: slice, target: Tensor) -> None:
            torch.addmm(c[some], a[some], b, beta=beta, alpha=alpha, out=target)

        _fill_rows(out, multiply)

    def gram(x: Tensor, scale: Tensor, out: Tensor) -> Tensor:
        """scale·X Xᵀ."""
        # A number is multiplied in before rounding, and on a CPU reading it waits for nothing.
        (x2,), alpha = x, scale.item()
        columns = x2.mT.split(BLOCK, dim=1)

        def multiply(number: int, entries: Tensor) -> None:
            torch.addmm(entries, x2[: len(entries)], columns[number], beta=0, alpha=alpha, out=entries)

        _fill_symmetric(out[0], multiply)
        return out

    def polynomial(a: Tensor, b: float, c: float, out: Tensor) -> Tensor:
        """b·A + c·A²."""
        panels = _panels(a[0])

        def multiply(number: int, entries: Tensor) -> None:
            above, rows, column, _ = panels[number]
            torch.addmm(above, rows, column, beta=b, alpha=c, out=entries)

        _fill_symmetric(out[0], multiply)
        return out

    def product(a: Tensor, b: Tensor, c: Tensor, factor: float, out: Tensor) -> Tensor:
        """factor·C + A B, for A and B that commute."""
        of_a, of_b, of_c = (_panels(square[0]) for square in (a, b, c))

        def multiply(number: int, entries: Tensor) -> None:
            torch.addmm(of_c[number].above, of_a[number].rows, of_b[number].column, beta=factor, out=entries)

        _fill_symmetric(out[0], multiply)
        return out

    def full(a: Tensor, b: Tensor, c: Tensor, factor: float, out: Tensor) -> Tensor:
        """factor·C + A B, both triangles."""
        by_rows(c[0], a[0], b[0], out[0], beta=factor, alpha=1.0)
        return out

    def apply(x: Tensor, b: Tensor, a: float | Tensor, s: float | Tensor, out: Tensor) -> Tensor:
        """s·(a·X + B X)."""
        (x2,), (b2,) = x, b
        add_multiple(x2, b2, a, s, out[0], by_rows)
        return out

    return Matmuls(gram=gram, polynomial=polynomial, product=product, full=full, apply=apply, at_once=1, together=False)


BLOCKED = _blocked_products()
"""The table."""
