"""Schedule: what one rank does each step, worked out once from the plan and the rank.

Which leg is read into which memory, what is copied where, what is orthogonalised and what is written from where is the
same at every step. So it is worked out when the first step begins and kept, and a step is a walk over lists of legs and
views. What lies in the user's tensors has no views here, since their memory may change from step to step; the legs say
where in it (`muonmesh.layout.Piece`).

On a CPU the memory is kept too: by role, such as "the send buffer of a gather", twice, for buckets that take turns,
each time as large as the largest of these buckets needs. With it the views are kept. On a device torch's allocator
keeps what it has given before, and other parts of a training run need the memory between two steps. So there each
bucket takes its memory when it begins to travel and gives it back as soon as it is done with it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from muonmesh.comm.views import memory_of, place
from muonmesh.comm.work import Ends, Local
from muonmesh.layout import Plan, Routes
from muonmesh.layout.region import row_major
from muonmesh.layout.rounds import Rounds
from muonmesh.layout.routes import Leg, in_rounds

Copies = tuple[tuple[Tensor, Tensor], ...]
"""What is copied, (to, of), both of one shape."""


@dataclass(frozen=True)
class Way:
    """What moves for one bucket in one direction.

    Attributes:
        what: Names it in errors.
        send: What is sent, a segment for each rank in the order of the group; this rank's own is empty.
        receive: What is received, likewise.
        sent: Elements of the segments of ``send``.
        received: Of those of ``receive``.
    """

    what: str
    send: Tensor
    receive: Tensor
    sent: list[int]
    received: list[int]


@dataclass(frozen=True)
class There:
    """One bucket on its way to the owners, as this rank sees it, in the order in which it happens.

    Attributes:
        moving: The assignments of the bucket of which something moves.
        reads: What this rank stores of them, and where it goes: into the send buffer, or straight into its matrices.
        way: What moves; None if nothing travels.
        arriving: From the receive buffer into the matrices.
        matrices: What this rank orthogonalises, equal ones together: (b, rows, cols) each.
    """

    moving: tuple[int, ...]
    reads: Ends
    way: Way | None
    arriving: Copies
    matrices: tuple[Tensor, ...]


@dataclass(frozen=True)
class Back:
    """One bucket at its owners, as this rank sees it: what is computed, and what stays here of the results.

    Attributes:
        batches: What this rank orthogonalises alone: see `Work.orthogonalize`.
        teamed: What it orthogonalises with others, in an order that is the same on all ranks: see
            `Work.orthogonalize_together`.
        local: Matrices that are this rank's alone, those of one shape and setting together; computed while results
            travel.
        summed: Assignments over which sums are taken before they are written, see `Plan.summed`.
        staying: What is written straight from the results.
        rounds: In which rounds the results travel.
        results: Those of each batch, (b, rows, cols).
    """

    batches: tuple[tuple[Tensor, Tensor, tuple[int, ...]], ...]
    teamed: tuple[tuple[Tensor, Tensor, int], ...]
    local: tuple[tuple[Local, ...], ...]
    summed: Mapping[int, int]
    staying: Ends
    rounds: Rounds
    results: tuple[Tensor, ...]


@dataclass(frozen=True)
class Round:
    """Results of one bucket on their way from the owners to those that hold it, or a part of them.

    Attributes:
        leaving: From the results into the send buffer.
        way: What moves.
        arrived: What is written from the receive buffer.
    """

    leaving: Copies
    way: Way
    arrived: Ends


class Schedule:
    """What one rank does each step for the matrices that have owners.

    There is a stage for each bucket of which something moves, the local matrices of other buckets among them; or one
    with local matrices alone.

    Args:
        plan: Whose.
        rank: This one.
        peers: All ranks of the plan, in the order of their process group.
        dtype: Of wire and matrices.
        device: Where the memory is.

    Attributes:
        stages: How many stages there are.
        memory: What they work in, by role, if it is kept from step to step; empty on a device.
    """

    def __init__(self, plan: Plan, rank: int, peers: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        """Work it out."""
        self._drafts = _drafts(plan, rank, peers)
        self._dtype, self._device = dtype, device
        self.stages = len(self._drafts)
        self._rounds_before = [0, *itertools.accumulate(draft.rounds.count for draft in self._drafts)]
        self._fillings_before = [0, *itertools.accumulate(len(set(draft.filling)) for draft in self._drafts)]
        self.memory: Mapping[str, Tensor] = {}
        if device.type == "cpu":
            numels: dict[str, int] = {}
            for turn, needed in self._turns():
                for role, numel in needed.items():
                    name = f"{role}.{turn % 2}"
                    numels[name] = max(numel, numels.get(name, 0))
            self.memory = memory_of(numels, dtype, device)
        self._kept: dict[tuple[int, ...], There | Back | Round] = {}

    @property
    def local_count(self) -> int:
        """How many matrices are this rank's alone."""
        return sum(len(alike) for draft in self._drafts for alike in draft.local)

    def moving(self, number: int) -> tuple[int, ...]:
        """Return the assignments of a stage that move; none if there is no such stage."""
        return self._drafts[number].moving if number < self.stages else ()

    def there(self, number: int) -> There:
        """Return a stage up to its matrices, with memory for it."""
        found = self._kept.get((number,))
        if not isinstance(found, There):
            draft = self._drafts[number]
            found = draft.there(number, self._memory(draft.numels(THERE), number))
            self._keep((number,), found)
        return found

    def back(self, number: int, matrices: Sequence[Tensor]) -> Back:
        """Return what is computed of a stage, with memory for it; ``matrices`` are those of `there`."""
        found = self._kept.get((number, -1))
        if not isinstance(found, Back):
            draft = self._drafts[number]
            found = draft.back(matrices, self._memory(draft.numels(RESULTS), number))
            self._keep((number, -1), found)
        return found

    def round(self, number: int, index: int, results: Sequence[Tensor], before: Round | None = None) -> Round:
        """Return one round of a stage, with memory for it.

        Args:
            number: Of the stage.
            index: Of the round in it.
            results: Those of `back`.
            before: The round before in this stage. If both send the same, its send buffer serves again.
        """
        found = self._kept.get((number, index))
        if not isinstance(found, Round):
            draft = self._drafts[number]
            memory = dict(self._memory(draft.received(index), self._rounds_before[number] + index))
            filling = draft.filling[index]
            if before is not None and filling == draft.filling[index - 1]:
                memory["scatter.send"] = before.way.send
                found = replace(draft.round(number, index, results, memory), leaving=())
            else:
                memory |= self._memory(draft.sent(index), self._fillings_before[number] + filling)
                found = draft.round(number, index, results, memory)
            self._keep((number, index), found)
        return found

    def _turns(self) -> Iterator[tuple[int, dict[str, int]]]:
        """Yield what is needed at once by role, with the turn of these roles: two take the same memory in turns."""
        for number, draft in enumerate(self._drafts):
            yield number, draft.numels((*THERE, *RESULTS))
            for index in range(draft.rounds.count):
                yield self._rounds_before[number] + index, draft.received(index)
                yield self._fillings_before[number] + draft.filling[index], draft.sent(index)

    def _memory(self, numels: Mapping[str, int], turn: int) -> Mapping[str, Tensor]:
        if self.memory:
            return {role: self.memory[f"{role}.{turn % 2}"] for role in numels}
        return memory_of(numels, self._dtype, self._device)

    def _keep(self, key: tuple[int, ...], found: There | Back | Round) -> None:
        if self._device.type == "cpu":
            self._kept[key] = found


