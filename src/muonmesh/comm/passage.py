"""Passage: the pieces that one collective moves between a rank and its peers, copied to and from the wire buffer."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from torch import Tensor

from muonmesh.comm.views import view_in_matrix, view_in_storage
from muonmesh.comm.wire import Swap
from muonmesh.layout import Piece
from muonmesh.layout.region import row_major
from muonmesh.layout.routes import Leg, Routes

CopyPairs = tuple[tuple[Tensor, Tensor], ...]
"""Pairs of tensors to copy, (to, from), both of the same shape."""


class Passage:
    """The pieces that one collective moves between this rank and its peers, in one direction.

    Args:
        name: "gather" (from storages to matrices) or "scatter" (from matrices to storages).
        routes: The legs of this rank, by peer.
        rank: The rank of this process.
        peers: All ranks, in the order of their process group.
        owned: The assignments whose matrices are on this rank; None: all that are assembled here.

    Attributes:
        sends, receives: The numbers of elements that this rank sends and receives.
    """

    def __init__(
        self, name: str, routes: Routes, rank: int, peers: Sequence[int], owned: Container[int] | None = None
    ) -> None:
        self.stored, self._assembled, self._rank, self._peers = routes.stored, routes.assembled, rank, peers
        self._owned = {leg.assignment for some in self._assembled.values() for leg in some} if owned is None else owned
        in_storage, in_matrices = self._sizes(self.stored), self._sizes(self._assembled)
        self._sent, self._received = (in_storage, in_matrices) if name == "gather" else (in_matrices, in_storage)
        self.sends, self.receives = sum(self._sent), sum(self._received)
        self._starts_held = dict(zip(peers, itertools.accumulate(in_storage, initial=0), strict=False))
        self._starts_assembled = dict(zip(peers, itertools.accumulate(in_matrices, initial=0), strict=False))

    def _sizes(self, legs: Mapping[int, Sequence[Leg]]) -> list[int]:
        """Return the number of elements of each rank's segment in a wire buffer."""
        return [
            0 if peer == self._rank or not legs.get(peer) else legs[peer][-1].start + legs[peer][-1].piece.numel
            for peer in self._peers
        ]

    @cached_property
    def _passed_on(self) -> list[tuple[Leg, int]]:
        """The legs of other owners' matrices that this rank sends, each with its place in the send buffer."""
        return [(leg, start) for leg, start in self._leaving if leg.assignment not in self._owned]

    @property
    def passes(self) -> bool:
        """Whether this rank passes on results that arrived in the previous exchange."""
        return bool(self._passed_on)

    def passed_on(self, arrived: Passage, receive: Tensor, send: Tensor) -> CopyPairs:
        """Return the copies for results that are passed on: from the previous receive buffer to the send buffer."""
        found = {(leg.assignment, leg.piece): view for leg, view in arrived.on_wire(receive)}
        return tuple(
            (_contiguous(send, leg.piece, start), found[leg.assignment, leg.piece]) for leg, start in self._passed_on
        )

    def sends_as(self, other: Passage) -> bool:
        """Whether this passage and another one send the same elements of this rank's matrices in the same order."""
        return self._copies == other._copies and not self.passes and not other.passes

    def swap(self, what: str, send: Tensor, receive: Tensor) -> Swap:
        """Return the collective of this passage; ``send`` and ``receive`` must be large enough."""
        return Swap(what, send[: self.sends], receive[: self.receives], self._sent, self._received)

    def on_wire(self, buffer: Tensor) -> list[tuple[Leg, Tensor]]:
        """Return the legs that leave or reach this rank's storage, with their elements in a wire buffer."""
        return [
            (leg, _contiguous(buffer, leg.piece, self._starts_held[peer] + leg.start))
            for peer, some in self.stored.items()
            if peer != self._rank
            for leg in some
        ]

    def copies(self, matrices: Mapping[int, Tensor], buffer: Tensor) -> CopyPairs:
        """Return pairs of views of this rank's travelling elements: in their matrix, and in a wire buffer."""
        return tuple(
            (view_in_matrix(piece, matrices[number]), view_in_storage(buffer, piece)) for number, piece in self._copies
        )

    @property
    def _leaving(self) -> Iterator[tuple[Leg, int]]:
        """The legs of matrices that travel, each with its place in a wire buffer."""
        for peer in self._peers:
            for leg in self._assembled.get(peer, ()) if peer != self._rank else ():
                yield leg, self._starts_assembled[peer] + leg.start

    @cached_property
    def _copies(self) -> list[tuple[int, Piece]]:
        """The pieces of this rank's matrices that travel, by assignment, as they are stored in a wire buffer."""
        found: dict[int, list[Piece]] = {}
        for leg, start in self._leaving:
            if leg.assignment in self._owned:
                piece = replace(leg.piece, storage_start=start, storage_strides=row_major(leg.piece.shape))
                found.setdefault(leg.assignment, []).append(piece)
        return [(number, piece) for number, some in found.items() for piece in _joined(some)]


def in_matrices(legs: Iterable[Leg], matrices: Mapping[int, Tensor]) -> list[tuple[Leg, Tensor]]:
    """Return legs with views of their elements in ``matrices``, a mapping from assignment to matrix."""
    return [(leg, view_in_matrix(leg.piece, matrices[leg.assignment])) for leg in legs]


def _contiguous(buffer: Tensor, piece: Piece, start: int) -> Tensor:
    return buffer.as_strided(piece.shape, row_major(piece.shape), buffer.storage_offset() + start)


def _joined(copies: Sequence[Piece]) -> Sequence[Piece]:
    """Return the same copies as fewer pieces: equal pieces at even distances are joined into one with another dim.

    So the rows that all ranks of FSDP hold of a matrix arrive in a single copy, not in one copy for each rank. Results
    for the ranks of each replica leave in a single copy, not in one copy for each replica.
    """
    fewer: list[Piece] = []
    first = 0
    while first < len(copies):
        one, end, steps = copies[first], first + 1, (0, 0)
        while end < len(copies) and _alike(one, copies[end]):
            apart = _distance(copies[end - 1], copies[end])
            if apart[0] < 0 or (end > first + 1 and apart != steps):  # as_strided takes no negative strides
                break
            steps, end = apart, end + 1
        if end > first + 1:  # a step of 0 if each replica gets the same elements
            shape, on_wire = (end - first, *one.shape), (steps[1], *one.storage_strides)
            one = Piece(shape, one.storage_start, on_wire, one.matrix_start, (steps[0], *one.matrix_strides))
        fewer.append(one)
        first = end
    return fewer if len(fewer) == len(copies) else _joined(fewer)


def _alike(one: Piece, other: Piece) -> bool:
    moved = replace(other, storage_start=one.storage_start, matrix_start=one.matrix_start)
    return moved == one


def _distance(one: Piece, other: Piece) -> tuple[int, int]:
    return other.matrix_start - one.matrix_start, other.storage_start - one.storage_start
