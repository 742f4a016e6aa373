"""Blocked: torch's products of one large matrix on a CPU. Of a symmetric result only the upper blocks are multiplied.

A symmetric product is cut into blocks of columns. Each block is multiplied down to the diagonal, and mirrored to the
rows below. With blocks of width w this takes (1 + w/rows)/2 of the operations of the full product.

Each call of torch has one thread, because its bits depend on its number of threads. Threads take one call after the
other.

Three things make the blocks faster than the full product (measured). Operands are 2-D, and contiguous or the transpose
of a contiguous tensor: oneDNN copies every other layout. The large operand is on the left, because each call packs the
right one again. Results go to contiguous scratch memory first: if they were mirrored from ``out``, whose rows are often
a power of two apart, they would miss the cache.
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
"""The largest number of squares whose panels a thread keeps. An iteration has about five squares for each size."""


class _Panel(NamedTuple):
    """The views of a square matrix A that the block of columns from ``start`` to ``stop`` needs."""

    above: Tensor
    """A[:stop, start:stop]."""
    rows: Tensor
    """A[:stop]."""
    column: Tensor
    """A[start:stop]ᵀ. If A is symmetric, these are its columns from ``start`` to ``stop``, in full height."""
    mirrored: Tensor
    """A[start:stop, :start]."""


class _Block(NamedTuple):
    """Memory of a thread for the results of one block, and views of it."""

    entries: Tensor
    """Shape (stop, width)."""
    transposed: Tensor
    """``entries`` transposed, in the same memory, shape (width, stop)."""
    mirror: Tensor
    """Contiguous memory for the transposed entries, (width, stop): torch transposes fast only into such memory."""
    diagonal: Tensor
    """The last rows of `entries`, shape (width, width)."""
    mirrored_diagonal: Tensor
    """The last columns of `mirror`."""
    mirrored: Tensor
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
    """Return the panels of a contiguous square. They are made once for each buffer, and the thread keeps them.

    Panels hold the memory of their square, so no other tensor can get its address. This costs no memory, because the
    squares are buffers of the iteration, which the thread keeps anyway (`scratch`).
    """
    panels_by_square: dict[object, Sequence[_Panel]] = keep("panels", dict)
    key = a.data_ptr(), len(a), a.stride(), a.dtype
    if key not in panels_by_square:
        if len(panels_by_square) == _KEPT:
            del panels_by_square[next(iter(panels_by_square))]
        panels_by_square[key] = _cut(a)
    return panels_by_square[key]


def _by_columns(c: Tensor, a: Tensor, b: Tensor, *, beta: float, alpha: float, out: Tensor) -> None:
    """Write beta·C + alpha·A B, a few hundred columns at a time."""

    def multiply(start: int) -> None:
        columns = slice(start, start + COLUMNS)
        torch.addmm(c[:, columns], a, b[:, columns], beta=beta, alpha=alpha, out=out[:, columns])

    run_each(multiply, range(0, out.shape[1], COLUMNS))


def _multiply(
    a: Tensor, b: Operand, terms: Terms, out: Tensor, alpha: float = 1.0, scale: Number = 1.0, symmetric: bool = True
) -> Tensor:
    """Multiply as `Matmuls.multiply` says, block by block, each symmetric block once.

    All views that can be made once are kept. After a product the interpreter and torch's dispatch are out of the
    thread's cache, so each call takes two to three times as long as in a loop (measured).
    """
    if b is not None and not symmetric:
        ((c, factor),) = terms
        add_multiple(a[0], b[0], c[0], factor, scale, out[0], _by_columns)
        return out
    # The scale multiplies before the result is rounded. On a CPU `float` does not wait.
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
            target.mirrored.copy_(block.mirrored)

    run_each(multiply, reversed(range(len(targets))))  # the largest first
    return out


BLOCKED = Matmuls(multiply=_multiply, batch_limit=1)
"""The table for one matrix at a time, since a batch of matrices this large gains nothing."""
