"""Traffic: the elements that one rank sends and receives for matrices in a step, computed from the plan."""

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
    """The elements that one rank moves for one bucket: to the owners (gather), and back (scatter), in rounds.

    Attributes:
        mine: The assignments that the rank owns and that need a transfer.
        elements: The number of elements of these matrices.
        gather_received: Elements that the rank receives as their owner.
        gather_buffers: Elements of the buffers to send, receive and assemble the bucket; 0 if nothing is gathered.
        rounds_sent: Elements of results that the rank sends, by round.
        rounds_received: Elements of results that it receives, by round.
    """

    mine: tuple[int, ...]
    elements: int
    gather_received: int
    gather_buffers: int
    rounds_sent: tuple[int, ...]
    rounds_received: tuple[int, ...]


class Carried(NamedTuple):
    """The traffic of one rank for state by row, column or matrix: collectives, and elements in both directions."""

    collectives: int = 0
    sent: int = 0
    received: int = 0


@dataclass(frozen=True)
class Traffic:
    """The traffic of one rank in a step.

    Attributes:
        buckets: One entry for each bucket of the plan, even if the rank moves nothing in it.
        staying: The assignments that the rank owns and that need no transfer.
        sent: Elements that the rank sends, in both directions, by number of the parameter.
        collectives: Number of collectives in which the rank takes part, including the sums that rules need.
        messages: Number of ranks that it sends to or receives from, summed over the collectives.
        carried: The traffic of state by row, column or matrix, which the other attributes leave out.
    """

    buckets: tuple[BucketTraffic, ...]
    staying: tuple[int, ...]
    sent: Counter[int]
    collectives: int
    messages: int
    carried: Carried

    @property
    def received(self) -> int:
        """The number of elements that the rank receives, in both directions."""
        return sum(bucket.gather_received + sum(bucket.rounds_received) for bucket in self.buckets)


def traffic(plan: Plan, rank: int) -> Traffic:
    """Return the traffic of ``rank`` in a step."""
    sent: Counter[int] = Counter()
    buckets, staying, collectives, messages = [], list[int](), 0, 0
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
        owned = [number for number in numbers if plan.assignments[number].owner == rank]
        staying += [number for number in owned if not plan.moves(number)]
        mine = tuple(number for number in owned if plan.moves(number))
        elements = sum(plan.assignments[number].matrix.numel for number in mine)
        buffers = there.total() + arriving + elements if plan.gathers(bucket) else 0
        buckets.append(BucketTraffic(mine, elements, arriving, buffers, leaving, returning))
    return Traffic(tuple(buckets), tuple(staying), sent, collectives + plan.late, messages, _carried(plan, rank))


def _rounds(plan: Plan, rank: int, bucket: int, legs: Mapping[int, Sequence[Leg]], *, stored: bool) -> tuple[int, ...]:
    """Return the elements of results that travel in each exchange of a bucket, and in the exchanges that follow."""
    rounds = plan.rounds(bucket)
    found = Counter[int]()
    for peer, travelling in legs.items():
        for leg in travelling if peer != rank else ():
            holder = rank if stored else peer
            found[plan.exchange_of(leg.assignment, holder, rounds) if rounds.count > 1 else 0] += leg.piece.numel
    return tuple(found[turn] for turn in range(max(rounds.count, 1 + max(found, default=0))))


def _carried(plan: Plan, rank: int) -> Carried:
    """Return the traffic of state that travels in addition to the matrices of a plan; see `CompanionPlan`."""
    beside = CompanionPlan.beside(plan)
    if beside is None:
        return Carried()
    there, back = (beside.plan.routes(0, rank, gather=gather) for gather in (True, False))
    legs = (there.stored, back.assembled), (there.assembled, back.stored)
    sent, received = (sum(sum(moved(some, rank).values()) for some in way) for way in legs)
    return Carried(beside.plan.gathers(0) + beside.plan.scatters(0), sent, received)


def moved(legs: Mapping[int, Sequence[Leg]], rank: int) -> Counter[int]:
    """Return the number of elements that travel between ranks, by number of the parameter."""
    found: Counter[int] = Counter()
    for peer, travelling in legs.items():
        if peer != rank:
            for leg in travelling:
                found[leg.parameter] += leg.piece.numel
    return found
