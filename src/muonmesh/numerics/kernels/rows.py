"""Tables of pieces: the places of the elements of many tensors, as numbers that one copy uploads to a device."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from muonmesh.numerics.kernels.memory import pinned

WIDTH = 18
"""Numbers of each piece in a table: three addresses, and the numbers named below."""
ENTRY, FIRST_PROGRAM, KIND, LENGTHS, STRIDES = 3, 4, 5, 6, 9

FLAT, STRIDED, TRANSPOSED = 0, 1, 2
"""Kinds: contiguous everywhere, in any order, and with contiguous rows but for the last tensor, which has contiguous
columns. All that is flat or transposed can be moved 16 bytes at a time."""

ROWS, COLS, STRIDED_ROWS = 64, 32, 16
"""A block of a matrix; of a flat piece it is as many elements, and of a strided one it has fewer rows."""

BLOCKS = 4
"""Number of blocks that one program works on, one after the other."""

_ALIGNMENT = 16
_ONES, _MISSING = [(1,) * (3 - dims) for dims in range(4)], [(0,) * (3 - dims) for dims in range(4)]


class Rows:
    """The rows of pieces whose tensors have the same dtypes; they are launched together."""

    def __init__(self) -> None:
        self.numbers = array("q")
        self.programs = 0

    @staticmethod
    def in_order(entries: Sequence[int], *columns: Sequence[Tensor]) -> Rows | None:
        """Return the rows of pieces of one size that lie one after the other in few tensors, in few operations.

        Args:
            entries: As in `add`.
            columns: Three times tensors that hold all pieces in their order, contiguous; one or more pieces each.

        Returns:
            None where an address is not aligned, so that the pieces have to be added one by one.
        """
        count = len(entries)
        size = sum(map(Tensor.numel, columns[0])) // count
        addresses = array("q")
        for tensors in columns:
            if len(tensors) == count:
                addresses.extend(map(Tensor.data_ptr, tensors))
                continue
            for tensor in tensors:
                start, width = tensor.data_ptr(), tensor.element_size()
                addresses.extend(range(start, start + tensor.numel() * width, size * width))
        places = _numbers(addresses).view(len(columns), count)
        if (places % _ALIGNMENT).any():
            return None
        found, each = Rows(), -(-size // (ROWS * COLS * BLOCKS))
        found.programs = count * each
        found.numbers = array("q", (0, 0, 0, 0, 0, FLAT, 1, 1, size, *[0] * (WIDTH - STRIDES))) * count
        table = _numbers(found.numbers).view(count, WIDTH)
        table[:, : len(columns)] = places.T
        table[:, ENTRY] = _numbers(entries)
        table[:, FIRST_PROGRAM] = torch.arange(count, dtype=torch.int64, device="cpu") * each
        return found

    @property
    def pieces(self) -> int:
        """The number of pieces."""
        return len(self.numbers) // WIDTH

    def add(self, pieces: Iterable[tuple[int, int, Tensor, Tensor, Tensor]]) -> None:
        """Add pieces; it is done for every piece at every step, so it is written to take little time.

        Args:
            pieces: For each its number among all pieces, for errors; the place of its entry in vectors with one entry
                for one or more pieces; and three tensors of one shape, any strides that `in_three_dims` can do with.
                The same tensor may be given twice where one is not wanted.

        Raises:
            ValueError: The shapes of a piece differ, or they have no 3 dims (`in_three_dims`).
        """
        for number, entry, a, b, c in pieces:
            shape = a.shape
            if shape == b.shape and shape == c.shape and a.is_contiguous() and b.is_contiguous() and c.is_contiguous():
                x, y, z, size, start = a.data_ptr(), b.data_ptr(), c.data_ptr(), a.numel(), self.programs
                if not (x | y | z) % _ALIGNMENT:
                    if size:
                        self.numbers.extend((x, y, z, entry, start, FLAT, 1, 1, size, 0, 0, 0, 0, 0, 0, 0, 0, 0))
                        self.programs = start - -size // (ROWS * COLS * BLOCKS)
                    continue
            self._add_strided(number, entry, a, b, c)

    def _add_strided(self, number: int, entry: int, a: Tensor, b: Tensor, c: Tensor) -> None:
        shape, dims = a.shape, a.ndim
        alike = shape == b.shape == c.shape
        views = in_three_dims(a, b, c) if alike else None
        if views is None:
            found = ", ".join(str(tuple(tensor.shape)) for tensor in (a, b, c))
            write = "Flatten its tensors, or cut them alike"
            raise ValueError(f"piece {number}: found shapes {found}; needed one shape, in at most 3 dims. {write}")
        if not a.numel():
            return
        if dims > 3:
            return self.add([(number, entry, views[0], views[1], views[2])])
        if dims > 1 and a.stride(-2) == 1 != a.stride(-1):  # neighbors in memory to neighboring threads
            return self.add([(number, entry, a.mT, b.mT, c.mT)])
        missing = _MISSING[dims]
        planes, rows, cols = lengths = _ONES[dims] + shape
        strides = missing + a.stride() + missing + b.stride() + missing + c.stride()
        addresses = a.data_ptr(), b.data_ptr(), c.data_ptr()
        ones = strides[2] == strides[5] == strides[7] == 1
        steps = *addresses, rows, cols, strides[0], strides[1], strides[3], strides[4], strides[6], strides[8]
        kind = STRIDED if not ones or any(step % _ALIGNMENT for step in steps) else TRANSPOSED
        high = ROWS if kind == TRANSPOSED else STRIDED_ROWS
        self.numbers.extend((*addresses, entry, self.programs, kind, *lengths, *strides))
        self.programs -= -planes * -(-rows // high) * -(-cols // COLS) // BLOCKS


def in_three_dims(*tensors: Tensor) -> Sequence[Tensor] | None:
    """Return views of tensors of one shape, in at most 3 dims, with their elements in one order; None if there is none.

    Dims whose elements follow each other evenly in all of the tensors become one.
    """
    first, dims = tensors[0], list[list[int]]()
    if first.ndim <= 3:
        return tensors
    for dim in range(first.ndim):
        if dims and all(tensor.stride(dims[-1][-1]) == tensor.stride(dim) * first.shape[dim] for tensor in tensors):
            dims[-1].append(dim)
        elif first.shape[dim] != 1:
            dims.append([dim])
    shape = [math.prod(first.shape[dim] for dim in some) for some in dims]
    views = [tensor.as_strided(shape, [tensor.stride(some[-1]) for some in dims]) for tensor in tensors]
    return views if len(dims) <= 3 else None


def on_device(groups: Sequence[Rows], device: torch.device) -> list[Tensor]:
    """Return one int64 table for each group, uploaded in a single copy for which the CPU does not wait."""
    numbers = groups[0].numbers if len(groups) == 1 else sum((group.numbers for group in groups), array("q"))
    table = pinned(_numbers(numbers), device)
    ends = accumulate(len(group.numbers) for group in groups)
    return [table[end - len(group.numbers) : end] for group, end in zip(groups, ends, strict=True)]


def _numbers(numbers: Sequence[int]) -> Tensor:
    """Return int64; from an array they are shared. ``torch.tensor`` takes five times as long."""
    return torch.frombuffer(numbers if isinstance(numbers, array) else array("q", numbers), dtype=torch.int64)
