"""Memory of a step: the peak of a rank without weights, gradients and state, modelled from its plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from muonmesh.layout import Plan
from muonmesh.report.traffic import BucketTraffic, Traffic


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
    peak, sent, received = 0, 0, 0
    for bucket, after in itertools.zip_longest(moving, moving[1:]):
        here, elements = moved.buckets[bucket], moved.buckets[bucket].elements
        coming = 0 if after is None else moved.buckets[after].gather_buffers
        in_squares, with_matrices, with_results = (_computing(plan, here.mine, squares, beside=n) for n in (0, 1, 2))
        if plan.gathers(bucket):
            arrived = max(here.gather_buffers, 2 * elements + in_squares)
            peak = max(peak, arrived + coming + sent + received)
        else:  # results of the previous bucket have arrived after the first portion
            peak = max(peak, max(with_results + sent + received, with_matrices + elements) + coming)
        near = plan.rounds(bucket).near  # whether the first round sends shards to the owner's own replica
        pairs = list(zip(here.rounds_sent, here.rounds_received, strict=False))
        sent, received = pairs[0]
        peak = max(peak, max(elements, computing) + sent + received + coming)
        for turn, (leaving, returning) in enumerate(pairs[1:], 1):  # while the previous round is written
            anew = near or leaving != sent
            kept = elements if anew or any(later != leaving for later, _ in pairs[turn + 1 :]) else 0
            peak = max(peak, kept + sent * anew + leaving + received + returning + coming)
            sent, received = leaving, returning
    return peak * plan.budget.itemsize


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
    """Return the elements that a CPU keeps: two buffers of each kind, because buckets and rounds take turns."""
    found = 0
    for turn in (buckets[::2], buckets[1::2]):
        found += max((bucket.gather_buffers for bucket in turn), default=0)
        found += max((bucket.elements for bucket in turn), default=0)
        found += max((max(b.rounds_sent, default=0) + max(b.rounds_received, default=0) for b in turn), default=0)
    return found