THERE = ("matrices", "gather.send", "gather.receive")
RESULTS = ("results",)
"""What the two halves of a stage need memory for; what travels back needs "scatter.send" and "scatter.receive"."""


# ------------------------------------------------------------------ how it is worked out


@dataclass(frozen=True, slots=True)
class _Copy:
    """One strided copy between an assembled matrix and a wire buffer."""

    shape: tuple[int, ...]
    matrix_start: int
    matrix_strides: tuple[int, ...]
    wire_start: int
    wire_strides: tuple[int, ...]


class _Draft:
    """A stage without memory."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        peers: Sequence[int],
        moving: tuple[int, ...],
        local: tuple[tuple[Local, ...], ...],
        ways: tuple[Routes, Routes],
        gathers: bool,
        rounds: Rounds,
    ) -> None:
        self._rank, self._peers = rank, peers
        self.moving, self.local = moving, local
        gather, scatter = ways
        self._gathers, self.rounds = gathers, rounds
        self._gather = _Passage("gather", gather.held, gather.assembled, rank, peers)
        self._kept_back = scatter.held.get(rank, ())

        def by_round(legs: Sequence[Leg], holder: int) -> list[tuple[Leg, ...]]:
            return in_rounds(legs, rounds.count, lambda leg: rounds.of(plan.distance(leg.assignment, holder)))

        held = {peer: by_round(legs, rank) for peer, legs in scatter.held.items()}
        assembled = {peer: by_round(legs, peer) for peer, legs in scatter.assembled.items()}
        self._scatter = [
            _Passage("scatter", _of_round(number, held), _of_round(number, assembled), rank, peers)
            for number in range(rounds.count)
        ]
        self._summed = plan.summed(moving)
        mine = [number for number in moving if rank in plan.assignments[number].team]
        teamed = [number for number in mine if len(plan.assignments[number].team) > 1]
        alone = _alike(plan, [number for number in mine if number not in teamed])
        # Members of a team that are in another one too go through both in the order of the bucket, as everyone does.
        self._batches = [*((number,) for number in teamed), *alone]
        self._teamed = len(teamed)
        self._shapes = [plan.assignments[batch[0]].matrix.shape for batch in self._batches]

    def numels(self, roles: Sequence[str]) -> dict[str, int]:
        """Return how much memory the stage needs for some of its roles, those of `round` left out."""
        matrices = sum(len(batch) * math.prod(shape) for batch, shape in zip(self._batches, self._shapes, strict=True))
        needed = {"matrices": matrices, "results": matrices}
        if self._gathers:
            needed |= self._gather.numels
        return {role: needed[role] for role in roles if role in needed}

    def received(self, index: int) -> dict[str, int]:
        """Return how much memory a round needs for what it receives, by role."""
        return {"scatter.receive": self._scatter[index].numels["scatter.receive"]}

    def sent(self, index: int) -> dict[str, int]:
        """Return how much memory a round needs for what it sends, by role."""
        return {"scatter.send": self._scatter[index].numels["scatter.send"]}

    @cached_property
    def filling(self) -> list[int]:
        """For each round, how often the send buffer is filled anew before it is sent: replicas are sent the same."""
        found = [0] * bool(self._scatter)
        for one, other in itertools.pairwise(self._scatter):
            found.append(found[-1] + (not one.sends_as(other)))
        return found

    def there(self, number: int, memory: Mapping[str, Tensor]) -> There:
        """Return the way to the owners, with its views of the memory."""
        matrices = self._assembled(memory["matrices"])
        of = _by_assignment(self._batches, matrices)
        reads = [(leg, place(leg.piece, of[leg.assignment])) for leg in self._gather.held.get(self._rank, ())]
        if not self._gathers:
            return There(self.moving, tuple(reads), None, (), tuple(matrices))
        way = self._gather.way(f"the gather of bucket {number}", memory)
        reads += self._gather.on_wire(way.send)
        return There(self.moving, tuple(reads), way, self._gather.copies(of, way.receive), tuple(matrices))

    def back(self, matrices: Sequence[Tensor], memory: Mapping[str, Tensor]) -> Back:
        """Return what is computed, with its views of the memory."""
        results = tuple(self._assembled(memory["results"]))
        of = _by_assignment(self._batches, results)
        staying = tuple((leg, place(leg.piece, of[leg.assignment])) for leg in self._kept_back)
        batches = tuple((x, out, some) for some, x, out in zip(self._batches, matrices, results, strict=True))
        teamed = tuple((x, out, number) for x, out, (number,) in batches[: self._teamed])
        return Back(batches[self._teamed :], teamed, self.local, self._summed, staying, self.rounds, results)

    def round(self, number: int, index: int, results: Sequence[Tensor], memory: Mapping[str, Tensor]) -> Round:
        """Return a round of the way back, with its views of the memory."""
        passage = self._scatter[index]
        told = f", round {index + 1} of {self.rounds.count}" if self.rounds.count > 1 else ""
        way = passage.way(f"the scatter of bucket {number}{told}", memory)
        copies = passage.copies(_by_assignment(self._batches, results), way.send)
        leaving = tuple((wire, matrix) for matrix, wire in copies)
        return Round(leaving, way, tuple(passage.on_wire(way.receive)))

    def _assembled(self, memory: Tensor) -> list[Tensor]:
        """Return the batches, each (b, rows, cols), one after the other in memory."""
        sizes = [len(batch) * math.prod(shape) for batch, shape in zip(self._batches, self._shapes, strict=True)]
        parts = torch.split(memory[: sum(sizes)], sizes)
        return [part.view(-1, *shape) for part, shape in zip(parts, self._shapes, strict=True)]


class _Passage:
    """What travels at once between this rank and its peers, in one direction.

    Args:
        name: "gather" or "scatter": which end is the sender.
        held: Legs whose storage is on this rank, by the peer that has their matrix.
        assembled: Legs whose matrix is, by the peer that stores them.
        rank: This one.
        peers: All ranks, in the order of their process group.
    """

    def __init__(
        self,
        name: str,
        held: Mapping[int, Sequence[Leg]],
        assembled: Mapping[int, Sequence[Leg]],
        rank: int,
        peers: Sequence[int],
    ) -> None:
        self._name, self.held, self._assembled, self._rank, self._peers = name, held, assembled, rank, peers
        in_storage, in_matrices = self._sizes(held), self._sizes(assembled)
        self._sent, self._received = (in_storage, in_matrices) if name == "gather" else (in_matrices, in_storage)
        self._starts_held = dict(zip(peers, itertools.accumulate(in_storage, initial=0), strict=False))
        self._starts_assembled = dict(zip(peers, itertools.accumulate(in_matrices, initial=0), strict=False))

    def _sizes(self, legs: Mapping[int, Sequence[Leg]]) -> list[int]:
        """Return the elements of each rank's segment of a wire buffer."""
        return [
            0 if peer == self._rank or not legs.get(peer) else legs[peer][-1].start + legs[peer][-1].piece.numel
            for peer in self._peers
        ]

    @property
    def numels(self) -> dict[str, int]:
        """How much memory is needed by role."""
        return {f"{self._name}.send": sum(self._sent), f"{self._name}.receive": sum(self._received)}

    def sends_as(self, other: _Passage) -> bool:
        """Whether the same elements of this rank's matrices leave in the same order."""
        return self._copies == other._copies

    def way(self, what: str, memory: Mapping[str, Tensor]) -> Way:
        """Return what moves, with its views of the memory."""
        send = memory[f"{self._name}.send"][: sum(self._sent)]
        receive = memory[f"{self._name}.receive"][: sum(self._received)]
        return Way(what, send, receive, self._sent, self._received)

    def on_wire(self, buffer: Tensor) -> list[tuple[Leg, Tensor]]:
        """Return the legs that leave or reach this rank's storage, with their elements in a wire buffer."""
        starts, first = self._starts_held, buffer.storage_offset()
        return [
            (leg, buffer.as_strided(leg.piece.shape, row_major(leg.piece.shape), first + starts[peer] + leg.start))
            for peer, some in self.held.items()
            if peer != self._rank
            for leg in some
        ]

    def copies(self, matrices: Mapping[int, Tensor], buffer: Tensor) -> Copies:
        """Return the elements of this rank's matrices that travel, each time in the matrix and in a wire buffer."""
        return _views(self._copies, matrices, buffer)

    @cached_property
    def _copies(self) -> list[tuple[int, _Copy]]:
        found: dict[int, list[_Copy]] = {}
        for peer in self._peers:
            for leg in self._assembled.get(peer, ()) if peer != self._rank else ():
                piece = leg.piece
                copy = _Copy(
                    piece.shape,
                    piece.matrix_start,
                    piece.matrix_strides,
                    self._starts_assembled[peer] + leg.start,
                    row_major(piece.shape),
                )
                found.setdefault(leg.assignment, []).append(copy)
        return [(number, copy) for number, some in found.items() for copy in _joined(some)]


