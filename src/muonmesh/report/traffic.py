"""Traffic: what one rank sends and receives in a step for matrices that have an owner, told from the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from muonmesh.layout import Plan
from muonmesh.layout.companion_plan import CompanionPlan
from muonmesh.layout.routes import Leg


@dataclass(frozen=True)
class BucketTraffic:
    """The elements that one rank moves for one bucket: to the owners (gather), and back (scatter), in rounds."""

    gather_sent: int
    gather_received: int
    rounds_sent: tuple[int, ...]
    rounds_received: tuple[int, ...]


@dataclass(frozen=True)
class Traffic:
    """What one rank moves in a step.

    Attributes:
        buckets: One entry for each bucket of the plan, those in which the rank moves nothing too.
        sent: Elements that it sends, both ways, by number of the parameter.
        collectives: In which it takes part; the sums that rules ask for are among them.
        messages: Ranks that it sends to or receives from, summed up over these.
    """

    buckets: tuple[BucketTraffic, ...]
    sent: Counter[int]
    collectives: int
    messages: int

    @property
    def received(self) -> int:
        """Elements that it receives, both ways."""
        return sum(bucket.gather_received + sum(bucket.rounds_received) for bucket in self.buckets)


def traffic(plan: Plan, rank: int) -> Traffic:
    """Return what ``rank`` moves in a step, what rules keep beside their matrices left out."""
    sent: Counter[int] = Counter()
    buckets, collectives, messages = [], 0, 0
    for bucket, numbers in enumerate(plan.buckets):
        gather = plan.routes(bucket, rank, gather=True)
        scatter = plan.routes(bucket, rank, gather=False)
        collectives += plan.gathers(bucket) + plan.rounds(bucket).count
        for way in (gather, scatter):
            messages += max(len(side.keys() - {rank}) for side in (way.stored, way.assembled))
        asked = plan.summed(numbers)
        collectives += 2 * any(map(plan.moves, asked))  # the largest exponents, and the integers
        there, back = moved(gather.stored, rank), moved(scatter.assembled, rank)
        sent += there + back
        arriving = moved(gather.assembled, rank).total()
        leaving = _rounds(plan, rank, bucket, scatter.assembled, stored=False)
        returning = _rounds(plan, rank, bucket, scatter.stored, stored=True)
        buckets.append(BucketTraffic(there.total(), arriving, leaving, returning))
    return Traffic(tuple(buckets), sent, collectives + plan.late, messages)


def _rounds(plan: Plan, rank: int, bucket: int, legs: Mapping[int, Sequence[Leg]], *, stored: bool) -> tuple[int, ...]:
    """Return the elements of results that travel in each of a bucket's exchanges, and in those that follow them."""
    rounds = plan.rounds(bucket)
    found = Counter[int]()
    for peer, travelling in legs.items():
        for leg in travelling if peer != rank else ():
            holder = rank if stored else peer
            found[plan.exchange_of(leg.assignment, holder, rounds) if rounds.count > 1 else 0] += leg.piece.numel
    return tuple(found[turn] for turn in range(max(rounds.count, 1 + max(found, default=0))))


class Carried(NamedTuple):
    """What one rank moves of what rules keep by row, column or matrix: collectives, and elements both ways."""

    collectives: int = 0
    sent: int = 0
    received: int = 0


def carried(plan: Plan, rank: int) -> Carried:
    """Return what travels beside the matrices of a plan; see `CompanionPlan`."""
    beside = CompanionPlan.beside(plan)
    if beside is None:
        return Carried()
    there, back = (beside.plan.routes(0, rank, gather=gather) for gather in (True, False))
    legs = (there.stored, back.assembled), (there.assembled, back.stored)
    sent, received = (sum(sum(moved(some, rank).values()) for some in way) for way in legs)
    return Carried(beside.plan.gathers(0) + beside.plan.scatters(0), sent, received)


def moved(legs: Mapping[int, Sequence[Leg]], rank: int) -> Counter[int]:
    """Return the elements that travel, by number of the parameter."""
    found: Counter[int] = Counter()
    for peer, travelling in legs.items():
        if peer != rank:
            for leg in travelling:
                found[leg.parameter] += leg.piece.numel
    return found
