"""Balance: how evenly a plan spreads the work over ranks, compared with the best possible plan."""

from __future__ import annotations

from collections import Counter

from muonmesh.layout.plan import Plan


def least_imbalance(plan: Plan) -> float:
    """Return a lower bound on the imbalance of any plan, as if every rank could own every matrix.

    The busiest rank has at least the mean load, and at least the load of the largest matrix. The bound is the smallest
    load between these values and the plan's own that is not proved to be too small.
    """
    jobs, ranks = Counter(assignment.flops for assignment in plan.assignments), len(plan.ranks)
    total = sum(plan.loads.values())
    if not total:
        return 1.0
    low, high = max(-(-total // ranks), *jobs), max(plan.loads.values())
    while low < high:
        capacity = (low + high) // 2
        low, high = (capacity + 1, high) if too_small(capacity, jobs, ranks) else (low, capacity)
    return low * ranks / total


def too_small(capacity: int, jobs: Counter[int], ranks: int) -> bool:
    """Whether these jobs (the number of jobs of each size) provably do not fit on ranks of this capacity.

    The proof uses the dual-feasible functions of Fekete and Schepers (2001), in integers. They round sizes up such that
    jobs that fit on a rank still fit: a size without a possible partner, or a size whose multiples do not divide the
    capacity. If the rounded sizes exceed the total capacity, the jobs do not fit.
    """
    partnerless = (
        sum(n * (capacity if p > capacity - least else p if p >= least else 0) for p, n in jobs.items())
        > ranks * capacity
        for least in jobs
        if 2 * least <= capacity
    )
    indivisible = (
        sum(n * (k * p if (k + 1) * p % capacity == 0 else (k + 1) * p // capacity * capacity) for p, n in jobs.items())
        > ranks * k * capacity
        for k in range(1, 50)
    )
    return any(partnerless) or any(indivisible)


def at_home(plan: Plan) -> float:
    """Return the share of matrices whose owner holds them whole, so that they need no gathering; 1 without any."""
    found = [not plan.travels(number, gather=True) for number in range(len(plan.assignments))]
    return sum(found) / len(found) if found else 1.0
