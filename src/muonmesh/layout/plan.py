"""Plan: which rank orthogonalizes each matrix, and in which bucket."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from muonmesh.layout.budget import UNLIMITED, Budget
from muonmesh.layout.cover import prove
from muonmesh.layout.flat import Layout
from muonmesh.layout.matrix import Matrix
from muonmesh.layout.owners import KnownMatrix, assign_owners
from muonmesh.layout.parameter import Elementwise, Parameter, describe
from muonmesh.layout.piece_table import Row, pieces
from muonmesh.layout.relay import Relay

Shapes = Sequence[tuple[int, int, int]]
"""Matrices that are orthogonalized together: for each shape how many, their rows and their columns."""

NeededElements = Callable[[Shapes, int], int]
"""A function that returns how many elements a device needs for some matrices, and how many memories for matrices and
results these include: none, one that both share, if they can, or two."""

_AT_ONCE = 1 << 28
"""Largest number of elements of matrices that a device orthogonalizes together."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """One Matrix of the plan and its owner, the rank that orthogonalizes it.

    Attributes:
        parameter: Number of the parameter.
        matrix: The matrix to orthogonalize.
        owner: The rank that gets the whole matrix, and returns the result.
        flops: Cost of the matrix.
    """

    parameter: int
    matrix: Matrix
    owner: int
    flops: int


@dataclass(frozen=True)
class Routes:
    """The rows that one rank exchanges for one bucket in one direction, by peer. They are in no buffer yet.

    The way back has Routes of its own, because other ranks take part in it if there are replicas, or if momentum is
    sharded over replicas. Otherwise it is the reverse of the way to the owners.

    Both ranks list the rows between them in the same order.

    Attributes:
        stored: The rows whose storage is on this rank, by the rank that has their matrix.
        assembled: The rows whose matrix is on this rank, by the rank that stores them. On the way back, there may also
            be rows of another owner's matrix that this rank has received and passes on.
    """

    stored: Mapping[int, Sequence[Row]]
    assembled: Mapping[int, Sequence[Row]]

    def only(self, exchange: int) -> Routes:
        """Return the rows of one exchange."""

        def of(rows_by_peer: Mapping[int, Sequence[Row]]) -> dict[int, list[Row]]:
            return {peer: [row for row in rows if row.exchange == exchange] for peer, rows in rows_by_peer.items()}

        return Routes(of(self.stored), of(self.assembled))


@dataclass(frozen=True)
class Plan:
    """The owner and the bucket of every matrix: plain data, the same on every rank. `routes` gives a rank's transfers.

    Attributes:
        ranks: The connected set: all ranks that share any of the parameters.
        parameters: The parameters whose matrices are assigned.
        assignments: Every Matrix once, with its owner.
        buckets: Numbers of the assignments, by bucket, in order. Matrices that need a transfer move and are computed
            together with their bucket; the owner computes all others beside some bucket (`comm.schedule`).
        elementwise: Parameters that are not orthogonalized.
        bucket_elements: The approximate number of elements that a rank works on at a time.
        machine: The number of ranks of each machine, numbered consecutively; 0: all ranks are on one machine.
        budget: The memory budget of a step.
    """

    ranks: tuple[int, ...]
    parameters: tuple[Parameter, ...]
    assignments: tuple[Assignment, ...]
    buckets: tuple[tuple[int, ...], ...]
    elementwise: tuple[Elementwise, ...] = ()
    bucket_elements: int = 1 << 23
    machine: int = 0
    budget: Budget = UNLIMITED

    def routes(self, bucket: int, rank: int, *, gather: bool, numbers: Sequence[int] | None = None) -> Routes:
        """Return the rows that ``rank`` exchanges for a bucket, or for some of its assignments, in one direction.

        On the way to the owners (``gather``), ranks of the owner's own replica send their pieces. On the way back, the
        result travels to the ranks of every replica (`Relay`).
        """
        stored: dict[int, list[Row]] = {}
        assembled: dict[int, list[Row]] = {}
        limit = 1 if gather else self.copies_at_once(bucket)
        for number in self.buckets[bucket] if numbers is None else numbers:
            assignment = self.assignments[number]
            owner, relay = assignment.owner, self.relays[assignment.parameter]
            layout = self._layout(assignment, gather=gather)
            if gather:
                receivers = [(holder, 0) for holder in layout.replica(rank)] if rank == owner else []
            else:
                receivers = relay.outgoing(owner, rank, limit)
            for holder, exchange in receivers:
                if rows := self.rows(number, holder, gather=gather, exchange=exchange):
                    assembled.setdefault(holder, []).extend(rows)
            own_rows = self.rows(number, rank, gather=gather)
            if own_rows and (not gather or rank in layout.replica(owner)):
                sender, exchange = (owner, 0) if gather else relay.incoming(owner, rank, limit)
                stored.setdefault(sender, []).extend(replace(row, exchange=exchange) for row in own_rows)
        return Routes(stored, assembled)

    def returns(self, numbers: Iterable[int]) -> bool:
        """Whether results of matrices travel back as their pieces came: nobody else stores weights than momentum.

        Then the routes back are those to the owners, and every piece that a rank stores is on one of them.
        """
        parameters = {self.assignments[number].parameter for number in numbers}
        returned = [self.parameters[number] for number in parameters]
        return all(p.momentum_storage is p.target and p.target.copies() == 1 for p in returned)

    def rows(self, number: int, rank: int, *, gather: bool, exchange: int = 0) -> list[Row]:
        """Return a row in no buffer for each piece of a matrix that a rank stores: momentum (``gather``) or weights."""
        assignment = self.assignments[number]
        stored = pieces(self._layout(assignment, gather=gather), rank, assignment.matrix)
        return [Row(number, assignment.parameter, piece, exchange=exchange) for piece in stored]

    def gathers(self, bucket: int) -> bool:
        """Whether any owner in the bucket needs pieces from another rank."""
        return any(self.travels(number, gather=True) for number in self.buckets[bucket])

    def scatters(self, bucket: int) -> bool:
        """Whether any rank needs results of the bucket from another rank."""
        return any(self.travels(number, gather=False) for number in self.buckets[bucket])

    def copies_at_once(self, bucket: int) -> int:
        """Return how many copies of its results an owner may send in one exchange, at least one.

        An owner has a copy for each replica, and a rank receives its shards of all results. With many replicas, both
        are many times larger than the owner's matrices. So in each exchange, a rank sends and receives at most as many
        elements as the largest part of an owner in the bucket has, or ``bucket_elements``.
        """
        owned = Counter[int]()
        for assignment in (self.assignments[number] for number in self.buckets[bucket]):
            owned[assignment.owner] += assignment.matrix.numel
        return max(1, self.bucket_elements // max(owned.values()))

    def exchanges(self, bucket: int) -> int:
        """Return the number of exchanges in which the results of a bucket travel; it is the same on every rank."""
        limit = self.copies_at_once(bucket)
        return max(relay.exchanges(limit) for relay in self._relays_of(bucket)) if self.scatters(bucket) else 0

    def fits(self, bucket: int) -> bool:
        """Whether there is memory for all copies of the results of a bucket in one exchange."""
        limit = self.copies_at_once(bucket)
        return all(relay.fits(limit) for relay in self._relays_of(bucket))

    def _relays_of(self, bucket: int) -> list[Relay]:
        """Return the relays of a bucket, each parameter's once: a bucket may have thousands of matrices of one."""
        return [self.relays[number] for number in {self.assignments[index].parameter for index in self.buckets[bucket]}]

    @cached_property
    def relays(self) -> list[Relay]:
        """The relay of each parameter, by which its results travel."""
        return [Relay.of(parameter.target, self.machine) for parameter in self.parameters]

    def counts(self, assignment: int, rank: int) -> bool:
        """Return whether a rank's pieces of a matrix count in sums over it: only those of the owner's replica do."""
        target = self._layout(self.assignments[assignment], gather=False)
        owner = self.assignments[assignment].owner
        return rank in target.ranks and target.replica_number(rank) == target.replica_number(owner)

    @cached_property
    def alone(self) -> bool:
        """Whether no matrix needs a transfer."""
        return not any(map(self.moves, range(len(self.assignments))))

    def batch_size(self, number: int, count: int, needs: NeededElements) -> int:
        """Return how many of ``count`` matrices equal to this one a device orthogonalizes together, at least one.

        It is one more than ``count`` if there is room for others beside them.
        """
        rows, cols = self.assignments[number].matrix.shape
        memories, room = self.memories(number), self._room(number)
        sizes = range(1, min(count + 1, _AT_ONCE // (rows * cols)) + 1)
        return max(1, bisect.bisect_right(sizes, room, key=lambda size: needs(((size, rows, cols),), memories)))

    def fits_together(self, number: int, shapes: Shapes, needs: NeededElements) -> bool:
        """Return whether a device orthogonalizes matrices of several shapes together, among them this one."""
        needed = needs(shapes, self.memories(number))
        return sum(map(math.prod, shapes)) <= _AT_ONCE and needed <= self._room(number)

    def memories(self, number: int) -> int:
        """Return the memories for matrices and results that count for a batch with this one (`NeededElements`).

        Those of gathered matrices are the buffers of their bucket. Matrices that do not move may share theirs.
        """
        moves = self.moves(number)
        return 0 if moves and self.budget.gathers else 1 + moves

    def _room(self, number: int) -> int:
        """Return how many elements a batch may need, among them this matrix."""
        budget, gathered = self.budget, self.memories(number) == 0
        room = budget.bytes - budget.bytes // 128  # for vectors
        return room // (1 if self.alone else 8 if gathered else 3) // budget.itemsize

    def batches(
        self,
        numbers: Iterable[int],
        size_of: Callable[[int, int], int],
        joins: Callable[[int, tuple[int, int]], Hashable],
        fits: Callable[[int, Shapes], bool],
    ) -> list[tuple[int, ...]]:
        """Return assignments in batches of equal settings, which are orthogonalized together; equal shapes adjoin.

        Args:
            numbers: The assignments.
            size_of: A function from an assignment, and the number of those of its shape, to how many of them one batch
                has at most. Those that do not fill a batch share one with other shapes.
            joins: A function from an assignment and its shape to what is equal in a batch.
            fits: A function from an assignment and shapes to whether such matrices, among them this one, may share a
                batch.
        """
        groups: dict[Hashable, dict[tuple[int, int], list[int]]] = {}
        for number in numbers:
            assignment = self.assignments[number]
            settings, shape = self.parameters[assignment.parameter].settings, assignment.matrix.shape
            groups.setdefault((settings, joins(number, shape)), {}).setdefault(shape, []).append(number)
        batches = list[list[int]]()
        for shapes in groups.values():
            shared: dict[int, list[tuple[int, int, int]]] = {}  # the shapes of batches that others may join, by number
            for shape, equal in sorted(shapes.items(), reverse=True):
                size = size_of(equal[0], len(equal))
                whole = len(equal) - len(equal) % size
                batches += [equal[start : start + size] for start in range(0, whole, size)]
                if rest := equal[whole:]:
                    added = len(rest), *shape
                    into = next((n for n, others in shared.items() if fits(rest[0], [*others, added])), len(batches))
                    if into == len(batches):
                        batches.append([])
                    batches[into] += rest
                    shared.setdefault(into, []).append(added)
        return [tuple(batch) for batch in batches]

    def shapes(self, batch: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
        """Return the shapes of the matrices of a batch, each with its number of matrices before it."""
        shapes = itertools.groupby(self.assignments[number].matrix.shape for number in batch)
        return tuple((len(list(equal)), *shape) for shape, equal in shapes)

    def moves(self, number: int) -> bool:
        """Whether a matrix needs a transfer; if not, its owner is the only rank that holds any part of it."""
        return self.travels(number, gather=True) or self.travels(number, gather=False)

    def travels(self, number: int, *, gather: bool) -> bool:
        """Whether pieces of a matrix travel to its owner (``gather``), or results travel back from it."""
        assignment = self.assignments[number]
        layout = self._layout(assignment, gather=gather)
        if not gather and layout.copies() > 1:
            return True
        return not all(assignment.owner in layout.holders(block.region) for block in assignment.matrix.blocks)

    def _layout(self, assignment: Assignment, *, gather: bool) -> Layout:
        """Return the layout of the momentum, from which a matrix is gathered, or of the parameter, for the way back."""
        parameter = self.parameters[assignment.parameter]
        return parameter.momentum_storage if gather else parameter.target

    def summed(self, assignments: Iterable[int]) -> dict[int, int]:
        """Return the number of sums over the matrix that the rule needs, for each of these assignments with sums."""
        counts = ((number, self.parameters[self.assignments[number].parameter].sums) for number in assignments)
        return {number: count for number, count in counts if count}

    def keys_with_sums(self, assignment: int) -> tuple[str, ...]:
        """Return the keys of the state of kind "matrix", which the owner sends with the sums over the matrix."""
        factored_states = self.parameters[self.assignments[assignment].parameter].factored_states
        return tuple(factored.key for factored in factored_states if factored.side == "matrix")

    @property
    def keepers(self) -> dict[KnownMatrix, int]:
        """The owners that keep state of their matrices, such as "rows×rows", by matrix."""
        owner_of = {}
        for assignment in self.assignments:
            parameter = self.parameters[assignment.parameter]
            if any(factored.at_owner for factored in parameter.factored_states):
                owner_of[parameter.name, parameter.target.ranks, assignment.matrix.index] = assignment.owner
        return owner_of

    @property
    def targets(self) -> list[Layout]:
        """The layouts of all parameters, elementwise parameters last."""
        return [p.target for p in self.parameters] + [other.target for other in self.elementwise]

    @cached_property
    def loads(self) -> dict[int, int]:
        """FLOPs of one step by rank."""
        loads = dict.fromkeys(self.ranks, 0)
        for assignment in self.assignments:
            loads[assignment.owner] += assignment.flops
        return loads

    def description(self) -> list[str]:
        """Return the lines that must be the same on every rank."""
        lines = [f"ranks {self.ranks}, {self.machine} in a machine"]
        lines += [describe(parameter) for parameter in self.parameters] + [
            describe(other) for other in self.elementwise
        ]
        for number, bucket in enumerate(self.buckets):
            for index in bucket:
                assignment = self.assignments[index]
                lines.append(f"bucket {number}: {assignment.matrix.name} on {assignment.owner}")
        return lines

    @cached_property
    def digest(self) -> str:
        """A hash of the description."""
        return hashlib.sha256("\n".join(self.description()).encode()).hexdigest()


def make_plan(
    parameters: Sequence[Parameter],
    *,
    ranks: Sequence[int] | None = None,
    bucket_elements: int | None = None,
    elementwise: Sequence[Elementwise] = (),
    fixed_owners: Mapping[KnownMatrix, int] = MappingProxyType({}),
    machine: int = 0,
    budget: Budget = UNLIMITED,
) -> Plan:
    """Check that layouts and matrices cover each parameter exactly once, and assign each matrix an owner and a bucket.

    Owners: see `assign_owners`.

    Buckets: the list of each owner's matrices is cut, in a fixed order, into parts of at most ``bucket_elements``.
    Bucket i has the i-th part of every owner, so owners compute side by side. An owner may have no matrix in a bucket:
    after a matrix that is larger than a bucket, and in the last buckets if it has less to do than others.

    Args:
        parameters: What to plan, in the same order on every rank.
        ranks: The connected set; by default the ranks that hold any of the parameters.
        bucket_elements: Matrix elements of one owner in one bucket; a larger matrix has a bucket of its own. Default:
            `Budget.bucket_elements`.
        elementwise: Parameters that are not orthogonalized.
        fixed_owners: Owners that keep state of a matrix, and so stay its owner.
        machine: The number of ranks of each machine; 0: all ranks are on one machine.
        budget: The memory budget of a step.

    Raises:
        LayoutError: a layout, or the matrices of a parameter, do not cover it exactly once.
    """
    prove(parameters, elementwise)
    if ranks is None:
        ranks = sorted(set().union(*{layout.ranks for p in parameters for layout in (p.momentum_storage, p.target)}))
    ranks = tuple(ranks)
    owners = assign_owners(parameters, ranks, fixed_owners)
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
    bucket_elements = bucket_elements or budget.bucket_elements
    filled = dict.fromkeys(ranks, 0)
    buckets: dict[int, list[int]] = {}
    for number in order:
        assignment = assignments[number]
        start, numel = filled[assignment.owner], assignment.matrix.numel
        if start % bucket_elements + numel > bucket_elements:
            start += -start % bucket_elements
        buckets.setdefault(start // bucket_elements, []).append(number)
        filled[assignment.owner] = start + numel
    in_order = tuple(tuple(buckets[key]) for key in sorted(buckets))
    rest = tuple(elementwise), bucket_elements, machine, budget
    return Plan(ranks, tuple(parameters), tuple(assignments), in_order, *rest)
