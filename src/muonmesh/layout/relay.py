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
        per_machine: The number of consecutive replicas on one machine; 1 if this number is not constant.
    """

    layout: Layout
    parts: Mapping[int, tuple[int, ...]]
    per_machine: int

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(layout: Layout, machine: int) -> Relay:
        """Return the relay of a parameter on machines of ``machine`` ranks; 0: all ranks are on one machine."""
        copies, alike = layout.copies(), dict[tuple[Block, ...], dict[int, int]]()
        spread = copies > 1 and machine and len({rank // machine for rank in layout.ranks}) > 1
        for rank in layout.ranks if spread else ():
            if blocks := layout.blocks(rank):
                alike.setdefault(blocks, {})[layout.replica_number(rank)] = rank
        if not alike or any(len(by_replica) != copies for by_replica in alike.values()):
            return Relay(layout, {}, copies)
        parts = [tuple(by_replica[number] for number in range(copies)) for by_replica in alike.values()]
        machines = [rank // machine for rank in parts[0]]
        per_machine = machines.count(machines[0])
        even = machines == [first for first in machines[::per_machine] for _ in range(per_machine)][:copies]
        per_machine = per_machine if even and copies % per_machine == 0 else 1
        return Relay(layout, {rank: part for part in parts for rank in part}, per_machine)

    @property
    def _near(self) -> bool:
        """Whether a replica has several ranks, so that some parts of the owner's copy travel too."""
        return len(self.layout.ranks) > self.layout.copies()

    def fits(self, limit: int) -> bool:
        """Whether ``limit`` copies are all that travel."""
        return self.layout.copies() - (not self._near) <= limit

    def exchanges(self, limit: int) -> int:
        """Return the number of exchanges after which every rank has its part; ``limit`` as for `incoming`."""
        copies = self.layout.copies()
        if not self.parts:
            return -(-(copies - (not self._near)) // limit)
        return self._near + (1 + (1 < self.per_machine < copies) if self.fits(limit) else copies - 1)

    def incoming(self, owner: int, rank: int, limit: int) -> tuple[int, int]:
        """Return the rank that sends a rank its part of a result, and the exchange, counted from the bucket's first.

        Args:
            owner: The owner of the matrix. It keeps its own part.
            rank: The receiver.
            limit: The number of copies for which there is memory in an exchange. If there is memory for all, copies
                that are passed on are made from the owner's copy and, on every other machine, from the first copy on
                this machine; if not, each copy is made from the previous copy.
        """
        circle = self._circle(owner)
        distance = circle.index(self.layout.replica_number(rank))
        if distance == 0:
            return owner, 0
        if not self.parts:
            return owner, (distance - (not self._near)) // limit
        part, (before, depth) = self.parts[rank], self._before(distance, limit)
        return part[circle[before]], depth - (part[circle[0]] == owner)

    def outgoing(self, owner: int, rank: int, limit: int) -> list[tuple[int, int]]:
        """Return the ranks to which a rank sends parts of a result, each with the exchange."""
        receivers = list(self.layout.replica(owner) if self.parts else self.layout.ranks) if rank == owner else []
        if (part := self.parts.get(rank)) is not None:
            circle = self._circle(owner)
            start = circle.index(self.layout.replica_number(rank))
            later = range(start + 1, len(circle))
            receivers += [part[circle[distance]] for distance in later if self._before(distance, limit)[0] == start]
        return [(receiver, self.incoming(owner, receiver, limit)[1]) for receiver in receivers]

    def _before(self, distance: int, limit: int) -> tuple[int, int]:
        """Return the distance of the copy from which a copy is made, and the number of transfers up to the new copy."""
        machine, position = divmod(distance, self.per_machine)
        if not self.fits(limit):
            return distance - 1, distance
        return (distance - position, 2) if machine and position else (0, 1)

    def _circle(self, owner: int) -> list[int]:
        """Return the numbers of all copies in the order of their distance from the owner's copy."""
        (machine, position), copies = divmod(self.layout.replica_number(owner), self.per_machine), self.layout.copies()
        return [
            (machine * self.per_machine + further) % copies + (position + beside) % self.per_machine
            for further in range(0, copies, self.per_machine)
            for beside in range(self.per_machine)
        ]
