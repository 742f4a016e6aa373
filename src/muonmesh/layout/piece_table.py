"""PieceTable: the pieces of matrices that a rank reads or writes at one time, with their places in its buffers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from muonmesh.layout.flat import Layout
from muonmesh.layout.matrix import Matrix
from muonmesh.layout.region import Piece, overlap, row_major

NOWHERE = -1
"""The buffer of a row whose elements are in no buffer: what is stored is only read, or folded into."""


def pieces(layout: Layout, rank: int, matrix: Matrix) -> tuple[Piece, ...]:
    """Return the pieces of a matrix that ``rank`` stores, with their places in the storage and in the matrix."""
    overlaps = (overlap(stored, block) for stored in layout.blocks(rank) for block in matrix.blocks)
    return tuple(piece for piece in overlaps if piece is not None)


@dataclass(frozen=True, slots=True)
class Row:
    """Elements of one matrix: their places in the storage of a parameter, and in one of several buffers.

    A row that was joined from several rows (`joined`, `evenly`) may be of several matrices that are stepped alike. The
    strides of its piece in a matrix do not count.

    Attributes:
        assignment: Number of the matrix's assignment in its plan; of several matrices the first one's.
        parameter: Number of its parameter in the plan.
        piece: The places of the elements in the storage and in the assembled matrix.
        buffer: The number of the buffer, or `NOWHERE`.
        start: The place of the first element in the buffer.
        strides: The strides in the buffer.
        exchange: The number of the exchange in which the elements travel, counted from the bucket's first in this
            direction.
    """

    assignment: int
    parameter: int
    piece: Piece
    buffer: int = NOWHERE
    start: int = 0
    strides: tuple[int, ...] = ()
    exchange: int = 0

    def in_matrix(self, buffer: int, start: int) -> Row:
        """Return this row in a buffer in which its assembled matrix begins at element ``start``."""
        piece = self.piece
        return Row(self.assignment, self.parameter, piece, buffer, start + piece.matrix_start, piece.matrix_strides)

    def on_wire(self, buffer: int, start: int) -> Row:
        """Return this row in a buffer in which its elements follow each other from element ``start`` on."""
        return Row(self.assignment, self.parameter, self.piece, buffer, start, row_major(self.piece.shape))


@dataclass(frozen=True, eq=False)
class PieceTable:
    """Rows, made once for a plan. Code that runs them may keep what it made of them in ``derived``, by its own key."""

    rows: tuple[Row, ...] = ()
    derived: dict[Hashable, Any] = field(default_factory=dict)

    @cached_property
    def parameters(self) -> dict[int, int]:
        """The parameters of the rows, each with its place among them."""
        numbers = dict.fromkeys(row.parameter for row in self.rows)
        return {parameter: position for position, parameter in enumerate(numbers)}

    def numbered(self, rows: Sequence[Row]) -> tuple[list[int], list[int]]:
        """Return the places of rows among `parameters`, each once, and for each row the number of its place."""
        numbers: dict[int, int] = {}
        of_rows = [numbers.setdefault(self.parameters[row.parameter], len(numbers)) for row in rows]
        return list(numbers), of_rows

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return what ``make`` returned when this was first called with the key."""
        if key not in self.derived:
            self.derived[key] = make()
        return self.derived[key]


def joined(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Return the same elements as fewer rows: equal rows at even distances are joined into one with another dim.

    So the rows that all ranks of FSDP hold of a matrix arrive in a single copy, not in one copy for each rank. Results
    for the ranks of each replica leave in a single copy, not in one copy for each replica.
    """
    ordered = tuple(rows)
    fewer: list[Row] = []
    first = 0
    while first < len(ordered):
        head, end, steps = ordered[first], first + 1, (0, 0)
        while end < len(ordered) and _alike(head, ordered[end]):
            apart = _distance(ordered[end - 1], ordered[end])
            if apart[0] < 0 or (end > first + 1 and apart != steps):  # as_strided takes no negative strides
                break
            steps, end = apart, end + 1
        if end > first + 1:  # a step of 0 if each replica gets the same elements
            shape, piece = (end - first, *head.piece.shape), head.piece
            piece = replace(piece, shape=shape, storage_strides=(steps[1], *piece.storage_strides))
            head = replace(head, piece=piece, strides=(steps[0], *head.strides))
        fewer.append(head)
        first = end
    return tuple(fewer) if len(fewer) == len(ordered) else joined(fewer)


def evenly(rows: Sequence[Row]) -> Row | None:
    """Return rows of one form, of several matrices of one parameter, as one row with another dim at the front.

    Returns:
        None for a single row, or if the rows do not lie one after the other at even distances in storage and buffer.
    """
    head, *others = rows
    if not others or any(other.parameter != head.parameter for other in others):
        return None
    apart = [_distance(before, after) for before, after in itertools.pairwise(rows)]
    (buffer_step, storage_step), *_ = apart
    if min(buffer_step, storage_step) <= 0 or any(distance != (buffer_step, storage_step) for distance in apart):
        return None
    piece = head.piece
    piece = replace(piece, shape=(len(rows), *piece.shape), storage_strides=(storage_step, *piece.storage_strides))
    return replace(head, piece=piece, strides=(buffer_step, *head.strides))


def _alike(first: Row, other: Row) -> bool:
    form, form_of_other = (
        (row.assignment, row.buffer, row.strides, row.piece.shape, row.piece.storage_strides) for row in (first, other)
    )
    return form == form_of_other


def _distance(first: Row, other: Row) -> tuple[int, int]:
    return other.start - first.start, other.piece.storage_start - first.piece.storage_start
