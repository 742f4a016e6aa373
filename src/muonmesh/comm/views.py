"""Views of a piece's elements in a storage and in a buffer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from muonmesh.layout import Piece
from muonmesh.layout.piece_table import NOWHERE, PieceTable, Row


def view_in_storage(storage: Tensor, piece: Piece) -> Tensor:
    """Return a view of a piece's elements in a contiguous local storage."""
    if piece.storage_start == 0 and piece.shape == storage.shape:
        return storage  # the common case: the piece is the whole storage
    start = storage.storage_offset() + piece.storage_start
    return storage.as_strided(piece.shape, piece.storage_strides, start)


@dataclass(frozen=True, slots=True, eq=False)
class Elements:
    """The rows of a table with their elements in buffers.

    Attributes:
        table: The table, made once for a plan.
        buffers: The buffers that its rows name, contiguous.
    """

    table: PieceTable
    buffers: Sequence[Tensor]
    # By the identity of a row, which lives as long as its view.
    _views: dict[int, tuple[Row, Tensor]] = field(default_factory=dict, init=False, repr=False)

    def view(self, row: Row) -> Tensor | None:
        """Return a view of a row's elements in its buffer, in the shape of its piece; None if it is in no buffer."""
        if (entry := self._views.get(id(row))) is not None:
            return entry[1]
        if row.buffer == NOWHERE:
            return None
        view = in_buffer(self.buffers[row.buffer], row)
        self._views[id(row)] = row, view
        return view

    def __iter__(self) -> Iterator[tuple[Row, Tensor]]:
        """Iterate over the rows that are in a buffer, with their views."""
        return ((row, view) for row in self.table.rows if (view := self.view(row)) is not None)


def by_shape(buffer: Tensor, shapes: Sequence[tuple[int, int, int]]) -> tuple[Tensor, ...]:
    """Return the batches of matrices that follow each other in a buffer, a view for each shape (b, rows, cols)."""
    if len(shapes) == 1:
        return (buffer.view(shapes[0]),)
    parts = torch.split(buffer, [math.prod(shape) for shape in shapes])
    return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))


def in_buffer(buffer: Tensor, row: Row) -> Tensor:
    """Return a view of the elements of a row in its buffer, in the shape of its piece."""
    return buffer.as_strided(row.piece.shape, row.strides, buffer.storage_offset() + row.start)
