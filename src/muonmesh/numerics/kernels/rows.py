"""Rows of pieces: where many pieces lie in the tensors that hold them, as a table of integers that a kernel reads.

The table is made once and stays on the device. Tensors may move from step to step, so a row holds no addresses. It
holds indices into a second, short vector of addresses. Only this vector is uploaded again, when an address has changed.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import accumulate, chain, count
from operator import or_
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from muonmesh.numerics.kernels.pinned_copies import pinned, rewrite
from muonmesh.numerics.kernels.triton_launch import device_of, stream_of

WIDTH = 17
"""The length of a row: the indices of three addresses, and then the numbers whose positions are named below."""
ENTRY, FIRST_PROGRAM, KIND, STARTS, LENGTHS, STRIDES = 3, 4, 5, 6, 8, 11

EVEN, STRIDED, TRANSPOSED = 0, 1, 2
"""The kinds of a row. EVEN: the piece has contiguous rows in the tensors and in the buffer. TRANSPOSED: contiguous rows
in the tensors, contiguous columns in the buffer. Both are moved 16 bytes at a time. STRIDED: any other strides."""

ROWS, COLS, STRIDED_ROWS = 64, 32, 16
"""The size of a block. Blocks of a strided piece have fewer rows. A piece that is contiguous as a whole is read as a
matrix with `COLS` columns."""

BLOCKS = 4
"""The number of blocks that one program takes, one after the other."""

MEASURED = 1 << 15
"""The number of elements of a matrix that one program of `norms` takes."""

SEARCHED = 64
"""The number of blocks in which one program searches for an element other than zero. Nearly always it finds such an
element in the first."""

_ALIGNMENT = 16
"""Bytes of an address, and elements of starts and strides, which is enough for every dtype."""

Sizes = tuple[int, ...]


class Place(NamedTuple):
    """The place of a piece: in a tensor of each of the first two columns, and in a buffer of the third column.

    Attributes:
        tensor: The number of its tensor in the first and in the second column.
        buffer: The number of its buffer.
        entry: Its index in vectors such as ``active``, in which several pieces may share an entry.
        shape: Its shape.
        start, strides: Its first element and its strides in the tensors.
        buffer_start, buffer_strides: Likewise in the buffer.
    """

    tensor: int
    buffer: int
    entry: int
    shape: Sizes
    start: int
    strides: Sizes
    buffer_start: int
    buffer_strides: Sizes


class Located(NamedTuple):
    """The table of a launch and the addresses of its tensors.

    Attributes:
        table: The table, on the device.
        bases: The addresses of the tensors, on the device, in the same memory in every step.
        rows: The number of rows.
        programs: The number of programs.
        version: See `PieceRows`.
        addresses: The addresses in ``bases``, on the CPU.
        buffers: The addresses of the buffers among them.
    """

    table: Tensor
    bases: Tensor
    rows: int
    programs: int
    version: object
    addresses: list[int]
    buffers: list[int]


class PieceRows:
    """The rows of the pieces that one launch works on, with their table on each device; see `WIDTH`.

    Args:
        places: The pieces, of at most three dims (`in_three_dims`). Empty ones are left out.
        blocks: The number of blocks that one program works on.

    Attributes:
        blocks: See above.
        number: The number of this object, since operators of torch take no Python objects (`rows_of`).
        numels: The number of elements of each piece.
        version: Set by the caller. As long as it is the same object, no tensor except buffers has moved, and `of`
            compares the addresses of the buffers alone. None: `of` compares all addresses.
    """

    def __init__(self, places: Sequence[Place], blocks: int = BLOCKS) -> None:
        self._places = [piece for piece in places if 0 not in piece.shape]
        self.blocks, self.numels = blocks, [math.prod(piece.shape) for piece in self._places]
        self.version: object = None
        self._tables: dict[object, tuple[Tensor, int, int]] = {}
        self._last: dict[object, Located] = {}
        self.number = next(_numbers)
        _living[self.number] = self

    def __len__(self) -> int:
        """Return the number of pieces."""
        return len(self.numels)

    def of(self, *columns: Sequence[Tensor], buffers: Sequence[Tensor] = ()) -> Located:
        """Return the table for tensors, and bring their addresses on the device up to date.

        Args:
            columns: The tensors of each column but the last, on one device, in the same order.
            buffers: The tensors of the last column.
        """
        device = device_of(columns[0][0])
        key = device, stream_of(device)  # the stream that has written them
        last, buffer_addresses = self._last.get(key), [*map(Tensor.data_ptr, buffers)]
        if last is not None and last.version is self.version is not None and last.buffers == buffer_addresses:
            return last
        addresses = [*map(Tensor.data_ptr, chain(*columns)), *buffer_addresses]
        numbers = torch.frombuffer(array("q", addresses), dtype=torch.int64)
        if last is None or len(last.addresses) != len(addresses):
            bases = pinned(numbers, device)
        else:
            bases = last.bases  # in place, since launches that were recorded read there
            if last.addresses != addresses:
                rewrite(bases, numbers)
        aligned = not reduce(or_, addresses, 0) % _ALIGNMENT
        if (*key, aligned) not in self._tables:
            encoded, programs = self._encoded([0, *accumulate(map(len, columns))], aligned=aligned)
            table = pinned(torch.frombuffer(encoded, dtype=torch.int64), device)
            self._tables[*key, aligned] = table, len(encoded) // WIDTH, programs
        table, rows, programs = self._tables[*key, aligned]
        self._last[key] = Located(table, bases, rows, programs, self.version, addresses, buffer_addresses)
        return self._last[key]

    def _encoded(self, firsts: Sequence[int], *, aligned: bool) -> tuple[array[int], int]:
        """Return the numbers of all rows, and how many programs work on them.

        Args:
            firsts: The number of the first address of each column, the buffers being the last.
            aligned: Whether all addresses are multiples of 16.
        """
        numbers, programs = array("q"), 0
        for piece in self._places:
            bases = piece.tensor, firsts[1] + piece.tensor, firsts[-1] + piece.buffer
            for kind, starts, lengths, strides in _forms(piece, aligned=aligned):
                numbers.extend((*bases, piece.entry, programs, kind, *starts, *lengths, *strides))
                planes, rows, cols = lengths
                blocks = planes * -(-rows // (STRIDED_ROWS if kind == STRIDED else ROWS)) * -(-cols // COLS)
                programs -= -blocks // self.blocks
        return numbers, programs


_numbers = count()
_living: WeakValueDictionary[int, PieceRows] = WeakValueDictionary()


def rows_of(number: int) -> PieceRows:
    """Return the rows with a number."""
    return _living[number]


def in_three_dims(shape: Sizes, *strides: Sizes) -> Sequence[Sizes] | None:
    """Return a shape and strides of at most 3 dims for the same elements in the same order; None if there are none.

    Dims whose elements follow each other evenly everywhere become one.
    """
    dims: list[tuple[int, ...]] = []  # size, and one stride each
    for size, *steps in zip(shape, *strides, strict=True):
        if dims and all(before == step * size for before, step in zip(dims[-1][1:], steps, strict=True)):
            dims[-1] = dims[-1][0] * size, *steps
        elif size != 1:
            dims.append((size, *steps))
    if len(dims) > 3:
        return None
    return tuple(zip(*dims, strict=True)) if dims else ((),) * (1 + len(strides))


def _forms(piece: Place, *, aligned: bool) -> Iterator[tuple[int, Sizes, Sizes, Sizes]]:
    """Yield kind, starts, lengths and strides of the rows of a piece, those of the tensors before the buffer's."""
    dims = in_three_dims(piece.shape, piece.strides, piece.buffer_strides)
    assert dims is not None
    shape, a, b = dims
    if len(shape) > 1 and a[-2] == 1 != a[-1]:  # neighbors in memory to neighboring threads
        shape, a, b = ((*sizes[:-2], sizes[-1], sizes[-2]) for sizes in (shape, a, b))
    parts = [(0, shape, a, b)]
    if a == b == (1,):
        rest = shape[0] % COLS
        even = shape[0] - rest
        parts = [(0, (even // COLS, COLS), (COLS, 1), (COLS, 1)), (even, (rest,), (1,), (1,))]
    for skipped, *sizes in parts:
        if 0 in sizes[0]:
            continue
        missing = 3 - len(sizes[0])
        lengths = (1,) * missing + sizes[0]
        a, b = ((0,) * missing + steps for steps in sizes[1:])
        starts = piece.start + skipped, piece.buffer_start + skipped
        kind = STRIDED
        if aligned and a[2] == 1 and not any(number % _ALIGNMENT for number in (*starts, lengths[2], *a[:2], b[0])):
            if b[2] == 1 and not b[1] % _ALIGNMENT:
                kind = EVEN
            elif b[1] == 1 and not (lengths[1] % _ALIGNMENT or b[2] % _ALIGNMENT):
                kind = TRANSPOSED
        yield kind, starts, lengths, (*a, *b)
