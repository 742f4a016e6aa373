"""Balance: how evenly a plan spreads the work, and how evenly any plan could."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from muonmesh.layout.plan import Plan


def imbalance(loads: Mapping[int, int]) -> float:
    """Return the load of the busiest rank over the mean; 1 is perfect, and what ranks without work have.

    Args:
        loads: FLOPs of each rank of a plan (`Plan.loads`).
    """
    total = sum(loads.values())
    return max(loads.values()) * len(loads) / total if total else 1.0


def least_imbalance(plan: Plan) -> float:
    """Return a bound on the imbalance that any assignment could reach, as if every rank might own every matrix.

    No rank can stay below the mean, nor all below the largest matrix; between that and what the plan reached, the
    smallest capacity that is not proved too small.
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
    """Whether these jobs (how many of each size) provably do not fit ranks of this capacity.

    By the dual-feasible functions of Fekete and Schepers (2001): sizes that stay addable to one capacity when they are
    rounded up, for lack of a partner or because equal shares do not divide it; all of them must still fit. In integers.
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
