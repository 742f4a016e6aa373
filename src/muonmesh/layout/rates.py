"""Rates: what the ranks of a machine can do, for choosing between ways to share the work."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """What a rank can do.

    Attributes:
        flops: Floating-point operations a second of matrix products.
        bytes: Bytes a second that it sends while it receives as many.
    """

    flops: float = 2e11
    bytes: float = 5e9


@dataclass(frozen=True)
class Teams:
    """Lets several ranks orthogonalise one matrix together, where it would make its owner the last to finish.

    Each member of a team computes some blocks of every product, and all gather them between products. Nothing is summed
    over ranks, so every size of a team gives the same bits.

    Attributes:
        most: Ranks of a team at most, a power of two. Their numbers are consecutive, and a multiple of the size of the
            team comes first, so a team of up to the ranks of a node lies within one.
        rates: By which sharing a matrix is compared with leaving it to one rank.
    """

    most: int = 8
    rates: Rates = Rates()

    def load(self, flops: int, gathered: int, itemsize: int, members: int) -> int:
        """Return what each member of a team carries of a matrix, as FLOPs that would take the same time.

        Args:
            flops: Of the whole matrix.
            gathered: Elements of its products (`muonmesh.layout.cost.gathered`).
            itemsize: Bytes of each.
            members: Of the team.
        """
        if members == 1:
            return flops
        travels = gathered * itemsize * (members - 1) / members
        return int(flops / members + travels * self.rates.flops / self.rates.bytes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes that teams may have, the smallest first."""
        return tuple(1 << n for n in range(self.most.bit_length()))
