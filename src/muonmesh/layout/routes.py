"""Routes: the pieces of matrices that travel between the ranks that store them and their owners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from muonmesh.layout.flat import Layout
from muonmesh.layout.matrix import Matrix
from muonmesh.layout.region import Piece, overlap


@dataclass(frozen=True, slots=True)
class Leg:
    """A Piece of one matrix that travels between the storage of a rank and the assembled matrix at the owner.

    Attributes:
        assignment: Number of the matrix's assignment in its plan.
        parameter: Number of its parameter in the plan.
        piece: The places of the elements in the storage and in the assembled matrix.
        start: The place of the first element among all elements that these two ranks exchange.
        exchange: The number of the exchange, counted from the bucket's first in this direction.
    """

    assignment: int
    parameter: int
    piece: Piece
    start: int
    exchange: int = 0


@dataclass(frozen=True)
class Routes:
    """The legs that one rank exchanges for one bucket in one direction, by peer.

    The way back has Routes of its own, because other ranks take part in it if there are replicas, or if momentum is
    sharded over replicas. Otherwise it is the reverse of the way to the owners.

    Both ranks list the legs between them in the same order.

    Attributes:
        stored: The legs whose storage is on this rank, by the rank that has their matrix.
        assembled: The legs whose matrix is on this rank, by the rank that stores them. On the way back, there may also
            be legs of another owner's matrix that this rank has received and passes on.
    """

    stored: Mapping[int, Sequence[Leg]]
    assembled: Mapping[int, Sequence[Leg]]


def append(legs: list[Leg], leg: Leg) -> None:
    """Append a leg to the legs that two ranks exchange, with the place of its first element after all others."""
    start = legs[-1].start + legs[-1].piece.numel if legs else 0
    legs.append(leg if leg.start == start else replace(leg, start=start))


def pieces(layout: Layout, rank: int, matrix: Matrix) -> tuple[Piece, ...]:
    """Return the pieces of a matrix that ``rank`` stores, with their places in the storage and in the matrix."""
    found = (overlap(ours, block) for ours in layout.blocks(rank) for block in matrix.blocks)
    return tuple(piece for piece in found if piece is not None)
