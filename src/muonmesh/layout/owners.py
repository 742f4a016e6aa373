"""Owners: chooses the rank that orthogonalizes each matrix, by the load that each rank already has."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from muonmesh.layout.flat import Layout
from muonmesh.layout.matrix import Matrix
from muonmesh.layout.parameter import Parameter

KnownMatrix: TypeAlias = tuple[str, tuple[int, ...], int]
"""The identity of a matrix in successive plans: the name and the ranks of its parameter, and its index."""


def assign_owners(
    parameters: Sequence[Parameter], ranks: Sequence[int], fixed_owners: Mapping[KnownMatrix, int]
) -> dict[tuple[int, int], int]:
    """Return the owner of each (parameter, matrix index).

    The method is longest processing time first, on FLOPs, over all ranks of the parameter including replicas (Graham
    1969; at most 4/3 of the best makespan, in practice within a few per cent). A rank that holds the whole matrix
    becomes its owner, because then nothing moves, unless its load would exceed both the lowest possible load of the
    busiest rank and the load of the least busy candidate. Among ranks with equal loads, owners are spread over replicas
    and machines.

    Args:
        parameters: The parameters whose matrices are assigned.
        ranks: The connected set.
        fixed_owners: Matrices with a fixed owner, and this owner.
    """
    jobs = sorted(
        (
            (-flops, -matrix.numel, parameter.name, matrix.index, number, matrix)
            for number, parameter in enumerate(parameters)
            for matrix, flops in zip(parameter.matrices, parameter.flops, strict=True)
        ),
        key=lambda job: job[:4],
    )
    loads = _Loads(ranks)
    listed = [_candidates(parameter) for parameter in parameters]
    everywhere = [loads.heap(candidates) for candidates in listed]
    # In every plan, the busiest rank carries at least the mean, and at least the largest matrix.
    mean = -sum(job[0] for job in jobs) / max(1, len(ranks))
    unavoidable = max(mean, -jobs[0][0] if jobs else 0)
    owners = {}
    for minus_flops, minus_numel, _, index, number, matrix in jobs:
        parameter = parameters[number]
        owner = fixed_owners.get((parameter.name, parameter.target.ranks, index), -1) if fixed_owners else -1
        if owner not in parameters[number].target.ranks:
            owner = loads.least(everywhere[number])
            holders = _holders_of_all(parameters[number].momentum_storage, matrix)
            if holders and len(holders) < len(listed[number]):
                local = loads.least(loads.heap(holders))
                if loads.flops(local) - minus_flops <= max(unavoidable, loads.flops(owner) - minus_flops):
                    owner = local
        loads.add(owner, -minus_flops, -minus_numel)
        owners[number, index] = owner
    return owners


def _candidates(parameter: Parameter) -> Sequence[int]:
    """Return the ranks that may own a matrix: all its ranks, or the replica that alone keeps the momentum."""
    ranks, momentum = parameter.target.ranks, parameter.momentum_storage
    if momentum == parameter.target:
        return ranks
    return tuple(rank for rank in ranks if rank in momentum.ranks and momentum.blocks(rank)) or ranks


def _holders_of_all(layout: Layout, matrix: Matrix) -> Sequence[int]:
    """Return the ranks that hold every block of a matrix."""
    first, *others = matrix.blocks
    holders = layout.holders(first.region)
    for block in others:
        if not holders:
            break
        block_holders = set(layout.holders(block.region))
        holders = tuple(rank for rank in holders if rank in block_holders)
    return holders


_Load = tuple[int, int, int, int]
"""(FLOPs, elements, turn, rank); the rank with the least load gets the next matrix."""


class _Loads:
    """The loads of the ranks so far; finds the rank with the least load."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._of: dict[int, _Load] = {rank: (0, 0, order, rank) for order, rank in enumerate(_spread(ranks))}
        self._heaps: dict[Sequence[int], list[_Load]] = {}

    def flops(self, rank: int) -> int:
        return self._of[rank][0]

    def add(self, rank: int, flops: int, numel: int) -> None:
        before = self._of[rank]
        self._of[rank] = (before[0] + flops, before[1] + numel, *before[2:])

    def heap(self, ranks: Sequence[int]) -> list[_Load]:
        """Return the loads of a set of ranks, for `least`."""
        if ranks not in self._heaps:
            self._heaps[ranks] = sorted(self._of[rank] for rank in ranks)
        return self._heaps[ranks]

    def least(self, heap: list[_Load]) -> int:
        """Return the rank with the least load. Loads only grow, so an outdated entry of the heap is too small."""
        while heap[0] != self._of[heap[0][3]]:
            heapq.heapreplace(heap, self._of[heap[0][3]])
        return heap[0][3]


def _spread(ranks: Sequence[int]) -> list[int]:
    """Return the ranks in golden-ratio steps, so that the first n ranks are evenly spread for every n.

    If there are fewer large matrices than ranks, their owners are then spread over all replicas and machines. (Halving
    intervals again and again would spread them too, but over few coordinates of the other axes of the mesh.)
    """
    golden = (math.sqrt(5) - 1) / 2
    # No gap between 2n such points is as wide as 1/n, so every rank is reached.
    steps = (int(golden * i % 1 * len(ranks)) for i in range(2 * len(ranks)))
    return [ranks[index] for index in dict.fromkeys(steps)]
