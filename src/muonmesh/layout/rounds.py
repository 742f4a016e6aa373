"""Rounds: the order in which copies of a result travel to the replicas of a matrix."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rounds:
    """The rounds in which the results of a bucket travel to the ranks that store them.

    The replicas form a circle. The distance of a rank is the number of places from the owner's replica to its own
    replica; 0 is the owner's replica. In each round, results travel over a few distances. So at any time, every rank
    sends to a few replicas and receives from a few, and the elements that two ranks exchange are never split.

    Attributes:
        count: The number of rounds; 0 if nothing travels.
        at_once: The number of distances over which results travel in a round.
        near: Whether any result travels over distance 0.
        sums: Whether only distance 0 is in the first round, if there are several rounds. Rules need sums over the
            elements of this round before anything is written.
        late: The number of further exchanges, of later buckets, in which results are passed on (`Relay`).
    """

    count: int = 0
    at_once: int = 1
    near: bool = False
    sums: bool = False
    late: int = 0

    def of(self, distance: int) -> int:
        """Return the number of the round in which results travel over a distance."""
        if distance == 0:
            return 0
        apart = self.near and self.sums
        return apart + (distance - (apart or not self.near)) // self.at_once
