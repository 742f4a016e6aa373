"""Relay: ranks pass a result on from replica to replica, if its replicas are on several machines.

The owner sends one copy to the first rank of each part. Then every rank passes on each part that has just arrived. So
each rank sends each of its parts about once, and one copy of a part enters each machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

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
        parts: For each part of the parameter the ranks that hold it, by the number of the replica.
        together: The number of consecutive replicas on one machine; 1 if this number is not constant.
    """

    layout: Layout
    parts: tuple[tuple[int, ...], ...]
    together: int

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(layout: Layout, machine: int) -> Relay | None:
        """Return the relay of a parameter on machines of ``machine`` ranks; None if its replicas differ in cuts."""
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
        """Return the number of exchanges after which every rank has its part."""
        copies = self.layout.copies()
        near = len(self.layout.ranks) > copies  # of the parts of a copy the owner sends some to its own replica
        return near + (copies - 1 if chain else 1 + (1 < self.together < copies))

    def incoming(self, owner: int, rank: int, *, chain: bool) -> tuple[int, int]:
        """Return the rank that sends a rank its part of a result, and the exchange, counted from the bucket's first.

        Args:
            owner: The owner of the matrix. It keeps its own part.
            rank: The receiver.
            chain: Whether each copy is made from the previous copy. If not, copies are made from the owner's copy and,
                on every other machine, from the first copy on this machine.
        """
        part, circle = self._part_of[rank], self._circle(self.layout.replica_number(owner))
        distance = circle.index(part.index(rank))
        if distance == 0:
            return owner, 0
        before, depth = self._before(distance, chain)
        return part[circle[before]], depth - (part[circle[0]] == owner)

    def outgoing(self, owner: int, rank: int, *, chain: bool) -> list[int]:
        """Return the ranks to which a rank sends parts of a result; empty if it passes nothing on."""
        circle = self._circle(self.layout.replica_number(owner))
        found = [part[circle[0]] for part in self.parts if part[circle[0]] != rank] if rank == owner else []
        part = self._part_of.get(rank)
        if part is not None:
            mine = circle.index(part.index(rank))
            later = range(mine + 1, len(circle))
            found += [part[circle[distance]] for distance in later if self._before(distance, chain)[0] == mine]
        return found

    def _before(self, distance: int, chain: bool) -> tuple[int, int]:
        """Return the distance of the copy from which a copy is made, and the number of transfers up to the new copy."""
        machine, place = divmod(distance, self.together)
        if chain:
            return distance - 1, distance
        return (distance - place, 2) if machine and place else (0, 1)

    def _circle(self, first: int) -> list[int]:
        """Return the numbers of all copies in the order of their distance from copy ``first``."""
        (machine, place), machines = divmod(first, self.together), self.layout.copies() // self.together
        return [
            (machine + further) % machines * self.together + (place + beside) % self.together
            for further in range(machines)
            for beside in range(self.together)
        ]