def _of_round(number: int, legs: Mapping[int, Sequence[tuple[Leg, ...]]]) -> dict[int, tuple[Leg, ...]]:
    """Return the legs of one round, by peer."""
    return {peer: some[number] for peer, some in legs.items() if some[number]}


def _views(copies: Sequence[tuple[int, _Copy]], matrices: Mapping[int, Tensor], buffer: Tensor) -> Copies:
    """Return for each copy its elements of the matrix and of a wire buffer."""
    pairs, first = [], buffer.storage_offset()
    for number, copy in copies:
        matrix = matrices[number]
        start = matrix.storage_offset() + copy.matrix_start
        on_wire = buffer.as_strided(copy.shape, copy.wire_strides, first + copy.wire_start)
        pairs.append((matrix.as_strided(copy.shape, copy.matrix_strides, start), on_wire))
    return tuple(pairs)


def _joined(copies: Sequence[_Copy]) -> list[_Copy]:
    """Return the same copies as fewer: equal ones at even distances in both memories are one with another dim.

    So the rows that all ranks of FSDP hold of a matrix arrive in one copy and not in one for each rank; and what the
    ranks of each replica are sent leaves in one copy and not in one for each replica.
    """
    fewer = _joined_once(copies)
    return fewer if len(fewer) == len(copies) else _joined(fewer)


