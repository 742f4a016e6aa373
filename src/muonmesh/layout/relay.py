"""Relay: how a result is passed on from replica to replica, where the ranks that hold it are in several machines.

The owner sends one copy to the first holder of each part. From then on every rank passes on what has just arrived, so
each rank sends each of its parts about once, and one copy of a part enters each machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from muonmesh.layout.flat import Layout
from muonmesh.layout.region import Block


@dataclass(frozen=True, eq=False)
class Relay:
    """The ranks that hold the same of a parameter, one of each replica, and how many in a row share a machine.

    The copies stand in a circle, machine by machine. The distance of a copy is the number of places from the owner's
    copy to it. In each machine the first copy is the one at the place that the owner's copy has in its own machine. So
    the copies of different owners enter a machine at different ranks.

    Attributes:
        layout: Where the parameter lives.
        parts: Of each part of it the ranks that hold it, by the number of the replica.
        together: How many replicas in a row share a machine; 1 where that differs from place to place.
    """

    layout: Layout
    parts: tuple[tuple[int, ...], ...]
    together: int

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(layout: Layout, machine: int) -> Relay | None:
        """Return the relay of a parameter in machines of so many ranks; None if its replicas are not cut alike."""
        copies = layout.copies()
        found: dict[tuple[Block, ...], dict[int, int]] = {}
        for rank in layout.ranks if copies > 1 else ():
            if blocks := layout.blocks(rank):
                found.setdefault(blocks, {})[layout.replica_number(rank)] = rank
        if not found or any(len(some) != copies for some in found.values()):
            return None
        parts = tuple(tuple(some[number] for number in range(copies)) for some in found.values())
        machines = [rank // machine for rank in parts[0]]
        together = machines.count(machines[0])
        even = machines == [first for first in machines[::together] for _ in range(together)][:copies]
        return Relay(layout, parts, together if even and copies % together == 0 else 1)

    @cached_property
    def _part_of(self) -> dict[int, tuple[int, ...]]:
        return {rank: part for part in self.parts for rank in part}

    def exchanges(self, *, chain: bool) -> int:
        """Return after how many exchanges all ranks have all parts."""
        copies = self.layout.copies()
        near = len(self.layout.ranks) > copies  # of the parts of a copy the owner sends some to its own replica
        return near + (copies - 1 if chain else 1 + (1 < self.together < copies))

    def incoming(self, owner: int, rank: int, *, chain: bool) -> tuple[int, int]:
        """Return who sends a rank its part of a result, and in which exchange, counted from the first of its bucket.

        Args:
            owner: Of the matrix; it has its own part from itself.
            rank: The receiver.
            chain: Whether each copy is made from the one before it. If not, they are made from the owner's copy, and
                in each other machine from the first there.
        """
        part, circle = self._part_of[rank], self._circle(self.layout.replica_number(owner))
        distance = circle.index(part.index(rank))
        if distance == 0:
            return owner, 0
        before, depth = self._before(distance, chain)
        return part[circle[before]], depth - (part[circle[0]] == owner)

    def outgoing(self, owner: int, rank: int, *, chain: bool) -> list[int]:
        """Return whom a rank sends some of a result; nobody if it is given nothing to pass on."""
        circle = self._circle(self.layout.replica_number(owner))
        found = [part[circle[0]] for part in self.parts if part[circle[0]] != rank] if rank == owner else []
        part = self._part_of.get(rank)
        if part is not None:
            mine = circle.index(part.index(rank))
            later = range(mine + 1, len(circle))
            found += [part[circle[distance]] for distance in later if self._before(distance, chain)[0] == mine]
        return found

    def _before(self, distance: int, chain: bool) -> tuple[int, int]:
        """Return the distance of the copy from which one is made, and how many times it has been passed on then."""
        machine, place = divmod(distance, self.together)
        if chain:
            return distance - 1, distance
        return (distance - place, 2) if machine and place else (0, 1)

    def _circle(self, first: int) -> list[int]:
        """Return the numbers of all copies in the order of their distance from one."""
        (machine, place), machines = divmod(first, self.together), self.layout.copies() // self.together
        return [
            (machine + further) % machines * self.together + (place + beside) % self.together
            for further in range(machines)
            for beside in range(self.together)
        ]
