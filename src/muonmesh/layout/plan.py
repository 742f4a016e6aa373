"""Plan: who orthogonalises what, and the routes between those who hold and those who own."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from muonmesh.errors import LayoutError
from muonmesh.layout.layout import Layout
from muonmesh.layout.matrix import Matrix
from muonmesh.layout.region import Piece, Region, overlap


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter as the planner sees it.

    Attributes:
        name: Canonical name, unique.
        source: Where the momentum lives, the gather's source.
        target: Where the parameter lives, the scatter's target.
        matrices: What it consists of; they cover it exactly.
        flops: Cost of one of the matrices, in their order.
        settings: Text of everything that decides what an orthogonalisation computes. Matrices are batched
            only with equals, and the ranks compare it.
    """

    name: str
    source: Layout
    target: Layout
    matrices: tuple[Matrix, ...]
    flops: tuple[int, ...]
    settings: str


@dataclass(frozen=True, slots=True)
class Assignment:
    """One Matrix of the plan, of parameter number ``parameter``, and the rank that orthogonalises it."""

    parameter: int
    matrix: Matrix
    owner: int
    flops: int


@dataclass(frozen=True, slots=True)
class Leg:
    """A Piece of one assignment that travels between a holder's storage and the owner's matrix.

    ``start`` is its place in the elements exchanged with that peer.
    """

    assignment: int
    parameter: int
    piece: Piece
    start: int


@dataclass(frozen=True)
class Routes:
    """What one rank exchanges for one bucket and one layout, by peer. The way back is the same read backwards.

    ``held[owner]`` are the legs whose storage is on this rank; ``owned[holder]`` those whose matrix is.
    Both ends list the legs between two ranks in the same order.
    """

    held: dict[int, tuple[Leg, ...]]
    owned: dict[int, tuple[Leg, ...]]


@dataclass(frozen=True)
class Plan:
    """Who orthogonalises what. Plain data, the same on every rank; `routes` derives what one rank moves.

    Attributes:
        ranks: The connected set: all ranks that share any of the parameters.
        parameters: What was planned.
        assignments: Every Matrix once, with its owner.
        buckets: Numbers of the assignments that move and compute together, in order.
    """

    ranks: tuple[int, ...]
    parameters: tuple[Parameter, ...]
    assignments: tuple[Assignment, ...]
    buckets: tuple[tuple[int, ...], ...]

    def routes(self, bucket: int, rank: int, *, gather: bool) -> Routes:
        """Return what ``rank`` exchanges for a bucket on the way to the owners, or on the way back.

        On the way there each owner reads the replica it belongs to; on the way back every replica is served.
        """
        held: dict[int, list[Leg]] = {}
        owned: dict[int, list[Leg]] = {}
        for number in self.buckets[bucket]:
            assignment = self.assignments[number]
            parameter = self.parameters[assignment.parameter]
            place = parameter.source if gather else parameter.target
            holders = place.replica(assignment.owner) if gather else place.ranks
            if assignment.owner == rank:
                for holder in holders:
                    _extend(owned.setdefault(holder, []), number, assignment, place, holder)
            if rank in holders:
                _extend(held.setdefault(assignment.owner, []), number, assignment, place, rank)
        return Routes(
            {peer: tuple(legs) for peer, legs in held.items() if legs},
            {peer: tuple(legs) for peer, legs in owned.items() if legs},
        )

    def gathers(self, bucket: int) -> bool:
        """Whether any owner of the bucket needs what another rank holds."""
        return any(self._moves(number, gather=True) for number in self.buckets[bucket])

    def scatters(self, bucket: int) -> bool:
        """Whether any rank of the bucket needs what another rank owns."""
        return any(self._moves(number, gather=False) for number in self.buckets[bucket])

    def _moves(self, number: int, *, gather: bool) -> bool:
        assignment = self.assignments[number]
        parameter = self.parameters[assignment.parameter]
        place = parameter.source if gather else parameter.target
        owner_holds_all = all(assignment.owner in place.holders(block.region) for block in assignment.matrix.blocks)
        return not owner_holds_all or (not gather and place.copies() > 1)

    @cached_property
    def loads(self) -> dict[int, int]:
        """FLOPs of one step by rank."""
        loads = dict.fromkeys(self.ranks, 0)
        for assignment in self.assignments:
            loads[assignment.owner] += assignment.flops
        return loads

    def description(self) -> list[str]:
        """Return the lines that must be the same on every rank."""
        lines = [f"ranks {self.ranks}"]
        for parameter in self.parameters:
            lines.append(
                f"{parameter.name}: shape {parameter.target.shape}, {parameter.target.describe()}, "
                f"state {parameter.source.describe()}, {parameter.settings}, "
                f"{[(m.rows, m.cols) for m in parameter.matrices[:8]]} ×{len(parameter.matrices)}"
            )
        for number, bucket in enumerate(self.buckets):
            for index in bucket:
                lines.append(
                    f"bucket {number}: {self.assignments[index].matrix.name} on {self.assignments[index].owner}"
                )
        return lines

    @cached_property
    def digest(self) -> str:
        """A hash of the description."""
        return hashlib.sha256("\n".join(self.description()).encode()).hexdigest()


def _extend(legs: list[Leg], number: int, assignment: Assignment, place: Layout, holder: int) -> None:
    start = legs[-1].start + legs[-1].piece.numel if legs else 0
    for piece in pieces(place, holder, assignment.matrix):
        legs.append(Leg(number, assignment.parameter, piece, start))
        start += piece.numel


def pieces(layout: Layout, rank: int, matrix: Matrix) -> Iterator[Piece]:
    """Yield what ``rank`` stores of a matrix, with its place in the storage and in the matrix."""
    for stored in layout.blocks(rank):
        for block in matrix.blocks:
            piece = overlap(stored, block)
            if piece is not None:
                yield piece