def _joined_once(copies: Sequence[_Copy]) -> list[_Copy]:
    joined: list[_Copy] = []
    first = 0
    while first < len(copies):
        one, end = copies[first], first + 1
        if end < len(copies):
            matrix_step = copies[end].matrix_start - one.matrix_start
            wire_step = copies[end].wire_start - one.wire_start
            while (
                end < len(copies)
                and (copies[end].shape, copies[end].matrix_strides) == (one.shape, one.matrix_strides)
                and copies[end].wire_strides == one.wire_strides
                and copies[end].matrix_start == one.matrix_start + (end - first) * matrix_step
                and copies[end].wire_start == one.wire_start + (end - first) * wire_step
                and matrix_step >= 0  # 0 where each replica is sent the same; as_strided knows no steps back
            ):
                end += 1
        if end == first + 1:
            joined.append(one)
        else:
            shape = (end - first, *one.shape)
            strides = (matrix_step, *one.matrix_strides), (wire_step, *one.wire_strides)
            joined.append(_Copy(shape, one.matrix_start, strides[0], one.wire_start, strides[1]))
        first = end
    return joined


def _drafts(plan: Plan, rank: int, peers: Sequence[int]) -> list[_Draft]:
    """Return a draft for each bucket that moves; local matrices wait for the next of them, or for one of their own."""
    drafts, waiting = list[_Draft](), list[Local]()

    def taken() -> tuple[tuple[Local, ...], ...]:
        of = {local.assignment: local for local in waiting}
        waiting.clear()
        return tuple(tuple(of[number] for number in alike) for alike in _alike(plan, list(of)))

    for number, bucket in enumerate(plan.buckets):
        gather, scatter = (plan.routes(number, rank, gather=there) for there in (True, False))
        staying = {index for index in bucket if not plan.moves(index)}
        reads, writes = (_legs_by_assignment(routes.held.get(rank, ())) for routes in (gather, scatter))
        waiting += [Local(i, reads[i], writes[i]) for i in bucket if i in staying and i in reads]
        if len(staying) < len(bucket):
            moving = tuple(index for index in bucket if index not in staying)
            ways = _without(gather, staying), _without(scatter, staying)
            drafts.append(_Draft(plan, rank, peers, moving, taken(), ways, plan.gathers(number), plan.rounds(number)))
    if waiting:
        nothing = Routes({}, {})
        drafts.append(_Draft(plan, rank, peers, (), taken(), (nothing, nothing), False, Rounds()))
    return drafts


