"""CPU: symmetric results by column blocks, only the upper block triangle multiplied, the rest mirrored.

A full product costs 2·rows²·n operations, with blocks of width w only (1 + w/rows)/2 of them. What makes it pay
[measured]: 2-D operands that are contiguous or the transpose of something contiguous (oneDNN copies every other
layout), the large operand on the left (the right one is repacked on every call), and results in a contiguous
scratch buffer: mirrored from `out` itself, whose rows are often a power of two apart, they miss the cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from muonmesh.numerics.kernels.memory import keep, scratch
from muonmesh.numerics.kernels.multiple import add_multiple
from muonmesh.numerics.kernels.share import TeamShare
from muonmesh.numerics.kernels.table import Matmuls

BLOCK = 128

ROWS = 512
"""Rows of one call of a product that is not symmetric, from twice as many on. How many ranks share the calls changes
nothing in any of them."""

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


def fill_symmetric(out: Tensor, multiply: Callable[[int, Tensor], object], share: TeamShare | None) -> None:
    """Fill out (rows, rows); `multiply(number, entries)` writes those of a column block, down to the diagonal's.

    Every call counts: after a product the interpreter and torch's dispatch are out of the thread's cache, and calls
    take two to three times as long as in a loop [measured]. So what can be made once is kept, down to the views.
    """
    rows, dtype = len(out), out.dtype
    blocks = keep(("blocks", rows, dtype), lambda: _blocks(rows, dtype))
    panels = _panels(out)
    if share is None:
        for number, (block, panel) in enumerate(zip(blocks, panels, strict=True)):
            multiply(number, block.entries)
            _place(number, block, panel)
        return
    parts = divided(len(blocks), share.size)
    lengths = [[blocks[number].entries.numel() for number in part] for part in parts]
    longest = max(map(sum, lengths))
    mine = scratch("own blocks", (longest,), dtype=dtype, device=out.device)
    everyone = scratch("blocks", (share.size, longest), dtype=dtype, device=out.device)
    for number, place in zip(parts[share.index], _after_each_other(mine, lengths[share.index]), strict=True):
        multiply(number, blocks[number].entries)
        place.copy_(blocks[number].entries.view(-1))
    share.gather(mine, everyone)
    for part, sizes, theirs in zip(parts, lengths, everyone, strict=True):
        for number, place in zip(part, _after_each_other(theirs, sizes), strict=True):
            blocks[number].entries.view(-1).copy_(place)
            _place(number, blocks[number], panels[number])


def _place(number: int, block: _Block, panel: _Panel) -> None:
    """Write the entries of a column block into the square, and their mirror images."""
    block.mirror.copy_(block.transposed)
    # The block on the diagonal need not be symmetric: rounded A and B commute only nearly, and fp32 sums run in
    # another order on the other side. Left so, it costs Gram up to half of its accuracy [measured].
    block.diagonal.lerp_(block.mirrored_diagonal, block.below)  # by 0 or by 1, which is exact
    panel.above.copy_(block.entries)
    if number:
        panel.left.copy_(block.left)


def divided(count: int, members: int) -> list[list[int]]:
    """Return which column blocks each member of a team multiplies.

    A block is the longer, the further to the right it is. So the first is taken with the last, the second with the last
    but one, and these pairs, which are all equal, are dealt out.
    """
    pairs = [sorted({number, count - 1 - number}) for number in range((count + 1) // 2)]
    return [list(itertools.chain(*pairs[member::members])) for member in range(members)]


def _after_each_other(memory: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return list(torch.split(memory[: sum(sizes)], list(sizes)))


def fill_rows(out: Tensor, multiply: Callable[[slice, Tensor], object], share: TeamShare | None) -> None:
    """Fill out (rows, cols), a few hundred rows at a time; `multiply(some, target)` writes some of its rows."""
    rows, cols = out.shape
    if rows < 2 * ROWS:  # too few to divide
        multiply(slice(0, rows), out)
        return
    members, index = (1, 0) if share is None else (share.size, share.index)
    each = -(-rows // (ROWS * members)) * ROWS
    first, last = min(rows, index * each), min(rows, (index + 1) * each)
    for start in range(first, last, ROWS):
        some = slice(start, min(start + ROWS, last))
        multiply(some, out[some])
    if share is not None:
        mine = scratch("own rows", (each, cols), dtype=out.dtype, device=out.device)
        everyone = scratch("rows", (members, each, cols), dtype=out.dtype, device=out.device)
        mine[: last - first].copy_(out[first:last])
        share.gather(mine, everyone)
        out.copy_(everyone.view(-1, cols)[:rows])


def blocked_products(share: TeamShare | None = None) -> Matmuls:
    """Return the table for one matrix at a time, since a batch of matrices this large gains nothing.

    With a `TeamShare` its products are divided among the ranks of a team; each then has the whole result, and its bits
    are those of one rank.
    """

    def by_rows(c: Tensor, a: Tensor, b: Tensor, out: Tensor, *, beta: float, alpha: float) -> None:
        def multiply(some: slice, target: Tensor) -> None:
            torch.addmm(c[some], a[some], b, beta=beta, alpha=alpha, out=target)

        fill_rows(out, multiply, share)

    def gram(x: Tensor, scale: Tensor, out: Tensor) -> Tensor:
        """scale·X Xᵀ."""
        # A number is multiplied in before rounding, and on a CPU reading it waits for nothing.
        (x2,), alpha = x, scale.item()
        columns = x2.mT.split(BLOCK, dim=1)

        def multiply(number: int, entries: Tensor) -> None:
            torch.addmm(entries, x2[: len(entries)], columns[number], beta=0, alpha=alpha, out=entries)

        fill_symmetric(out[0], multiply, share)
        return out

    def polynomial(a: Tensor, b: float, c: float, out: Tensor) -> Tensor:
        """b·A + c·A²."""
        panels = _panels(a[0])

        def multiply(number: int, entries: Tensor) -> None:
            above, rows, column, _ = panels[number]
            torch.addmm(above, rows, column, beta=b, alpha=c, out=entries)

        fill_symmetric(out[0], multiply, share)
        return out

    def product(a: Tensor, b: Tensor, c: Tensor, factor: float, out: Tensor) -> Tensor:
        """factor·C + A B, for A and B that commute."""
        of_a, of_b, of_c = (_panels(square[0]) for square in (a, b, c))

        def multiply(number: int, entries: Tensor) -> None:
            torch.addmm(of_c[number].above, of_a[number].rows, of_b[number].column, beta=factor, out=entries)

        fill_symmetric(out[0], multiply, share)
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


BLOCKED = blocked_products()
"""The table of one rank."""
