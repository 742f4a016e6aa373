"""Routes: the pieces of matrices that travel between the ranks that store them and their owners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
        exchange: The number of the exchange, counted from the bucket's first in this direction.
    """

    assignment: int
    parameter: int
    piece: Piece
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

    def only(self, exchange: int) -> Routes:
        """Return the legs of one exchange."""

        def of(legs: Mapping[int, Sequence[Leg]]) -> dict[int, list[Leg]]:
            return {peer: [leg for leg in some if leg.exchange == exchange] for peer, some in legs.items()}

        return Routes(of(self.stored), of(self.assembled))


def pieces(layout: Layout, rank: int, matrix: Matrix) -> tuple[Piece, ...]:
    """Return the pieces of a matrix that ``rank`` stores, with their places in the storage and in the matrix."""
    found = (overlap(ours, block) for ours in layout.blocks(rank) for block in matrix.blocks)
    return tuple(piece for piece in found if piece is not None)
