"""Tables of pieces: the places of many pieces in the tensors that hold them, as numbers that a kernel reads.

A table is made once and stays on the device. The tensors may move from step to step, so a table has no addresses, but
the numbers of addresses in a second, short vector, which is uploaded again only when one of them has changed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from itertools import accumulate, chain, count
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from muonmesh.numerics.kernels.memory import pinned, rewrite
from muonmesh.numerics.kernels.triton_launch import device_of, stream_of

WIDTH = 17
"""Numbers of each piece in a table: the numbers of three addresses, and the numbers named below."""
ENTRY, FIRST_PROGRAM, KIND, STARTS, LENGTHS, STRIDES = 3, 4, 5, 6, 8, 11

FLAT, STRIDED, TRANSPOSED = 0, 1, 2
"""Kinds: contiguous everywhere, in any order, and with contiguous rows in the storage and contiguous columns in the
buffer. All that is flat or transposed can be moved 16 bytes at a time."""

ROWS, COLS, STRIDED_ROWS = 64, 32, 16
"""A block of a matrix; of a flat piece it is as many elements, and of a strided one it has fewer rows."""

BLOCKS = 4
"""Number of blocks that one program works on, one after the other."""

_ALIGNMENT = 16
"""Bytes of an address, and elements of starts and strides, which is enough for every dtype."""

Sizes = tuple[int, ...]


class Place(NamedTuple):
    """Where a piece lies: in a tensor of each of the first two columns, and in a buffer, the third column.

    Attributes:
        tensor: The number of its tensor in the first and in the second column.
        buffer: The number of its buffer.
        entry: Its entry in vectors with one entry for one or more pieces.
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
    """What a launch is told of the tensors of its rows.

    Attributes:
        table: The table, on the device.
        bases: The addresses of the tensors, on the device; the same memory from step to step.
        rows: The number of rows.
        programs: The number of programs.
    """

    table: Tensor
    bases: Tensor
    rows: int
    programs: int


class _Last(NamedTuple):
    """What the last launch has read.

    Attributes:
        version: See `Rows`.
        buffers: The addresses of the buffers.
        addresses: All addresses.
        located: What the launch was told.
    """

    version: object
    buffers: list[int]
    addresses: list[int]
    located: Located


class Rows(ABC):
    """The rows of pieces that one launch works on, and what it needs of them on a device.

    Args:
        numels: The number of elements of each piece.

    Attributes:
        number: A number by which operators name this object, as torch's operators take no others (`rows_of`).
        numels: See above.
        version: Whatever stays the same object as long as all tensors but buffers are where they were; None if that is
            unknown. Then `of` looks at the addresses of all tensors.
    """

    def __init__(self, numels: Sequence[int]) -> None:
        self.numels = numels
        self.version: object = None
        self._tables: dict[object, tuple[Tensor, int]] = {}
        self._last: dict[object, _Last] = {}
        self.number = next(_numbers)
        _living[self.number] = self

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.numels)

    def of(self, *columns: Sequence[Tensor], buffers: Sequence[Tensor] = ()) -> Located:
        """Return what the launch is told of the tensors.

        Args:
            columns: The tensors of each column but the last, on one device, in the same order.
            buffers: The tensors of the last column.
        """
        device = device_of(columns[0][0])
        where = device, stream_of(device)  # the stream that has written them
        last, there = self._last.get(where), [*map(Tensor.data_ptr, buffers)]
        if last is not None and last.version is self.version is not None and last.buffers == there:
            return last.located
        addresses = [*map(Tensor.data_ptr, chain(*columns)), *there]
        numbers = torch.frombuffer(array("q", addresses), dtype=torch.int64)
        if last is None or len(last.addresses) != len(addresses):
            bases = pinned(numbers, device)
        else:
            bases = last.located.bases  # in place, since launches that were recorded read there
            if last.addresses != addresses:
                rewrite(bases, numbers)
        aligned = not any([address % _ALIGNMENT for address in addresses])
        if (*where, aligned) not in self._tables:
            encoded, programs = self._encoded([0, *accumulate(map(len, (*columns, buffers)))], aligned=aligned)
            self._tables[*where, aligned] = pinned(torch.frombuffer(encoded, dtype=torch.int64), device), programs
        table, programs = self._tables[*where, aligned]
        located = Located(table, bases, len(self), programs)
        self._last[where] = _Last(self.version, there, addresses, located)
        return located

    @abstractmethod
    def _encoded(self, firsts: Sequence[int], *, aligned: bool) -> tuple[array[int], int]:
        """Return the numbers of all rows, and how many programs work on them.

        Args:
            firsts: The number of the first address of each column.
            aligned: Whether all addresses are multiples of 16.
        """


