"""CPU: symmetric results by column blocks, only the upper block triangle multiplied, the rest mirrored.

Each call has one thread, and threads share the calls, because the bits of a call depend on the number of its threads.

A full product costs 2·rows²·n operations, with blocks of width w only (1 + w/rows)/2 of them. What makes it pay
(measured): 2-D operands that are contiguous or the transpose of something contiguous (oneDNN copies every other
layout), the large operand on the left (the right one is repacked on every call), and results in a contiguous
scratch buffer: mirrored from `out` itself, whose rows are often a power of two apart, they miss the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from muonmesh.numerics.kernels.multiple import add_multiple
from muonmesh.numerics.kernels.product_table import Matmuls, Number, Operand, Terms
from muonmesh.numerics.kernels.threads import keep, run_each

BLOCK = 128

COLUMNS = 256
"""Columns of one call of a product that is not symmetric."""

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


def _cut(a: Tensor) -> list[_Panel]:
    return [_Panel(a[:j, i:j], a[:j], a[i:j].mT, a[i:j, :i]) for i, j in _spans(len(a))]


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
        kept[key] = _cut(a)
    return kept[key]


def _by_columns(c: Tensor, a: Tensor, b: Tensor, *, beta: float, alpha: float, out: Tensor) -> None:
    """Write beta·C + alpha·A B, a few hundred columns at a time."""

    def multiply(start: int) -> None:
        some = slice(start, start + COLUMNS)
        torch.addmm(c[:, some], a, b[:, some], beta=beta, alpha=alpha, out=out[:, some])

    run_each(multiply, range(0, out.shape[1], COLUMNS))


def _multiply(
    a: Tensor, b: Operand, terms: Terms, out: Tensor, alpha: float = 1.0, scale: Number = 1.0, symmetric: bool = True
) -> Tensor:
    """Multiply as `Matmuls.multiply` says, block by block, each symmetric block once.

    Every call counts: after a product the interpreter and torch's dispatch are out of the thread's cache, and calls
    take two to three times as long as in a loop (measured). So what can be made once is kept, down to the views.
    """
    if b is not None and not symmetric:
        ((c, factor),) = terms
        add_multiple(a[0], b[0], c[0], factor, scale, out[0], _by_columns)
        return out
    # Numbers are multiplied in before rounding, and on a CPU reading them waits for nothing.
    alpha *= float(scale)
    of_a = _cut(a[0]) if b is None else _panels(a[0])
    of_b, added = of_a if b is None else _panels(b[0]), [(_panels(c[0]), float(factor)) for c, factor in terms]
    rows, dtype = len(out[0]), out.dtype
    targets = _panels(out[0])

    def multiply(number: int) -> None:
        block, target = keep(("blocks", rows, dtype), lambda: _blocks(rows, dtype))[number], targets[number]
        plus, beta = (added[0][0][number].above, added[0][1]) if added else (block.entries, 0.0)
        torch.addmm(plus, of_a[number].rows, of_b[number].column, beta=beta, alpha=alpha, out=block.entries)
        block.mirror.copy_(block.transposed)
        # The block on the diagonal need not be symmetric: rounded A and B commute only nearly, and fp32 sums run in
        # another order on the other side. Left so, it costs Gram up to half of its accuracy (measured).
        block.diagonal.lerp_(block.mirrored_diagonal, block.below)  # by 0 or by 1, which is exact
        target.above.copy_(block.entries)
        if number:
            target.left.copy_(block.left)

    run_each(multiply, reversed(range(len(targets))))  # the largest first
    return out


BLOCKED = Matmuls(multiply=_multiply, at_once=1)
"""The table for one matrix at a time, since a batch of matrices this large gains nothing."""
