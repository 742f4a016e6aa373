"""Passage: the pieces that one collective moves between a rank and its peers, copied to and from the wire buffer."""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from muonmesh.comm.stages import Copies, Swap
from muonmesh.layout.region import row_major
from muonmesh.layout.routes import Leg


@dataclass(frozen=True, slots=True)
class _Copy:
    """One strided copy between an assembled matrix and a wire buffer."""

    shape: tuple[int, ...]
    matrix_start: int
    matrix_strides: tuple[int, ...]
    wire_start: int
    wire_strides: tuple[int, ...]


class Passage:
    """The pieces that one collective moves between this rank and its peers, in one direction.

    Args:
        name: "gather" or "scatter": which end is the sender.
        stored: Legs whose storage is on this rank, by the peer that has their matrix.
        assembled: Legs whose matrix is, by the peer that stores them.
        rank: This one.
        peers: All ranks, in the order of their process group.
        owned: The assignments whose matrices are on this rank; None: all of ``assembled``.
    """

    def __init__(
        self,
        name: str,
        stored: Mapping[int, Sequence[Leg]],
        assembled: Mapping[int, Sequence[Leg]],
        rank: int,
        peers: Sequence[int],
        owned: Container[int] | None = None,
    ) -> None:
        self._owned = {leg.assignment for some in assembled.values() for leg in some} if owned is None else owned
        self._name, self.stored, self._assembled, self._rank, self._peers = name, stored, assembled, rank, peers
        in_storage, in_matrices = self._sizes(stored), self._sizes(assembled)
        self._sent, self._received = (in_storage, in_matrices) if name == "gather" else (in_matrices, in_storage)
        self._starts_held = dict(zip(peers, itertools.accumulate(in_storage, initial=0), strict=False))
        self._starts_assembled = dict(zip(peers, itertools.accumulate(in_matrices, initial=0), strict=False))

    def _sizes(self, legs: Mapping[int, Sequence[Leg]]) -> list[int]:
        """Return the elements of each rank's segment of a wire buffer."""
        return [
            0 if peer == self._rank or not legs.get(peer) else legs[peer][-1].start + legs[peer][-1].piece.numel
            for peer in self._peers
        ]

    @cached_property
    def _passed_on(self) -> list[tuple[Leg, int]]:
        """What leaves of matrices of other owners, with its place in the send buffer."""
        return [
            (leg, self._starts_assembled[peer] + leg.start)
            for peer, some in self._assembled.items()
            if peer != self._rank
            for leg in some
            if leg.assignment not in self._owned
        ]

    @property
    def passes(self) -> bool:
        """Whether this rank passes on what has arrived in the exchange before."""
        return bool(self._passed_on)

    def passed_on(self, arrived: Passage, receive: Tensor, send: Tensor) -> Copies:
        """Return what is passed on, each time in the send buffer and in the receive buffer of the exchange before."""
        places = {
            (leg.assignment, leg.piece): arrived._starts_held[peer] + leg.start
            for peer, some in arrived.stored.items()
            for leg in some
        }
        pairs = [(start, places[leg.assignment, leg.piece], leg.piece.numel) for leg, start in self._passed_on]
        return tuple((send[to : to + numel], receive[of : of + numel]) for to, of, numel in pairs)

    @property
    def numels(self) -> dict[str, int]:
        """How much memory is needed by role."""
        return {f"{self._name}.send": sum(self._sent), f"{self._name}.receive": sum(self._received)}

    def sends_as(self, other: Passage) -> bool:
        """Whether the same elements of this rank's matrices leave in the same order."""
        return self._copies == other._copies and not self.passes and not other.passes

    def swap(self, what: str, memory: Mapping[str, Tensor]) -> Swap:
        """Return what moves, with its views of the memory."""
        send = memory[f"{self._name}.send"][: sum(self._sent)]
        receive = memory[f"{self._name}.receive"][: sum(self._received)]
        return Swap(what, send, receive, self._sent, self._received)

    def on_wire(self, buffer: Tensor) -> list[tuple[Leg, Tensor]]:
        """Return the legs that leave or reach this rank's storage, with their elements in a wire buffer."""
        starts, first = self._starts_held, buffer.storage_offset()
        return [
            (leg, buffer.as_strided(leg.piece.shape, row_major(leg.piece.shape), first + starts[peer] + leg.start))
            for peer, some in self.stored.items()
            if peer != self._rank
            for leg in some
        ]

    def copies(self, matrices: Mapping[int, Tensor], buffer: Tensor) -> Copies:
        """Return the elements of this rank's matrices that travel, each time in the matrix and in a wire buffer."""
        return _views(self._copies, matrices, buffer)

    @cached_property
    def _copies(self) -> list[tuple[int, _Copy]]:
        found: dict[int, list[_Copy]] = {}
        for peer in self._peers:
            for leg in self._assembled.get(peer, ()) if peer != self._rank else ():
                if leg.assignment not in self._owned:
                    continue
                piece = leg.piece
                copy = _Copy(
                    piece.shape,
                    piece.matrix_start,
                    piece.matrix_strides,
                    self._starts_assembled[peer] + leg.start,
                    row_major(piece.shape),
                )
                found.setdefault(leg.assignment, []).append(copy)
        return [(number, copy) for number, some in found.items() for copy in _joined(some)]


def _views(copies: Sequence[tuple[int, _Copy]], matrices: Mapping[int, Tensor], buffer: Tensor) -> Copies:
    """Return for each copy its elements of the matrix and of a wire buffer."""
    pairs, first = [], buffer.storage_offset()
    for number, copy in copies:
        matrix = matrices[number]
        start = matrix.storage_offset() + copy.matrix_start
        on_wire = buffer.as_strided(copy.shape, copy.wire_strides, first + copy.wire_start)
        pairs.append((matrix.as_strided(copy.shape, copy.matrix_strides, start), on_wire))
    return tuple(pairs)


def _joined(copies: Sequence[_Copy]) -> list[_Copy]:
    """Return the same copies as fewer: equal ones at even distances in both memories are one with another dim.

    So the rows that all ranks of FSDP hold of a matrix arrive in one copy and not in one for each rank; and what the
    ranks of each replica are sent leaves in one copy and not in one for each replica.
    """
    fewer = _joined_once(copies)
    return fewer if len(fewer) == len(copies) else _joined(fewer)


def _joined_once(copies: Sequence[_Copy]) -> list[_Copy]:
    joined: list[_Copy] = []
    first = 0
    while first < len(copies):
        one, end = copies[first], first + 1
        if end < len(copies):
            matrix_step = copies[end].matrix_start - one.matrix_start
            wire_step = copies[end].wire_start - one.wire_start
            while (
                end < len(copies)
                and (copies[end].shape, copies[end].matrix_strides) == (one.shape, one.matrix_strides)
                and copies[end].wire_strides == one.wire_strides
                and copies[end].matrix_start == one.matrix_start + (end - first) * matrix_step
                and copies[end].wire_start == one.wire_start + (end - first) * wire_step
                and matrix_step >= 0  # 0 where each replica is sent the same; as_strided knows no steps back
            ):
                end += 1
        if end == first + 1:
            joined.append(one)
        else:
            shape = (end - first, *one.shape)
            strides = (matrix_step, *one.matrix_strides), (wire_step, *one.wire_strides)
            joined.append(_Copy(shape, one.matrix_start, strides[0], one.wire_start, strides[1]))
        first = end
    return joined
