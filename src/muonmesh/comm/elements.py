"""Elements: the pieces of a table with the buffers of one step, as an exchange passes them to its work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from muonmesh.layout.piece_table import NOWHERE, PieceTable, Row


class Elements:
    """The rows of a table with their elements in buffers.

    Args:
        table: The table, made once for a plan.
        buffers: The buffers that its rows name, contiguous.
    """

    def __init__(self, table: PieceTable, buffers: Sequence[Tensor]) -> None:
        self.table, self.buffers = table, buffers

    def view(self, row: Row) -> Tensor | None:
        """Return a view of a row's elements in its buffer, in the shape of its piece; None if it is in no buffer."""
        return None if row.buffer == NOWHERE else in_buffer(self.buffers[row.buffer], row)

    def __iter__(self) -> Iterator[tuple[Row, Tensor]]:
        """Iterate over the rows that are in a buffer, with their views."""
        return ((row, view) for row in self.table.rows if (view := self.view(row)) is not None)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.table.rows)


def in_buffer(buffer: Tensor, row: Row) -> Tensor:
    """Return a view of the elements of a row in its buffer, in the shape of its piece."""
    return buffer.as_strided(row.piece.shape, row.strides, buffer.storage_offset() + row.start)
