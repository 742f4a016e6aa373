"""Routes: the pieces of matrices that travel between those who hold them and those who own them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from muonmesh.layout.flat import Layout
from muonmesh.layout.matrix import Matrix
from muonmesh.layout.region import Piece, overlap


@dataclass(frozen=True, slots=True)
class Leg:
    """A Piece of one assignment that travels between a holder's storage and the assembled matrix at its owner.

    Attributes:
        assignment: Number of the assignment in its plan.
        parameter: Number of its parameter there.
        piece: Where the same elements lie in that storage and in that matrix.
        start: Where they begin among the elements that these two ranks exchange.
    """

    assignment: int
    parameter: int
    piece: Piece
    start: int


@dataclass(frozen=True)
class Routes:
    """What one rank exchanges for one bucket, one way, by peer.

    The way back has Routes of its own, for other ranks take part in it where there are replicas, or momentum that
    is sharded over replicas. Where there are none, it is the way there read backwards.

    Both ends list the legs between two ranks in the same order.

    Attributes:
        stored: The legs whose storage is on this rank, by the rank that has their matrix.
        assembled: The legs whose matrix is on this rank, by the rank that stores them. On the way back they may also be
            of a matrix of which this rank has been sent a part, and passes it on.
    """

    stored: dict[int, tuple[Leg, ...]]
    assembled: dict[int, tuple[Leg, ...]]


def append(legs: list[Leg], leg: Leg) -> None:
    """Add a leg to those that two ranks exchange, after those before it."""
    start = legs[-1].start + legs[-1].piece.numel if legs else 0
    legs.append(leg if leg.start == start else replace(leg, start=start))


def pieces(layout: Layout, rank: int, matrix: Matrix) -> tuple[Piece, ...]:
    """Return what ``rank`` stores of a matrix, with its place in the storage and in the matrix."""
    found = (overlap(ours, block) for ours in layout.blocks(rank) for block in matrix.blocks)
    return tuple(piece for piece in found if piece is not None)