def make_plan(parameters: Sequence[Parameter], *, ranks: Sequence[int] | None = None, bucket_elements: int) -> Plan:
    """Assign every matrix an owner and a bucket.

    Owners: longest processing time first on FLOPs over all ranks that hold the parameter, replicas included
    (Graham 1969; at most 4/3 of the best makespan, in practice within a few per cent). Where a rank holds the
    whole matrix and is not behind, it keeps it, since that moves nothing. Ties are broken by bytes, then name.

    Buckets: each owner's matrices are cut, in one order, into pieces of about ``bucket_elements``; bucket i
    holds the i-th piece of every owner, so all owners compute in every bucket.

    Args:
        parameters: What to plan, in the same order on every rank.
        ranks: The connected set; by default the ranks that hold any of the parameters.
        bucket_elements: Matrix elements of one owner in one bucket, about.

    Raises:
        LayoutError: the layouts of a parameter or its matrices do not cover it exactly once.
    """
    for parameter in parameters:
        _prove(parameter)
    holding = {rank for p in parameters for rank in (*p.source.ranks, *p.target.ranks)}
    ranks = tuple(sorted(holding) if ranks is None else ranks)
    owners = _assign(parameters, ranks)
    assignments = [
        Assignment(number, matrix, owners[number, matrix.index], flops)
        for number, parameter in enumerate(parameters)
        for matrix, flops in zip(parameter.matrices, parameter.flops, strict=True)
    ]
    order = sorted(
        range(len(assignments)),
        key=lambda i: (
            -assignments[i].flops,
            assignments[i].matrix.shape,
            parameters[assignments[i].parameter].settings,
            assignments[i].parameter,
            assignments[i].matrix.index,
        ),
    )
    filled = dict.fromkeys(ranks, 0)
    buckets: dict[int, list[int]] = {}
    for number in order:
        assignment = assignments[number]
        buckets.setdefault(filled[assignment.owner] // bucket_elements, []).append(number)
        filled[assignment.owner] += assignment.matrix.numel
    return Plan(ranks, tuple(parameters), tuple(assignments), tuple(tuple(buckets[key]) for key in sorted(buckets)))


def _assign(parameters: Sequence[Parameter], ranks: Sequence[int]) -> dict[tuple[int, int], int]:
    """Return the owner of each (parameter, matrix index)."""
    jobs = sorted(
        (
            (-flops, -matrix.numel, parameter.name, matrix.index, number, matrix)
            for number, parameter in enumerate(parameters)
            for matrix, flops in zip(parameter.matrices, parameter.flops, strict=True)
        ),
        key=lambda job: job[:4],
    )
    # (FLOPs, elements, rank), kept up to date lazily: loads only grow, so a stale entry is pushed again.
    load = {rank: (0, 0, rank) for rank in ranks}
    heaps: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
    fair = -sum(job[0] for job in jobs) / max(1, len(ranks))
    owners = {}
    for minus_flops, minus_numel, _, index, number, matrix in jobs:
        parameter = parameters[number]
        best = _least(heaps, load, parameter.target.ranks)
        holders = set(parameter.source.ranks)
        for block in matrix.blocks:
            holders.intersection_update(parameter.source.holders(block.region))
        if holders and len(holders) < len(parameter.target.ranks):
            local = min(load[rank] for rank in holders)
            if local[0] - minus_flops <= max(fair, best[0] - minus_flops):
                best = local
        owner = best[2]
        load[owner] = (best[0] - minus_flops, best[1] - minus_numel, owner)
        owners[number, index] = owner
    return owners


def _least(
    heaps: dict[tuple[int, ...], list[tuple[int, int, int]]],
    load: dict[int, tuple[int, int, int]],
    ranks: tuple[int, ...],
) -> tuple[int, int, int]:
    heap = heaps.setdefault(ranks, sorted(load[rank] for rank in ranks))
    while heap[0] != load[heap[0][2]]:
        heapq.heapreplace(heap, load[heap[0][2]])
    return heap[0]


def _prove(parameter: Parameter) -> None:
    """Prove that storage covers the parameter exactly once per replica, and that the matrices tile it."""
    try:
        parameter.source.prove_cover()
        if parameter.target is not parameter.source:
            parameter.target.prove_cover()
        regions = [block.region for matrix in parameter.matrices for block in matrix.blocks]
        _prove_tiling(regions, parameter.target.shape)
    except LayoutError as error:
        raise LayoutError(f"{parameter.name}: {error}") from None


def _prove_tiling(regions: Sequence[Region], shape: Sequence[int], dim: int = 0) -> None:
    """Prove that regions tile a box: along each dim their runs are equal or disjoint and fill it, recursively."""
    if dim == len(shape):
        if len(regions) != 1:
            raise LayoutError(f"the element at {regions[0].offset} belongs to {len(regions)} matrices")
        return
    groups: dict[tuple[int, int, int], list[Region]] = {}
    for region in regions:
        groups.setdefault((region.offset[dim], region.step[dim], region.shape[dim]), []).append(region)
    position = 0
    for number, (offset, step, count) in enumerate(sorted(groups)):
        if step == 1 and offset == position:
            position += count
        elif (offset, step * count) == (number, shape[dim]) and step == len(groups):
            position = shape[dim]  # `step` progressions, one for each remainder
        else:
            raise LayoutError(f"the matrices overlap or leave a gap at index {position} of dim {dim}")
    if position != shape[dim]:
        raise LayoutError(f"the matrices leave a gap at index {position} of dim {dim}")
    for group in groups.values():
        _prove_tiling(group, shape, dim + 1)
