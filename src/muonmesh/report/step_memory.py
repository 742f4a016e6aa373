"""Memory of a step: the most that a rank takes at once beside weights, gradients and state, modelled from its plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from muonmesh.layout import Plan
from muonmesh.layout.plan import Assignment
from muonmesh.report.traffic import Traffic


def step_memory(plan: Plan, rank: int, moved: Traffic, squares: Callable[[int], int]) -> int:
    """Return bytes: of the exchange that `Budget` describes, bucket by bucket, and of what is computed beside it.

    Args:
        plan: With its budget.
        rank: The rank that is told of.
        moved: Its traffic.
        squares: How many squares of its rows a matrix is computed in, by the number of the assignment.
    """
    owned = [[n for n in bucket if plan.assignments[n].owner == rank] for bucket in plan.buckets]
    moving = [number for number, bucket in enumerate(plan.buckets) if any(map(plan.moves, bucket))]
    local = [n for bucket in owned for n in bucket if not plan.moves(n)]
    if plan.budget.host:
        return _kept(plan, rank, moved, moving) * plan.budget.itemsize
    computing = _computing(plan, local, squares, with_results=True)
    if not moving:
        return computing * plan.budget.itemsize
    peak = 0
    for before, bucket, after in zip([None, *moving], moving, [*moving[1:], None], strict=False):
        mine = [n for n in owned[bucket] if plan.moves(n)]
        elements = _elements(plan, mine)
        sent, received = _of_a_round(moved, before)
        coming = 0 if after is None else _arriving(plan, rank, moved, after)
        now = _computing(plan, mine, squares, with_results=not plan.gathers(bucket))
        if plan.gathers(bucket):
            arrived = max(_arriving(plan, rank, moved, bucket), 2 * elements + now)
            peak = max(peak, arrived + coming + sent + received)
        else:  # the results of the bucket before have arrived when the first portion has been computed
            peak = max(peak, now + coming + sent + received, now + coming + elements)
        sent, received = _of_a_round(moved, bucket)
        peak = max(peak, max(elements, computing) + sent + received + coming)
        if (rounds := plan.rounds(bucket)).count > 1:  # one travels while the one before it is written
            filled_anew = elements + sent if rounds.near else 0
            peak = max(peak, filled_anew + sent + 2 * received + coming)
    return peak * plan.budget.itemsize


def _elements(plan: Plan, numbers: Sequence[int]) -> int:
    return sum(plan.assignments[n].matrix.numel for n in numbers)


def _of_a_round(moved: Traffic, bucket: int | None) -> tuple[int, int]:
    """Return what is sent and received of the results of a bucket at a time."""
    return (0, 0) if bucket is None else (moved.buckets[bucket].round_sent, moved.buckets[bucket].round_received)


def _arriving(plan: Plan, rank: int, moved: Traffic, bucket: int) -> int:
    """Return what is sent, received and assembled of a bucket, if any of it is gathered."""
    if not plan.gathers(bucket):
        return 0
    mine = [n for n in plan.buckets[bucket] if plan.assignments[n].owner == rank and plan.moves(n)]
    return moved.buckets[bucket].gather_sent + moved.buckets[bucket].gather_received + _elements(plan, mine)


def _computing(plan: Plan, numbers: Sequence[int], squares: Callable[[int], int], *, with_results: bool) -> int:
    """Return the most elements of equal matrices that are computed at once: of their squares, and of both beside."""
    most = 0
    for some in alike(plan, numbers):
        rows, cols = plan.assignments[some[0]].matrix.shape
        count, moves = squares(some[0]), plan.moves(some[0])
        at_once = min(len(some), plan.budget.at_once(rows, cols, count, alone=plan.alone, moves=moves))
        most = max(most, at_once * (count * rows * rows + 2 * rows * cols * with_results))
    return most


def _kept(plan: Plan, rank: int, moved: Traffic, moving: Sequence[int]) -> int:
    """Return the elements that a CPU keeps: of each buffer two, for buckets, or rounds, that take turns."""
    found = 0
    for turn in (moving[::2], moving[1::2]):
        assembled = [_arriving(plan, rank, moved, bucket) for bucket in turn]
        mine = [[n for n in plan.buckets[b] if plan.assignments[n].owner == rank and plan.moves(n)] for b in turn]
        found += max(assembled, default=0) + max((_elements(plan, some) for some in mine), default=0)
        found += max((sum(_of_a_round(moved, bucket)) for bucket in turn), default=0)
    return found


def alike(plan: Plan, numbers: Sequence[int]) -> list[list[int]]:
    """Return assignments of equal shape together."""

    def shape(number: int) -> tuple[int, int]:
        one: Assignment = plan.assignments[number]
        return one.matrix.shape

    return [list(some) for _, some in itertools.groupby(sorted(numbers, key=shape), key=shape)]
