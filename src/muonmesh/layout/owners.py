"""Owners: which ranks orthogonalise a matrix, chosen by what each of them carries already."""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Mapping, Sequence

from muonmesh.errors import LayoutError, explain_error
from muonmesh.layout.layout import Layout
from muonmesh.layout.matrix import Matrix
from muonmesh.layout.parameter import Parameter, listed_by, text_of_ranks
from muonmesh.layout.rates import Teams


def assign_teams(
    parameters: Sequence[Parameter],
    ranks: Sequence[int],
    allowed: Teams | None,
    itemsize: int,
    asked: Mapping[tuple[int, int], tuple[int, ...]],
) -> dict[tuple[int, int], tuple[int, ...]]:
    """Return the team of each (parameter, matrix index), the owner first.

    Owners: longest processing time first on FLOPs over all ranks that list the parameter, replicas included
    (Graham 1969; at most 4/3 of the best makespan, in practice within a few per cent). A rank that holds the whole
    matrix keeps it, since that moves nothing, unless its load would exceed both what the busiest rank must carry
    anyhow and what the least busy one would carry. Among ranks with equal loads the owners are spread over replicas
    and machines.

    Teams: a matrix that would make its owner the last to finish, by more than `_LATE` allows, is given to the smallest
    team that would not be; and where every team would be, to the one that ends first.

    Args:
        parameters: What to assign.
        ranks: The connected set.
        allowed: Which teams there may be; None if every matrix has one owner.
        itemsize: Bytes of an element that a team gathers.
        asked: The teams of some matrices, by (parameter, index), which are taken as they are.

    Raises:
        LayoutError: a team is empty, names a rank twice, or one that does not hold the parameter.
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
    listed = [listed_by(parameter) for parameter in parameters]
    everywhere = [loads.heap(some) for some in listed]
    # No plan's busiest rank carries less than the mean, or than the largest matrix that has one owner.
    mean = -sum(job[0] for job in jobs) / max(1, len(ranks))
    unavoidable = max(mean, -jobs[0][0] if jobs and allowed is None else 0)
    teams = {}
    alone = {rank: (rank,) for rank in ranks}
    members: dict[Sequence[int], frozenset[int]] = {}
    for some in listed:
        if some not in members:
            members[some] = frozenset(some)
    may_join = [members[some] for some in listed]
    for minus_flops, minus_numel, _, index, number, matrix in jobs:
        parameter = parameters[number]
        if (number, index) in asked:
            team = teams[number, index] = asked[number, index]
            _prove_team(parameter, matrix, team, may_join[number])
            for rank in team:
                loads.add(rank, -minus_flops // len(team), -minus_numel)
            continue
        gathered = parameter.gathered[index] if parameter.gathered else 0
        if allowed is not None and gathered:
            load = functools.partial(allowed.load, -minus_flops, gathered, itemsize)
            sizes = {size: load(size) for size in allowed.sizes}
            team = loads.team(listed[number], sizes, at_most=_LATE * max(mean, loads.busiest))
            if len(team) > 1:
                teams[number, index] = team
                for rank in team:
                    loads.add(rank, sizes[len(team)], -minus_numel)
                continue
        owner = loads.least(everywhere[number])
        holders = _holders_of_all(parameter.momentum_storage, matrix)
        if holders and len(holders) < len(listed[number]):
            local = loads.least(loads.heap(holders))
            if loads.flops(local) - minus_flops <= max(unavoidable, loads.flops(owner) - minus_flops):
                owner = local
        loads.add(owner, -minus_flops, -minus_numel)
        team = teams[number, index] = alone[owner]
        _prove_team(parameter, matrix, team, may_join[number])
    return teams


def _holders_of_all(layout: Layout, matrix: Matrix) -> Sequence[int]:
    """Return the ranks that hold every block of a matrix."""
    first, *others = matrix.blocks
    holders = layout.holders(first.region)
    for block in others:
        if not holders:
            break
        both = set(layout.holders(block.region))
        holders = tuple(rank for rank in holders if rank in both)
    return holders


_LATE = 1.02
"""How much later than the mean, or than the last of the others, an owner may finish before others share its matrix."""

_Load = tuple[int, int, int, int]
"""(FLOPs, elements, turn, rank): the least is the next to be given something."""


class _Loads:
    """What the ranks carry so far, and who carries least."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._of: dict[int, _Load] = {rank: (0, 0, turn, rank) for turn, rank in enumerate(_spread(ranks))}
        self.busiest = 0
        self._heaps: dict[Sequence[int], list[_Load]] = {}
        self._blocks: dict[tuple[Sequence[int], int], list[tuple[int, int, tuple[int, ...]]]] = {}

    def flops(self, rank: int) -> int:
        return self._of[rank][0]

    def add(self, rank: int, flops: int, numel: int) -> None:
        before = self._of[rank]
        self.busiest = max(self.busiest, before[0] + flops)
        self._of[rank] = (before[0] + flops, before[1] + numel, *before[2:])

    def team(self, ranks: Sequence[int], sizes: Mapping[int, int], *, at_most: float) -> tuple[int, ...]:
        """Return the smallest team that ends within ``at_most`` FLOPs, the one that carries least; or that ends first.

        Args:
            ranks: Of which.
            sizes: What each member carries, by the size of the team, the smallest first.
            at_most: What the busiest rank may carry.
        """
        found: list[tuple[int, int, tuple[int, ...]]] = []
        for size, load in sizes.items():
            blocks = self._heap_of_blocks(ranks, size)
            if not blocks:
                break
            while blocks[0][0] != (most := max(map(self.flops, blocks[0][2]))):
                heapq.heapreplace(blocks, (most, *blocks[0][1:]))
            block = blocks[0][2]
            found.append((most + load, size, block))
            if most + load <= at_most:
                break
        _, _, block = found[-1] if found[-1][0] <= at_most else min(found)
        owner = min(block, key=self._of.__getitem__)
        return owner, *(rank for rank in block if rank != owner)

    def _heap_of_blocks(self, ranks: Sequence[int], size: int) -> list[tuple[int, int, tuple[int, ...]]]:
        """Return (FLOPs of the busiest, turn, ranks) of the teams of a size among some ranks."""
        if (ranks, size) not in self._blocks:
            among: dict[int, list[int]] = {}
            for rank in sorted(ranks):
                among.setdefault(rank // size, []).append(rank)
            blocks = [tuple(block) for block in among.values() if len(block) == size]
            heap = [(max(map(self.flops, b)), min(self._of[r][2] for r in b), b) for b in blocks]
            heapq.heapify(heap)
            self._blocks[ranks, size] = heap
        return self._blocks[ranks, size]

    def heap(self, ranks: Sequence[int]) -> list[_Load]:
        """Return the loads of a set of ranks, for `least`."""
        if ranks not in self._heaps:
            self._heaps[ranks] = sorted(self._of[rank] for rank in ranks)
        return self._heaps[ranks]

    def least(self, heap: list[_Load]) -> int:
        """Return the rank that carries least. Loads only grow, so an entry that is out of date is too small."""
        while heap[0] != self._of[heap[0][3]]:
            heapq.heapreplace(heap, self._of[heap[0][3]])
        return heap[0][3]


def _spread(ranks: Sequence[int]) -> list[int]:
    """Return the ranks in golden-ratio steps, so that the first few of any number lie evenly among all.

    Where there are fewer large matrices than ranks, their owners then are of all replicas and machines. (Halving
    intervals again and again would spread them too, but over few coordinates of the other axes of the mesh.)
    """
    golden = (math.sqrt(5) - 1) / 2
    # No gap between 2n such points is as wide as 1/n, so every rank is met.
    steps = (int(golden * i % 1 * len(ranks)) for i in range(2 * len(ranks)))
    return [ranks[index] for index in dict.fromkeys(steps)]


def _prove_team(parameter: Parameter, matrix: Matrix, team: Sequence[int], may_join: frozenset[int]) -> None:
    """Prove that a team is of one or more different ranks that hold the parameter."""
    if not team or len(set(team)) < len(team) or not may_join.issuperset(team):
        needed = f"one or more different ones {text_of_ranks(listed_by(parameter))}, the owner first"
        raise LayoutError(explain_error(matrix.name, f"the team {tuple(team)}", needed, "Name each once"))
