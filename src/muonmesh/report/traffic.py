"""Traffic and memory of one rank in a step, and the bytes of state that it keeps, all computed from the plan."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from muonmesh.comm.storage import local_of, this_rank
from muonmesh.layout import Plan
from muonmesh.layout.companion_plan import CompanionPlan
from muonmesh.layout.routes import Leg
from muonmesh.step.planning import Planned
from muonmesh.step.state_layout import Precision


@dataclass(frozen=True)
class BucketTraffic:
    """The elements that one rank moves for one bucket: to the owners (gather), and back (scatter).

    Attributes:
        mine: The assignments that the rank owns and that need a transfer.
        elements: The number of elements of these matrices.
        gather_received: Elements that the rank receives as their owner.
        gather_buffers: Elements of the buffers to send, receive and assemble the bucket; 0 if nothing is gathered.
        results_sent: Elements of results that the rank sends, by exchange.
        results_received: Elements of results that it receives, by exchange.
    """

    mine: tuple[int, ...]
    elements: int
    gather_received: int
    gather_buffers: int
    results_sent: tuple[int, ...]
    results_received: tuple[int, ...]


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
        return sum(bucket.gather_received + sum(bucket.results_received) for bucket in self.buckets)


def traffic(plan: Plan, rank: int) -> Traffic:
    """Return the traffic of ``rank`` in a step."""
    sent: Counter[int] = Counter()
    buckets, staying, collectives, messages = [], list[int](), 0, 0
    for bucket, numbers in enumerate(plan.buckets):
        gather = plan.routes(bucket, rank, gather=True)
        scatter = plan.routes(bucket, rank, gather=False)
        exchanges = plan.exchanges(bucket)
        collectives += plan.gathers(bucket) + exchanges
        for way in (gather, scatter):
            messages += max(len(side.keys() - {rank}) for side in (way.stored, way.assembled))
        asked = plan.summed(numbers)
        collectives += 2 * any(map(plan.moves, asked))  # the largest exponents, and the integers
        there, back = moved(gather.stored, rank), moved(scatter.assembled, rank)
        sent += there + back
        arriving = moved(gather.assembled, rank).total()
        leaving = _results(exchanges, scatter.assembled, rank)
        returning = _results(exchanges, scatter.stored, rank)
        owned = [number for number in numbers if plan.assignments[number].owner == rank]
        staying += [number for number in owned if not plan.moves(number)]
        mine = tuple(number for number in owned if plan.moves(number))
        elements = sum(plan.assignments[number].matrix.numel for number in mine)
        buffers = there.total() + arriving + elements if plan.gathers(bucket) else 0
        buckets.append(BucketTraffic(mine, elements, arriving, buffers, leaving, returning))
    return Traffic(tuple(buckets), tuple(staying), sent, collectives, messages, _carried(plan, rank))


def _results(count: int, legs: Mapping[int, Sequence[Leg]], rank: int) -> tuple[int, ...]:
    """Return the elements of results that travel to or from other ranks in each of ``count`` exchanges of a bucket."""
    found = Counter[int]()
    for peer, travelling in legs.items():
        for leg in travelling if peer != rank else ():
            found[leg.exchange] += leg.piece.numel
    return tuple(found[exchange] for exchange in range(max(1, count)))


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


def step_memory(plan: Plan, moved: Traffic, squares: Callable[[int], int]) -> int:
    """Return the modelled peak memory of a step in bytes: buffers of the exchange, as in `Budget`, and computation.

    Args:
        plan: The plan with its budget.
        moved: The traffic of the rank.
        squares: A function from an assignment to the number of rows × rows buffers that its orthogonalization needs.
    """
    moving = [number for number, bucket in enumerate(plan.buckets) if any(map(plan.moves, bucket))]
    if plan.budget.host:
        return _kept([moved.buckets[bucket] for bucket in moving]) * plan.budget.itemsize
    computing = _computing(plan, moved.staying, squares, beside=2)
    if not moving:
        return computing * plan.budget.itemsize
    peak, results, under_way = 0, 0, [(0, 0)]  # elements of results that are sent and received, by exchange
    for bucket, after in itertools.zip_longest(moving, moving[1:]):
        here, elements = moved.buckets[bucket], moved.buckets[bucket].elements
        coming = 0 if after is None else moved.buckets[after].gather_buffers
        in_squares, with_matrices, with_results = (_computing(plan, here.mine, squares, beside=n) for n in (0, 1, 2))
        if plan.gathers(bucket):
            arrived = max(here.gather_buffers, 2 * elements + in_squares)
            peak = max(peak, arrived + coming + sum(under_way[0]))
        else:  # results of the previous bucket have arrived after the first portion
            peak = max(peak, max(with_results + sum(under_way[0]), with_matrices + elements) + coming)
        peak = max(peak, elements + coming + _passed_on(under_way, results))
        under_way = list(zip(here.results_sent, here.results_received, strict=True))
        peak = max(peak, max(elements, computing) + sum(under_way[0]) + coming)
        if not plan.fits(bucket):  # all exchanges but the last one are over before the next bucket is computed
            peak = max(peak, _passed_on(under_way, elements) + coming)
            under_way = under_way[-1:]
        results = elements
    peak = max(peak, _passed_on(under_way, results))
    return peak * plan.budget.itemsize


def _passed_on(exchanges: Sequence[tuple[int, int]], elements: int) -> int:
    """Return the most elements in use by successive exchanges of results, each given as (sent, received).

    While one travels, the results of the previous exchange are written. The ``elements`` of the results are needed
    until nothing else is sent.
    """
    most, sizes = 0, [sent for sent, _ in exchanges]
    for turn in range(1, len(exchanges)):
        results = elements if any(size != sizes[turn - 1] for size in sizes[turn:]) else 0
        most = max(most, exchanges[turn - 1][1] + sum(exchanges[turn]) + results)
    return most


def _computing(plan: Plan, numbers: Sequence[int], squares: Callable[[int], int], *, beside: int) -> int:
    """Return the most elements in use at once by equal matrices: their squares, and ``beside`` times the matrices."""
    most = 0
    for some in plan.alike(numbers):
        rows, cols = plan.assignments[some[0]].matrix.shape
        count = squares(some[0])
        at_once = min(len(some), plan.at_once(some[0], count))
        most = max(most, at_once * (count * rows * rows + beside * rows * cols))
    return most


def _kept(buckets: Sequence[BucketTraffic]) -> int:
    """Return the elements that a CPU keeps: two buffers of each kind, because buckets and exchanges take turns."""
    found = 0
    for turn in (buckets[::2], buckets[1::2]):
        found += max((bucket.gather_buffers for bucket in turn), default=0)
        found += max((bucket.elements for bucket in turn), default=0)
        found += max((max(b.results_sent) + max(b.results_received) for b in turn), default=0)
    return found


def state_bytes_of(planned: Planned, precision: Precision) -> dict[str, tuple[int, int]]:
    """Return the bytes of state that this rank keeps for each parameter after the first step, by name.

    The two numbers are all bytes, and the bytes that ``state_device`` keeps in CPU memory.

    Padding and other parameters of a flat buffer are left out. Scales of int8 blocks that several parameters of a flat
    buffer share are counted for the first of them.
    """
    found = dict[str, tuple[int, int]]()
    coded = set[Tensor]()
    for member in planned.members:
        local, total, host = local_of(member.tensor), 0, 0
        for form in member.forms(precision):
            stored = form.layout.storage.layout
            blocks = () if stored is None else stored.blocks(this_rank())
            elements = math.prod(form.shape) if stored is None else sum(block.region.numel for block in blocks)
            total += elements * form.dtype.itemsize
            if form.layout.side == "element" and form.device != local.device:
                host += elements * form.dtype.itemsize
            if form.dtype == torch.int8 and member.tensor not in coded:
                coded.add(member.tensor)
                total += torch.float32.itemsize * planned.blocks.size(member.tensor)
        found[member.name] = total, host
    return found
