"""Memory of a step: the peak of a rank without weights, gradients and state, modelled from its plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from muonmesh.layout import Plan
from muonmesh.report.traffic import Traffic


def step_memory(plan: Plan, rank: int, moved: Traffic, squares: Callable[[int], int]) -> int:
    """Return the modelled peak memory of a step in bytes: buffers of the exchange, as in `Budget`, and computation.

    Args:
        plan: The plan with its budget.
        rank: The rank.
        moved: The traffic of this rank.
        squares: A function from an assignment to the number of rows × rows buffers that its orthogonalization needs.
    """
    owned = [[n for n in bucket if plan.assignments[n].owner == rank] for bucket in plan.buckets]
    moving = [number for number, bucket in enumerate(plan.buckets) if any(map(plan.moves, bucket))]
    local = [n for bucket in owned for n in bucket if not plan.moves(n)]
    mine = [[n for n in bucket if plan.moves(n)] for bucket in owned]
    if plan.budget.host:
        return _kept(plan, moved, moving, mine) * plan.budget.itemsize
    computing = _computing(plan, local, squares, beside=2)
    if not moving:
        return computing * plan.budget.itemsize
    peak, sent, received = 0, 0, 0
    for bucket, after in itertools.zip_longest(moving, moving[1:]):
        elements = _elements(plan, mine[bucket])
        coming = 0 if after is None else _arriving(plan, moved, after, mine)
        in_squares, with_matrices, with_results = (_computing(plan, mine[bucket], squares, beside=n) for n in (0, 1, 2))
        if plan.gathers(bucket):
            arrived = max(_arriving(plan, moved, bucket, mine), 2 * elements + in_squares)
            peak = max(peak, arrived + coming + sent + received)
        else:  # results of the previous bucket have arrived after the first portion
            peak = max(peak, max(with_results + sent + received, with_matrices + elements) + coming)
        near = plan.rounds(bucket).near  # whether the first round sends shards to the owner's own replica
        pairs = list(zip(moved.buckets[bucket].rounds_sent, moved.buckets[bucket].rounds_received, strict=False))
        sent, received = pairs[0]
        peak = max(peak, max(elements, computing) + sent + received + coming)
        for turn, (leaving, returning) in enumerate(pairs[1:], 1):  # while the previous round is written
            anew = near or leaving != sent
            kept = elements if anew or any(later != leaving for later, _ in pairs[turn + 1 :]) else 0
            peak = max(peak, kept + sent * anew + leaving + received + returning + coming)
            sent, received = leaving, returning
    return peak * plan.budget.itemsize


def _elements(plan: Plan, numbers: Sequence[int]) -> int:
    return sum(plan.assignments[n].matrix.numel for n in numbers)


def _arriving(plan: Plan, moved: Traffic, bucket: int, mine: Sequence[Sequence[int]]) -> int:
    """Return the elements of the buffers to send, receive and assemble a bucket; 0 if nothing is gathered."""
    if not plan.gathers(bucket):
        return 0
    return moved.buckets[bucket].gather_sent + moved.buckets[bucket].gather_received + _elements(plan, mine[bucket])


def _computing(plan: Plan, numbers: Sequence[int], squares: Callable[[int], int], *, beside: int) -> int:
    """Return the most elements in use at once by equal matrices: their squares, and ``beside`` times the matrices."""
    most = 0
    for some in plan.alike(numbers):
        rows, cols = plan.assignments[some[0]].matrix.shape
        count = squares(some[0])
        at_once = min(len(some), plan.at_once(some[0], count))
        most = max(most, at_once * (count * rows * rows + beside * rows * cols))
    return most


def _kept(plan: Plan, moved: Traffic, moving: Sequence[int], mine: Sequence[Sequence[int]]) -> int:
    """Return the elements that a CPU keeps: two buffers of each kind, because buckets and rounds take turns."""
    found = 0
    for turn in (moving[::2], moving[1::2]):
        assembled = [_arriving(plan, moved, bucket, mine) for bucket in turn]
        found += max(assembled, default=0) + max((_elements(plan, mine[bucket]) for bucket in turn), default=0)
        ways = [(way.rounds_sent, way.rounds_received) for bucket in turn for way in [moved.buckets[bucket]]]
        found += max((max(sent, default=0) + max(received, default=0) for sent, received in ways), default=0)
    return found
