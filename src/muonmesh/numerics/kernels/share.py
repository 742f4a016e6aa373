"""TeamShare: a rank's share in the products of a matrix that several ranks multiply together."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class TeamShare(Protocol):
    """What the products of a matrix need to know of a team: its size, this rank's place in it, and how to gather.

    `muonmesh.comm.team.Team` is one. Each member computes some blocks of a product, and all gather the blocks of all.
    Nothing is ever added over ranks, so nothing rounds otherwise than on one rank.

    Attributes:
        size: Members of the team.
        index: Which of them this rank is.
    """

    size: int
    index: int

    def gather(self, mine: Tensor, everyone: Tensor) -> None:
        """Fill ``everyone`` (size, ...) with ``mine`` (...) of each member, in their order; all members call it.

        Both are contiguous and do not overlap.
        """
