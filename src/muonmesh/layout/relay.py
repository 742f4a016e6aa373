"""Relay: the rank that sends each replica of a parameter its copy of a result, and the exchange in which it arrives.

In one machine the owner sends all copies, as many in an exchange as fit into the memory of a bucket. If the replicas
are on several machines, ranks pass results on. The owner sends one copy to its own replica, and each rank passes on the
part that has just arrived. So each rank sends each of its parts about once, and one copy of a part enters each machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from muonmesh.layout.flat import Layout
from muonmesh.layout.region import Block


@dataclass(frozen=True, eq=False)
class Relay:
    """The order in which ranks with the same part of a parameter, one of each replica, pass on a result.

    The copies form a circle, machine by machine. The distance of a copy is the number of places from the owner's copy
    to it. In each machine, the first copy is at the same place as the owner's copy in the owner's machine. So the
    results of different owners enter a machine at different ranks.

    Attributes:
        layout: The layout of the parameter.
        parts: For each rank the ranks that hold the same part of the parameter, by the number of the replica. Empty if
            ranks pass nothing on: all are on one machine, or replicas differ in cuts, or there is one copy.
        together: The number of consecutive replicas on one machine; 1 if this number is not constant.
    """

    layout: Layout
    parts: Mapping[int, tuple[int, ...]]
    together: int

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(layout: Layout, machine: int) -> Relay:
        """Return the relay of a parameter on machines of ``machine`` ranks; 0: all ranks are on one machine."""
        copies, alike = layout.copies(), dict[tuple[Block, ...], dict[int, int]]()
        spread = copies > 1 and machine and len({rank // machine for rank in layout.ranks}) > 1
        for rank in layout.ranks if spread else ():
            if blocks := layout.blocks(rank):
                alike.setdefault(blocks, {})[layout.replica_number(rank)] = rank
        if not alike or any(len(some) != copies for some in alike.values()):
            return Relay(layout, {}, copies)
        parts = [tuple(some[number] for number in range(copies)) for some in alike.values()]
        machines = [rank // machine for rank in parts[0]]
        together = machines.count(machines[0])
        even = machines == [first for first in machines[::together] for _ in range(together)][:copies]
        together = together if even and copies % together == 0 else 1
        return Relay(layout, {rank: part for part in parts for rank in part}, together)

    @property
    def _near(self) -> bool:
        """Whether a replica has several ranks, so that some parts of the owner's copy travel too."""
        return len(self.layout.ranks) > self.layout.copies()

    def fits(self, at_once: int) -> bool:
        """Whether ``at_once`` copies are all that travel."""
        return self.layout.copies() - (not self._near) <= at_once

    def exchanges(self, at_once: int) -> int:
        """Return the number of exchanges after which every rank has its part; ``at_once`` as for `incoming`."""
        copies = self.layout.copies()
        if not self.parts:
            return -(-(copies - (not self._near)) // at_once)
        return self._near + (1 + (1 < self.together < copies) if self.fits(at_once) else copies - 1)

    def incoming(self, owner: int, rank: int, at_once: int) -> tuple[int, int]:
        """Return the rank that sends a rank its part of a result, and the exchange, counted from the bucket's first.

        Args:
            owner: The owner of the matrix. It keeps its own part.
            rank: The receiver.
            at_once: The number of copies for which there is memory in an exchange. If there is memory for all, copies
                that are passed on are made from the owner's copy and, on every other machine, from the first copy on
                this machine; if not, each copy is made from the previous copy.
        """
        circle = self._circle(owner)
        distance = circle.index(self.layout.replica_number(rank))
        if distance == 0:
            return owner, 0
        if not self.parts:
            return owner, (distance - (not self._near)) // at_once
        part, (before, depth) = self.parts[rank], self._before(distance, at_once)
        return part[circle[before]], depth - (part[circle[0]] == owner)

    def outgoing(self, owner: int, rank: int, at_once: int) -> list[tuple[int, int]]:
        """Return the ranks to which a rank sends parts of a result, each with the exchange."""
        receivers = list(self.layout.replica(owner) if self.parts else self.layout.ranks) if rank == owner else []
        if (part := self.parts.get(rank)) is not None:
            circle = self._circle(owner)
            mine = circle.index(self.layout.replica_number(rank))
            later = range(mine + 1, len(circle))
            receivers += [part[circle[distance]] for distance in later if self._before(distance, at_once)[0] == mine]
        return [(receiver, self.incoming(owner, receiver, at_once)[1]) for receiver in receivers]

    def _before(self, distance: int, at_once: int) -> tuple[int, int]:
        """Return the distance of the copy from which a copy is made, and the number of transfers up to the new copy."""
        machine, place = divmod(distance, self.together)
        if not self.fits(at_once):
            return distance - 1, distance
        return (distance - place, 2) if machine and place else (0, 1)

    def _circle(self, owner: int) -> list[int]:
        """Return the numbers of all copies in the order of their distance from the owner's copy."""
        (machine, place), copies = divmod(self.layout.replica_number(owner), self.together), self.layout.copies()
        return [
            (machine * self.together + further) % copies + (place + beside) % self.together
            for further in range(0, copies, self.together)
            for beside in range(self.together)
        ]
