"""Rounds: when the copies of a result travel, where a matrix has replicas."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rounds:
    """In how many rounds the results of a bucket travel to those that hold them, and what travels in each.

    The replicas stand in a circle. The distance of a holder is the number of places from the owner's replica to its
    own; 0 is the owner's replica. In each round results travel over a few distances. So at any time every rank sends to
    a few replicas and receives from a few, and what two ranks exchange is never cut.

    Attributes:
        count: How many there are; 0 if nothing travels.
        at_once: Over how many distances results travel in a round.
        near: Whether any travels over distance 0.
        sums: Whether distance 0 has the first round to itself, if there are several: the sums that rules ask for are
            taken over what travels there, before anything is written.
        late: In how many more exchanges, of later buckets, results are passed on (`Relay`).
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