def _alike(plan: Plan, numbers: Sequence[int]) -> list[tuple[int, ...]]:
    """Return assignments sorted into those of one shape and setting, which may be orthogonalised together."""
    groups: dict[tuple[str, tuple[int, int]], list[int]] = {}
    for number in numbers:
        assignment = plan.assignments[number]
        settings = plan.parameters[assignment.parameter].settings
        groups.setdefault((settings, assignment.matrix.shape), []).append(number)
    return [tuple(some) for some in groups.values()]


def _by_assignment(batches: Sequence[tuple[int, ...]], buffers: Sequence[Tensor]) -> dict[int, Tensor]:
    return {
        number: matrix
        for batch, buffer in zip(batches, buffers, strict=True)
        for number, matrix in zip(batch, buffer.unbind(), strict=True)
    }


def _legs_by_assignment(legs: Sequence[Leg]) -> dict[int, tuple[Leg, ...]]:
    found: dict[int, list[Leg]] = {}
    for leg in legs:
        found.setdefault(leg.assignment, []).append(leg)
    return {assignment: tuple(some) for assignment, some in found.items()}


def _without(routes: Routes, assignments: set[int]) -> Routes:
    held, assembled = (
        {peer: tuple(leg for leg in legs if leg.assignment not in assignments) for peer, legs in ends.items()}
        for ends in (routes.held, routes.assembled)
    )
    return Routes({p: legs for p, legs in held.items() if legs}, {p: legs for p, legs in assembled.items() if legs})
