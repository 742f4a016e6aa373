"""Plan: who orthogonalises what, and the routes between those who hold and those who own."""

from __future__ import annotations

import functools
import hashlib
import heapq
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from muonmesh.errors import LayoutError, NotCovered, explain_error
from muonmesh.layout.companion import Companion
from muonmesh.layout.layout import Layout
from muonmesh.layout.matrix import Matrix
from muonmesh.layout.rates import Teams
from muonmesh.layout.region import Block, Piece, Region, overlap


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter as the planner sees it.

    Attributes:
        name: Canonical name, unique.
        momentum_storage: Where the momentum lives, which is gathered.
        target: Where the parameter lives, to which results are scattered.
        matrices: What it consists of; they cover it exactly.
        flops: Cost of each of the matrices, in their order.
        settings: Text of everything that decides what an orthogonalisation computes. Matrices are batched
            only with equals, and the ranks compare it.
        segments: Into how many sums over the ranks a Gram exchange divides the steps; 0 if there can be none.
        companions: What its rule keeps by row, column or matrix, which travels to the owners and back.
        sums: How many sums over each of the matrices its rule asks for, before the weights are written.
        gathered: Elements of the products of each matrix, which a team gathers; 0 for one that no team can take. Empty
            if there are no teams.
    """

    name: str
    momentum_storage: Layout
    target: Layout
    matrices: tuple[Matrix, ...]
    flops: tuple[int, ...]
    settings: str
    segments: int = 0
    companions: tuple[Companion, ...] = ()
    sums: int = 0
    gathered: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Elementwise:
    """A parameter that needs no orthogonalisation (AdamW's): nothing of it moves, but the ranks agree on it."""

    name: str
    target: Layout


def describe(parameter: Parameter | Elementwise) -> str:
    """Return a line that says all that the ranks must agree on about a parameter."""
    target = parameter.target
    line = f"{parameter.name}: shape {target.shape}, {target.describe()} {_told(target.ranks)}"
    if isinstance(parameter, Elementwise):
        return f"{line}, not orthogonalised"
    sizes = [(m.rows, m.cols) for m in parameter.matrices[:8]]
    momentum = parameter.momentum_storage.describe()
    kept = "".join(f", {companion.describe()}" for companion in parameter.companions)
    if parameter.sums:
        kept += f", {parameter.sums} summed"
    return f"{line}, state {momentum}{kept}, {parameter.settings}, {sizes} ×{len(parameter.matrices)}"


def _told(ranks: Sequence[int]) -> str:
    """Return ranks as text, many of them as a number that is the same for the same ranks."""
    return f"on {ranks}" if len(ranks) <= 8 else f"on {len(ranks)} ranks ({hash(tuple(ranks)) & 0xFFFFFFFF:08x})"


@dataclass(frozen=True, slots=True)
class Assignment:
    """One Matrix of the plan, of parameter number ``parameter``, and the ranks that orthogonalise it together.

    Attributes:
        parameter: Number of the parameter.
        matrix: What is orthogonalised.
        team: Those ranks, usually one. Each gets the whole matrix; the first returns the result.
        flops: Cost of the matrix, which the team shares.
    """

    parameter: int
    matrix: Matrix
    team: tuple[int, ...]
    flops: int

    @property
    def owner(self) -> int:
        """The first of the team."""
        return self.team[0]


@dataclass(frozen=True, slots=True)
class Leg:
    """A Piece of one assignment that travels between a holder's storage and the matrix of a member of its team.

    ``start`` is its place in the elements exchanged with that peer.
    """

    assignment: int
    parameter: int
    piece: Piece
    start: int


@dataclass(frozen=True)
class Routes:
    """What one rank exchanges for one bucket and one layout, by peer. The way back is the same read backwards.

    ``held[member]`` are the legs whose storage is on this rank; ``owned[holder]`` those whose matrix is.
    Both ends list the legs between two ranks in the same order.
    """

    held: dict[int, tuple[Leg, ...]]
    owned: dict[int, tuple[Leg, ...]]


@dataclass(frozen=True)
class Plan:
    """Who orthogonalises what. Plain data, the same on every rank; `routes` derives what one rank moves.

    Attributes:
        ranks: The connected set: all ranks that share any of the parameters.
        parameters: The parameters whose matrices are assigned.
        assignments: Every Matrix once, with its team.
        buckets: Numbers of the assignments that move and compute together, in order.
        elementwise: Parameters that are not orthogonalised.
        grams: Numbers of the assignments that no owner computes: their Gram matrices are summed (`layout.gram`).
        bucket_elements: About how many elements a rank works on at a time.
    """

    ranks: tuple[int, ...]
    parameters: tuple[Parameter, ...]
    assignments: tuple[Assignment, ...]
    buckets: tuple[tuple[int, ...], ...]
    elementwise: tuple[Elementwise, ...] = ()
    grams: tuple[int, ...] = ()
    bucket_elements: int = 1 << 23

    def routes(self, bucket: int, rank: int, *, gather: bool) -> Routes:
        """Return what ``rank`` exchanges for a bucket on the way to the teams, or on the way back.

        On the way there each member of a team is sent what the ranks of its own replica hold; on the way back the owner
        sends the result to the ranks of every replica.
        """
        held: dict[int, list[Leg]] = {}
        owned: dict[int, list[Leg]] = {}
        for number in self.buckets[bucket]:
            assignment = self.assignments[number]
            place = self._place(assignment, gather=gather)
            members = _at_matrix(assignment, gather=gather)
            if rank in members:
                holders = place.replica(rank) if gather else place.ranks
                for holder, parts in _pieces_by_holder(place, holders, assignment.matrix):
                    _extend(owned, holder, number, assignment, parts)
            mine = tuple(pieces(place, rank, assignment.matrix))
            for member in members if mine else ():
                if not gather or rank in place.replica(member):
                    _extend(held, member, number, assignment, mine)
        return Routes(
            {peer: tuple(legs) for peer, legs in held.items()}, {peer: tuple(legs) for peer, legs in owned.items()}
        )

    def gathers(self, bucket: int) -> bool:
        """Whether any team of the bucket needs what another rank holds."""
        return any(self._moves(number, gather=True) for number in self.buckets[bucket])

    def scatters(self, bucket: int) -> bool:
        """Whether any rank of the bucket needs what another rank owns."""
        return any(self._moves(number, gather=False) for number in self.buckets[bucket])

    def rounds(self, bucket: int) -> int:
        """Return in how many rounds the results of a bucket travel, the same on every rank; 0 if none does.

        An owner sends one copy of its result to each replica, and a rank receives its shards of all results. With many
        replicas both are many times what an owner computes. So they are cut until in no round a rank sends or receives
        more than the owner with the most in the bucket computes, or ``bucket_elements``. Where rules ask for sums over
        the matrices there is one round, since nothing is written before all has arrived.
        """
        numbers = self.buckets[bucket]
        if not self.scatters(bucket):
            return 0
        if self.summed(numbers) or all(self._place(self.assignments[n], gather=False).copies() == 1 for n in numbers):
            return 1
        owned, sent, kept = Counter[int](), Counter[int](), Counter[int]()
        stored = Counter[Sequence[int]]()
        for number in numbers:
            assignment = self.assignments[number]
            target, owner, size = self._place(assignment, gather=False), assignment.owner, assignment.matrix.numel
            part = size * target.copies() // len(target.ranks)
            stored[target.ranks] += part
            owned[owner] += size
            sent[owner] += size * target.copies() - part
            kept[owner] += part
        received = Counter[int]()
        for ranks, part in stored.items():
            for rank in ranks:
                received[rank] += part
        at_most = max(self.bucket_elements, *owned.values())
        most = max(*sent.values(), *(received[rank] - kept[rank] for rank in received))
        return max(1, -(-most // at_most))

    def moves(self, number: int) -> bool:
        """Whether anything of an assignment travels; if not, its owner is the only rank that holds any of it."""
        return self._moves(number, gather=True) or self._moves(number, gather=False)

    def _moves(self, number: int, *, gather: bool) -> bool:
        assignment = self.assignments[number]
        place = self._place(assignment, gather=gather)
        if not gather and place.copies() > 1:
            return True
        members = _at_matrix(assignment, gather=gather)
        return not all(
            rank in holders
            for block in assignment.matrix.blocks
            for holders in [place.holders(block.region)]
            for rank in members
        )

    def _place(self, assignment: Assignment, *, gather: bool) -> Layout:
        """Return where the other end of an assignment's routes is."""
        parameter = self.parameters[assignment.parameter]
        return parameter.momentum_storage if gather else parameter.target

    def summed(self, assignments: Iterable[int]) -> dict[int, int]:
        """Return those of some assignments whose rule asks for sums over the matrix, each with how many."""
        counts = ((number, self.parameters[self.assignments[number].parameter].sums) for number in assignments)
        return {number: count for number, count in counts if count}

    def told(self, assignment: int) -> tuple[str, ...]:
        """Return the keys of what is kept of a matrix as one number, which its owner tells with the sums over it."""
        companions = self.parameters[self.assignments[assignment].parameter].companions
        return tuple(companion.key for companion in companions if companion.side == "matrix")

    @property
    def targets(self) -> list[Layout]:
        """Where each parameter lives."""
        return [p.target for p in self.parameters] + [other.target for other in self.elementwise]

    @cached_property
    def loads(self) -> dict[int, int]:
        """FLOPs of one step by rank."""
        loads = dict.fromkeys(self.ranks, 0)
        summed = set(self.grams)
        for number, assignment in enumerate(self.assignments):
            team = self.parameters[assignment.parameter].target.ranks if number in summed else assignment.team
            for rank in team:
                loads[rank] += assignment.flops // len(team)
        return loads

    def description(self) -> list[str]:
        """Return the lines that must be the same on every rank."""
        lines = [f"ranks {self.ranks}"]
        lines += [describe(parameter) for parameter in self.parameters] + [
            describe(other) for other in self.elementwise
        ]
        for number, bucket in enumerate(self.buckets):
            for index in bucket:
                owner, *others = self.assignments[index].team
                along = f" with {', '.join(map(str, others))}" if others else ""
                lines.append(f"bucket {number}: {self.assignments[index].matrix.name} on {owner}{along}")
        together = f"{self.bucket_elements} elements at a time"
        lines += [f"Gram matrices of {self.assignments[index].matrix.name}, {together}" for index in self.grams]
        return lines

    @cached_property
    def digest(self) -> str:
        """A hash of the description."""
        return hashlib.sha256("\n".join(self.description()).encode()).hexdigest()


def in_rounds(legs: Sequence[Leg], rounds: int) -> list[tuple[Leg, ...]]:
    """Cut the legs between two ranks into nearly equal parts, at rows of their pieces; both ranks cut alike.

    ``start`` of a leg is then its place in what is exchanged in its round.
    """
    if rounds == 1:
        return [tuple(legs)]
    total = legs[-1].start + legs[-1].piece.numel
    found: list[list[Leg]] = [[] for _ in range(rounds)]
    filled = [0] * rounds
    for leg in legs:
        piece = leg.piece
        dim = next((d for d, size in enumerate(piece.shape) if size > 1), 0)
        rows = piece.shape[dim]
        width = piece.numel // rows
        # The row that begins at or after the place where each round begins.
        firsts = [min(rows, max(0, -((leg.start - total * k // rounds) // width))) for k in range(rounds)] + [rows]
        for k in range(rounds):
            first, count = firsts[k], firsts[k + 1] - firsts[k]
            if count > 0:
                found[k].append(replace(leg, piece=piece.rows(dim, first, count), start=filled[k]))
                filled[k] += count * width
    return [tuple(some) for some in found]


def _at_matrix(assignment: Assignment, *, gather: bool) -> tuple[int, ...]:
    """Return the ranks at the other end of an assignment's routes: its team there, its owner on the way back."""
    return assignment.team if gather else assignment.team[:1]


def _extend(legs: dict[int, list[Leg]], peer: int, number: int, assignment: Assignment, parts: Iterable[Piece]) -> None:
    for piece in parts:
        before = legs.setdefault(peer, [])
        start = before[-1].start + before[-1].piece.numel if before else 0
        before.append(Leg(number, assignment.parameter, piece, start))


def pieces(layout: Layout, rank: int, matrix: Matrix) -> Iterator[Piece]:
    """Yield what ``rank`` stores of a matrix, with its place in the storage and in the matrix."""
    return _overlaps(layout.blocks(rank), matrix)


def _overlaps(stored: tuple[Block, ...], matrix: Matrix) -> Iterator[Piece]:
    for ours in stored:
        for block in matrix.blocks:
            piece = overlap(ours, block)
            if piece is not None:
                yield piece


def _pieces_by_holder(
    layout: Layout, holders: Sequence[int], matrix: Matrix
) -> Iterator[tuple[int, tuple[Piece, ...]]]:
    """Yield each of many holders with its pieces of a matrix; those of replicas are found, and kept, once."""
    found: dict[tuple[Block, ...], tuple[Piece, ...]] = {}
    for holder in holders:
        stored = layout.blocks(holder)
        if stored not in found:
            found[stored] = tuple(_overlaps(stored, matrix))
        yield holder, found[stored]


def make_plan(
    parameters: Sequence[Parameter],
    *,
    ranks: Sequence[int] | None = None,
    bucket_elements: int,
    elementwise: Sequence[Elementwise] = (),
    grams: Collection[tuple[int, int]] = (),
    teams: Teams | None = None,
    itemsize: int = 2,
    _teams: Mapping[tuple[int, int], tuple[int, ...]] = MappingProxyType({}),
) -> Plan:
    """Assign every matrix a team, of one rank unless ``teams`` allows more, its owner, and a bucket.

    Owners: longest processing time first on FLOPs over all ranks that hold the parameter, replicas included
    (Graham 1969; at most 4/3 of the best makespan, in practice within a few per cent). A rank that holds the whole
    matrix keeps it, since that moves nothing, unless its load would exceed both what the busiest rank must carry
    anyhow and what the least busy one would carry. Among ranks with equal loads the owners are spread over replicas
    and machines.

    Teams: a matrix that would make its owner the last to finish is given to the smallest team that would not be, and
    where every one would be, to the one that ends first.

    Buckets: each owner's matrices are cut, in one order, into pieces of about ``bucket_elements``; bucket i
    holds the i-th piece of every owner, so all owners compute in every bucket.

    Args:
        parameters: What to plan, in the same order on every rank.
        ranks: The connected set; by default the ranks that hold any of the parameters.
        bucket_elements: Matrix elements of one owner in one bucket, about.
        elementwise: Parameters that are not orthogonalised.
        grams: (parameter, index) of the matrices whose Gram matrices are summed instead.
        teams: Whether several ranks may orthogonalise a matrix together, and by which rates it pays.
        itemsize: Bytes of an element that a team gathers.
        _teams: The teams of some matrices, by (parameter, index), for tests.

    Raises:
        LayoutError: a layout, or the matrices of a parameter, do not cover it exactly once; or a team is empty, names
            a rank twice, or one that does not hold the parameter.
    """
    _prove(parameters, elementwise)
    if ranks is None:
        ranks = sorted(set().union(*{layout.ranks for p in parameters for layout in (p.momentum_storage, p.target)}))
    ranks = tuple(ranks)
    assigned = _assign(parameters, ranks, teams, itemsize, _teams)
    assignments = [
        Assignment(number, matrix, assigned[number, matrix.index], flops)
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
        if (assignment.parameter, assignment.matrix.index) in grams:
            continue
        buckets.setdefault(max(filled[rank] for rank in assignment.team) // bucket_elements, []).append(number)
        for rank in assignment.team:
            filled[rank] += assignment.matrix.numel
    in_order = tuple(tuple(buckets[key]) for key in sorted(buckets))
    summed = tuple(n for n, a in enumerate(assignments) if (a.parameter, a.matrix.index) in grams) if grams else ()
    return Plan(ranks, tuple(parameters), tuple(assignments), in_order, tuple(elementwise), summed, bucket_elements)


def _assign(
    parameters: Sequence[Parameter],
    ranks: Sequence[int],
    allowed: Teams | None,
    itemsize: int,
    asked: Mapping[tuple[int, int], tuple[int, ...]],
) -> dict[tuple[int, int], tuple[int, ...]]:
    """Return the team of each (parameter, matrix index)."""
    jobs = sorted(
        (
            (-flops, -matrix.numel, parameter.name, matrix.index, number, matrix)
            for number, parameter in enumerate(parameters)
            for matrix, flops in zip(parameter.matrices, parameter.flops, strict=True)
        ),
        key=lambda job: job[:4],
    )
    loads = _Loads(ranks)
    everywhere = [loads.heap(parameter.target.ranks) for parameter in parameters]
    # No plan's busiest rank carries less than the mean, or than the largest matrix that has one owner.
    mean = -sum(job[0] for job in jobs) / max(1, len(ranks))
    unavoidable = max(mean, -jobs[0][0] if jobs and allowed is None else 0)
    teams = {}
    alone = {rank: (rank,) for rank in ranks}
    members: dict[Sequence[int], frozenset[int]] = {}
    for parameter in parameters:
        if parameter.target.ranks not in members:
            members[parameter.target.ranks] = frozenset(parameter.target.ranks)
    may_join = [members[parameter.target.ranks] for parameter in parameters]
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
            team = loads.team(parameter.target.ranks, sizes, may=_LATE * max(mean, loads.busiest))
            if len(team) > 1:
                teams[number, index] = team
                for rank in team:
                    loads.add(rank, sizes[len(team)], -minus_numel)
                continue
        owner = loads.least(everywhere[number])
        holders = _holders_of_all(parameter.momentum_storage, matrix)
        if holders and len(holders) < len(parameter.target.ranks):
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

    def team(self, ranks: Sequence[int], sizes: Mapping[int, int], *, may: float) -> tuple[int, ...]:
        """Return the smallest team that ends within ``may`` FLOPs, the one that carries least; or that ends first.

        Args:
            ranks: Of which.
            sizes: What each member carries, by the size of the team, the smallest first.
            may: What the busiest rank may carry.
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
            if most + load <= may:
                break
        _, _, block = found[-1] if found[-1][0] <= may else min(found)
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


_ONCE = "each element held once in each copy"
_CORRECT = "Correct its placements or its entry in layouts="


def _prove(parameters: Sequence[Parameter], elementwise: Sequence[Elementwise]) -> None:
    """Prove that storage covers each parameter exactly once per replica, and that the matrices tile it."""
    for other in elementwise:
        try:
            other.target.prove_cover()
        except LayoutError as error:
            raise LayoutError(explain_error(other.name, str(error), _ONCE, _CORRECT)) from None
    proved: dict[tuple[int, ...], list[tuple[Block, ...]]] = {}
    for parameter in parameters:
        shape = parameter.target.shape
        blocks = [matrix.blocks for matrix in parameter.matrices]
        try:
            parameter.momentum_storage.prove_cover()
            if parameter.target is not parameter.momentum_storage:
                parameter.target.prove_cover()
            for companion in parameter.companions:
                companion.storage.prove_cover()
                regions = [block.region for matrix in companion.matrices for block in matrix.blocks]
                _prove_tiling(regions, companion.storage.shape)
        except LayoutError as error:
            raise LayoutError(explain_error(parameter.name, str(error), _ONCE, _CORRECT)) from None
        if proved.get(shape) != blocks:  # layers are alike
            try:
                _prove_tiling([block.region for some in blocks for block in some], shape)
            except LayoutError as error:
                needed, write = "matrices that cover it exactly once", "Correct its matrices"
                raise LayoutError(explain_error(parameter.name, str(error), needed, write)) from None
            proved[shape] = blocks


def _prove_team(parameter: Parameter, matrix: Matrix, team: Sequence[int], may_join: frozenset[int]) -> None:
    """Prove that a team is of one or more different ranks that hold the parameter."""
    if not team or len(set(team)) < len(team) or not may_join.issuperset(team):
        needed = f"one or more different ones {_told(parameter.target.ranks)}, the owner first"
        raise LayoutError(explain_error(matrix.name, f"the team {tuple(team)}", needed, "Name each once"))


def _prove_tiling(regions: Sequence[Region], shape: Sequence[int], dim: int = 0) -> None:
    """Prove that regions tile a box: along each dim their runs are equal or disjoint and fill it, recursively."""
    if dim == len(shape):
        if len(regions) != 1:
            raise NotCovered(f"the element at {regions[0].offset} in {len(regions)} matrices")
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
            raise NotCovered(f"matrices that overlap or leave a gap at index {position} of dim {dim}")
    if position != shape[dim]:
        raise NotCovered(f"matrices that leave a gap at index {position} of dim {dim}")
    for group in groups.values():
        _prove_tiling(group, shape, dim + 1)