class FlatRows(Rows):
    """Rows of contiguous pieces of one column: number of the address, start, entry, first program, elements.

    Args:
        places: For each piece, which is not empty, the number of its tensor, its entry in vectors, its first element,
            and its number of elements.
        portion: The number of elements that one program works on.
    """

    def __init__(self, places: Sequence[tuple[int, int, int, int]], portion: int) -> None:
        super().__init__([numel for *_, numel in places])
        self._places, self._portion = places, portion

    def _encoded(self, firsts: Sequence[int], *, aligned: bool) -> tuple[array[int], int]:
        numbers, programs = array("q"), 0
        for tensor, entry, start, numel in self._places:
            numbers.extend((tensor, start, entry, programs, numel))
            programs -= -numel // self._portion
        return numbers, programs


class PieceRows(Rows):
    """Rows of pieces of two columns and of buffers, of any strides; see `WIDTH`.

    Args:
        places: The pieces. Empty ones are left out.

    Raises:
        ValueError: a piece has no 3 dims (`in_three_dims`).
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = [place for place in places if 0 not in place.shape]
        super().__init__([math.prod(place.shape) for place in self._places])
        for number, place in enumerate(self._places):
            if in_three_dims(place.shape, place.strides, place.buffer_strides) is None:
                found, write = f"shape {place.shape} with strides {place.strides}", "Step it by torch's operations"
                raise ValueError(f"piece {number}: found {found}; needed at most 3 dims. {write}")

    def _encoded(self, firsts: Sequence[int], *, aligned: bool) -> tuple[array[int], int]:
        (_, second, third, *_), numbers, programs = firsts, array("q"), 0
        for place in self._places:
            kind, lengths, strides, blocks = _form(place, aligned=aligned)
            bases = place.tensor, second + place.tensor, third + place.buffer
            numbers.extend((*bases, place.entry, programs, kind, place.start, place.buffer_start, *lengths, *strides))
            programs -= -blocks // BLOCKS
        return numbers, programs


_numbers = count()
_living: WeakValueDictionary[int, Rows] = WeakValueDictionary()


def rows_of(number: int) -> Rows:
    """Return the rows with a number."""
    return _living[number]


def in_three_dims(shape: Sizes, *strides: Sizes) -> Sequence[Sizes] | None:
    """Return a shape and strides of at most 3 dims for the same elements in the same order; None if there are none.

    Of more than 3 dims, those whose elements follow each other evenly everywhere become one.
    """
    if len(shape) <= 3:
        return shape, *strides
    found = _merged(shape, *strides)
    return found if len(found[0]) <= 3 else None


def _merged(shape: Sizes, *strides: Sizes) -> Sequence[Sizes]:
    dims: list[tuple[int, ...]] = []  # size, and one stride each
    for size, *steps in zip(shape, *strides, strict=True):
        if dims and all(before == step * size for before, step in zip(dims[-1][1:], steps, strict=True)):
            dims[-1] = dims[-1][0] * size, *steps
        elif size != 1:
            dims.append((size, *steps))
    return tuple(zip(*dims, strict=True)) if dims else ((),) * (1 + len(strides))


def _form(place: Place, *, aligned: bool) -> tuple[int, Sizes, Sizes, int]:
    """Return kind, lengths and strides of a piece, the strides of the tensors first, and its number of blocks."""
    shape, a, b = _merged(place.shape, place.strides, place.buffer_strides)
    starts = place.start, place.buffer_start
    if aligned and a in ((), (1,)) and b in ((), (1,)) and not any(start % _ALIGNMENT for start in starts):
        numel = shape[0] if shape else 1
        return FLAT, (1, 1, numel), (0,) * 6, -(-numel // (ROWS * COLS))
    shape, a, b = in_three_dims(place.shape, place.strides, place.buffer_strides) or (shape, a, b)
    if len(shape) > 1 and a[-2] == 1 != a[-1]:  # neighbors in memory to neighboring threads
        shape, a, b = ((*sizes[:-2], sizes[-1], sizes[-2]) for sizes in (shape, a, b))
    missing = 3 - len(shape)
    planes, rows, cols = lengths = (1,) * missing + shape
    a, b = (0,) * missing + a, (0,) * missing + b
    steps = *starts, rows, cols, a[0], a[1], b[0], b[2]
    transposed = aligned and a[2] == b[1] == 1 and not any(step % _ALIGNMENT for step in steps)
    kind, high = (TRANSPOSED, ROWS) if transposed else (STRIDED, STRIDED_ROWS)
    return kind, lengths, (*a, *b), planes * -(-rows // high) * -(-cols // COLS)
