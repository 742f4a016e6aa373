"""Tables of pieces: where the elements of many tensors lie, as numbers that one copy takes to a device."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from muonmesh.numerics.kernels.memory import pinned

WIDTH = 18
"""Numbers a piece: three addresses, and those named below."""
ENTRY, FIRST_PROGRAM, KIND, LENGTHS, STRIDES = 3, 4, 5, 6, 9

FLAT, STRIDED, TRANSPOSED = 0, 1, 2
"""Kinds: contiguous everywhere, in any order, and in any order with the last tensor's columns contiguous."""

ROWS, COLS = 32, 64
"""What one program takes of a matrix; of a flat piece it takes as many elements."""

_ALIGNMENT = 16
_ONES, _MISSING = [(1,) * (3 - dims) for dims in range(4)], [(0,) * (3 - dims) for dims in range(4)]


class Rows:
    """The rows of pieces whose tensors have the same dtypes; they are launched together."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.programs = 0

    @property
    def pieces(self) -> int:
        """How many pieces there are."""
        return len(self.numbers) // WIDTH

    def add(self, number: int, entry: int, a: Tensor, b: Tensor, c: Tensor) -> None:
        """Add a piece; this is called for every piece at every step, so it is written to take little time.

        Args:
            number: Its number among all pieces, for errors.
            entry: Where in vectors with one entry for one or more pieces its own is.
            a: At most 3 dims, any strides.
            b: Of the same shape.
            c: Of the same shape. The same tensor may be given twice where one is not wanted.

        Raises:
            ValueError: The shapes differ, or there are more than 3 dims.
        """
        shape, dims = a.shape, a.ndim
        if dims > 3 or shape != b.shape or shape != c.shape:
            found = ", ".join(str(tuple(tensor.shape)) for tensor in (a, b, c))
            write = "Flatten its tensors, or cut them alike"
            raise ValueError(f"piece {number}: found shapes {found}; needed one shape of at most 3 dims. {write}")
        size, start = a.numel(), self.programs
        if not size:
            return
        x, y, z = a.data_ptr(), b.data_ptr(), c.data_ptr()
        if a.is_contiguous() and b.is_contiguous() and c.is_contiguous() and not (x | y | z) % _ALIGNMENT:
            self.numbers += (x, y, z, entry, start, FLAT, 1, 1, size, 0, 0, 0, 0, 0, 0, 0, 0, 0)
            self.programs = start - -size // (ROWS * COLS)
            return
        missing = _MISSING[dims]
        planes, rows, cols = lengths = _ONES[dims] + shape
        strides = missing + a.stride() + missing + b.stride() + missing + c.stride()
        kind = TRANSPOSED if strides[7] < strides[8] and rows > 1 else STRIDED
        self.numbers += (x, y, z, entry, start, kind, *lengths, *strides)
        self.programs = start + planes * (-(-rows // ROWS)) * (-(-cols // COLS))


def on_device(groups: Sequence[Rows], device: torch.device) -> list[Tensor]:
    """Return one table, int64, for each of the groups: one copy for all of them, which the host does not wait for."""
    numbers = array("q", [number for group in groups for number in group.numbers])
    table = pinned(torch.frombuffer(numbers, dtype=torch.int64), device)
    ends = accumulate(len(group.numbers) for group in groups)
    return [table[end - len(group.numbers) : end] for group, end in zip(groups, ends, strict=True)]
