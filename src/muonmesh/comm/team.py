"""Team: the ranks that multiply one matrix together, each of them some blocks of every product."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from muonmesh.comm.wire import Wire


class Team:
    """A team as one of its ranks sees it: the `muonmesh.numerics.kernels.TeamShare` that divides the products.

    Args:
        members: The ranks of the team, the owner first.
        group: A process group of exactly these ranks, in any order.
        wire: Counts what travels.
        rank: This one.

    Attributes:
        ranks: The members in the order of the group, by which blocks of a product are dealt out; the owner need not be
            the first.
        size: How many they are.
        index: The place of this rank among them.
        is_owner: Whether this rank is the owner.
    """

    def __init__(self, members: tuple[int, ...], group: dist.ProcessGroup, wire: Wire, *, rank: int) -> None:
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.size = len(members)
        self.index = self.ranks.index(rank)
        self.is_owner = rank == members[0]
        self._group = group
        self._wire = wire

    def gather(self, mine: Tensor, everyone: Tensor) -> None:
        """Fill ``everyone`` (size, ...) with ``mine`` (...) of each member, in the order of ``ranks``."""
        self._wire.collect(f"a product of the team {self.ranks}", mine, everyone, self._group, self.ranks)
