"""PackedAllToAll: the pieces that one collective moves between a rank and its peers, in its two wire buffers."""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from torch import Tensor

from muonmesh.comm.communicator import AllToAll
from muonmesh.comm.views import in_buffer, view_in_storage
from muonmesh.layout.piece_table import PieceTable, Row, joined
from muonmesh.layout.plan import Routes

CopyPairs = tuple[tuple[Tensor, Tensor], ...]
"""Pairs of tensors to copy, (to, from), both of the same shape."""


class PackedAllToAll:
    """The pieces that one collective moves between this rank and its peers, in one direction.

    Args:
        name: "gather" (from storages to matrices) or "scatter" (from matrices to storages).
        routes: The rows of this rank, by peer.
        rank: The rank of this process.
        peers: All ranks, in the order of their process group.
        owned: The assignments whose matrices are on this rank; None: all that are assembled here.

    Attributes:
        stored: The rows whose storage is on this rank, by peer.
        leaving: The rows that this rank sends.
        sent, received: The elements that this rank sends to each peer, and receives from each.
        sends, receives: Their sums.
    """

    def __init__(
        self, name: str, routes: Routes, rank: int, peers: Sequence[int], owned: Container[int] | None = None
    ) -> None:
        self.stored = routes.stored
        assembled = {row.assignment for rows in routes.assembled.values() for row in rows}
        self._owned = assembled if owned is None else owned
        (self._in_storage, in_storage), (self._in_matrices, in_matrices) = (
            _in_order(rows_by_peer, rank, peers) for rows_by_peer in (routes.stored, routes.assembled)
        )
        gathers = name == "gather"
        self.sent, self.received = (in_storage, in_matrices) if gathers else (in_matrices, in_storage)
        self.leaving = self._in_storage if gathers else self._in_matrices
        self.sends, self.receives = sum(self.sent), sum(self.received)

    @cached_property
    def _passed_on(self) -> list[Row]:
        """The rows of other owners' matrices that this rank sends, in the send buffer."""
        return [row for row in self._in_matrices if row.assignment not in self._owned]

    @property
    def copies_results(self) -> bool:
        """Whether this rank sends elements of its own matrices."""
        return bool(self._copies)

    def sends_as(self, other: PackedAllToAll) -> bool:
        """Whether this all-to-all and another one send the same elements of this rank's matrices in the same order."""
        return self._copies == other._copies and not self._passed_on and not other._passed_on

    def passed_on(self, arrived: PackedAllToAll, receive: Tensor, send: Tensor) -> CopyPairs:
        """Return the copies for results that are passed on: from the previous receive buffer to the send buffer."""
        if not self._passed_on:
            return ()
        rows = {(row.assignment, row.piece): row for row in arrived.arriving.rows}
        pairs = [(row, rows[row.assignment, row.piece]) for row in self._passed_on]
        return tuple((in_buffer(send, to), in_buffer(receive, of)) for to, of in pairs)

    def all_to_all(self, name: str, send: Tensor, receive: Tensor) -> AllToAll:
        """Return the collective that moves these pieces; ``send`` and ``receive`` must be large enough."""
        return AllToAll(name, send[: self.sends], receive[: self.receives], self.sent, self.received)

    def on_wire(self, buffer: int) -> list[Row]:
        """Return the rows that leave or reach this rank's storage; ``buffer`` is the number of the wire buffer."""
        return [replace(row, buffer=buffer) for row in self._in_storage]

    @cached_property
    def arriving(self) -> PieceTable:
        """The rows that reach this rank's storage by a scatter."""
        return PieceTable(tuple(self._in_storage))

    def copies(self, matrices: Mapping[int, Tensor], wire: Tensor) -> CopyPairs:
        """Return pairs of views of this rank's travelling elements: in their matrix, and in a wire buffer."""
        return tuple(
            (in_buffer(matrices[row.assignment], row), view_in_storage(wire, row.piece)) for row in self._copies
        )

    @cached_property
    def _copies(self) -> tuple[Row, ...]:
        """The rows of this rank's matrices that travel, by assignment; their storage is the wire buffer."""
        rows_of: dict[int, list[Row]] = {}
        for row in self._in_matrices:
            if row.assignment in self._owned:
                piece = replace(row.piece, storage_start=row.start, storage_strides=row.strides)
                rows_of.setdefault(row.assignment, []).append(replace(row, piece=piece).in_matrix(0, 0))
        return joined(itertools.chain.from_iterable(rows_of.values()))


def _in_order(
    rows_by_peer: Mapping[int, Sequence[Row]], rank: int, peers: Sequence[int]
) -> tuple[list[Row], list[int]]:
    """Return the rows that travel, in a wire buffer, and the elements of each rank's segment."""
    rows, sizes, start = list[Row](), [], 0
    for peer in peers:
        first = start
        for row in rows_by_peer.get(peer, ()) if peer != rank else ():
            rows.append(row.on_wire(0, start))
            start += row.piece.numel
        sizes.append(start - first)
    return rows, sizes
