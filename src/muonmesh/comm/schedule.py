"""Schedule: what one rank does in each step, worked out once from the plan and the rank.

Every step reads the same pieces into the same memory, makes the same copies, orthogonalizes the same matrices and
writes the same pieces. So the first step works these lists out, and later steps walk over them. The user's tensors may
move from step to step, so the schedule keeps no views of them. Its legs say where in a tensor a piece lies
(`muonmesh.layout.Piece`).

On a CPU the memory is kept too: by role, such as "the send buffer of a gather", twice, for buckets that take turns,
each time as large as the largest of these buckets needs. With it the views are kept. On a device torch's allocator
keeps what it has given before, and other parts of a training run need the memory between two steps. So there each
bucket takes its memory when it begins to travel and gives it back as soon as it is done with it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from muonmesh.comm.passage import Copies, Passage
from muonmesh.comm.views import memory_of, view_in_matrix
from muonmesh.comm.wire import Swap
from muonmesh.comm.work import Ends, Local
from muonmesh.layout import Plan
from muonmesh.layout.rounds import Rounds
from muonmesh.layout.routes import Leg, Routes, append


@dataclass(frozen=True)
class Gather:
    """The pieces of one bucket on their way to the owners, as this rank sees them, in the order in which it happens.

    Attributes:
        moving: The assignments of the bucket of which something moves.
        reads: What this rank stores of them, and where it goes: into the send buffer, or straight into its matrices.
        swap: What travels; None if nothing does.
        arriving: From the receive buffer into the matrices.
        matrices: What this rank orthogonalizes, equal ones together: (b, rows, cols) each.
        late: Whether nothing is gathered, on a device: then nothing is read before it is computed (`Portion`).
    """

    moving: tuple[int, ...]
    reads: Ends
    swap: Swap | None
    arriving: Copies
    matrices: tuple[Tensor, ...]
    late: bool = False


@dataclass(frozen=True)
class Portion:
    """Equal matrices that are all here, as they are read and computed together.

    Attributes:
        moving: The assignments whose gradients are folded in now, these and others that this rank does not own.
        reads: What is read of these, and where it goes.
        batch: See `Work.orthogonalize`; None where this rank owns none of the bucket.
    """

    moving: tuple[int, ...]
    reads: Ends
    batch: tuple[Tensor, Tensor, tuple[int, ...]] | None


@dataclass(frozen=True)
class Compute:
    """One bucket at its owners, as this rank sees it: what it computes, and which results stay here.

    Attributes:
        batches: What this rank orthogonalizes: see `Work.orthogonalize`.
        local: Matrices that are this rank's alone, those of one shape and setting together; computed while results
            travel.
        summed: Assignments over which sums are taken before they are written, see `Plan.summed`.
        staying: What is written straight from the results.
        rounds: In which rounds the results travel.
        results: Those of each batch, (b, rows, cols).
    """

    batches: tuple[tuple[Tensor, Tensor, tuple[int, ...]], ...]
    local: tuple[tuple[Local, ...], ...]
    summed: Mapping[int, int]
    staying: Ends
    rounds: Rounds
    results: tuple[Tensor, ...]


@dataclass(frozen=True)
class Scatter:
    """Results of one bucket on their way from the owners to those that hold it, or a part of them.

    Attributes:
        leaving: From the results into the send buffer; and from the receive buffer of the exchange before, if any.
        swap: What travels.
        arrived: What is written from the receive buffer.
        passes: Whether anything leaves that has arrived in the exchange before.
    """

    leaving: Copies
    swap: Swap
    arrived: Ends
    passes: bool = False


T = TypeVar("T", Gather, Compute, Scatter)


class Schedule:
    """What one rank does each step for the matrices that have owners.

    There is one stage for each bucket of which something moves. Local matrices, of which nothing moves, are computed in
    the next such stage, whatever bucket they are in; what is left after the last one is computed while its results
    travel. Numbers here count stages; errors name the bucket.

    Args:
        plan: Whose.
        rank: This one.
        peers: All ranks of the plan, in the order of their process group.
        dtype: Of wire and matrices.
        device: Where the memory is.
        at_once: For each matrix owned here how many of its equals are orthogonalized together; if unsaid, all.

    Attributes:
        stages: How many stages there are.
        left: Local matrices that no stage computes, those of one shape and setting together.
        relays: Whether this rank passes results of others on.
        memory: What they work in, by role, if it is kept from step to step; empty on a device.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        peers: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        at_once: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """Work it out."""
        self._drafts, self.left = _drafts(plan, rank, peers, at_once)
        self._passages = _passages(plan, rank, peers, self._drafts)
        self.relays = any(passage.passes for passage in self._passages)
        self._dtype, self._device = dtype, device
        self.stages = len(self._drafts)
        self._rounds_before = [0, *itertools.accumulate(draft.rounds.count for draft in self._drafts)]
        self._filling = _fillings(self._passages, self._rounds_before)
        self.memory: Mapping[str, Tensor] = {}
        if device.type == "cpu":
            numels: dict[str, int] = {}
            for turn, role, numel in self._turns():
                name = f"{role}.{turn % 2}"
                numels[name] = max(numel, numels.get(name, 0))
            self.memory = memory_of(numels, dtype, device)
        self._views: dict[tuple[int, ...], Any] = {}

    @cached_property
    def local_count(self) -> int:
        """How many matrices are this rank's alone."""
        return sum(map(len, itertools.chain(self.left, *(draft.local for draft in self._drafts))))

    def name(self, number: int) -> str:
        """Return what errors call a stage: by the number that its bucket has in the plan."""
        return self._drafts[number].name

    def moving(self, number: int) -> tuple[int, ...]:
        """Return the assignments of a stage that move; none if there is no such stage."""
        return self._drafts[number].moving if number < self.stages else ()

    def gather(self, number: int) -> Gather:
        """Return a stage up to its matrices, with memory for it."""
        draft, roles = self._drafts[number], ("matrices", "gather.send", "gather.receive")
        if self._device.type != "cpu" and not draft.gathers:
            return Gather(draft.moving, (), None, (), (), late=True)
        return self._once((number,), lambda: draft.gather(self._memory(draft.numels, number, *roles)))

    def portions(self, number: int) -> Iterator[Portion]:
        """Yield what is computed of a stage whose gather is late, each time in memory of its own."""
        return self._drafts[number].portions(self._dtype, self._device)

    def compute(self, number: int, matrices: Sequence[Tensor], results: Sequence[Tensor] | None = None) -> Compute:
        """Return what is computed of a stage, with memory for it.

        Args:
            number: Of the stage.
            matrices: Those of `gather`.
            results: Where they have been computed already.
        """
        draft = self._drafts[number]
        if results is not None:
            return draft.compute(matrices, results)

        def compute() -> Compute:
            memory = self._memory(draft.numels, number, "results")
            return draft.compute(matrices, draft.assembled(memory["results"]))

        return self._once((number, -1), compute)

    def last_filling(self, number: int) -> int:
        """Return the last round of a stage in which anything is copied from its results."""
        first, after = self._rounds_before[number : number + 2]
        return self._filling.index(self._filling[after - 1]) - first if after > first else -1

    def scatter(self, number: int, index: int, results: Sequence[Tensor], before: Scatter | None = None) -> Scatter:
        """Return one round of a stage, with memory for it.

        Args:
            number: Of the stage.
            index: Of the round in it.
            results: Those of `compute`.
            before: The round before, in this stage or in an earlier one. If both send the same, its send buffer serves
                again; and what has arrived in it may be passed on. Needed for nothing else.
        """
        return self._once((number, index), lambda: self._scatter(number, index, results, before))

    def _scatter(self, number: int, index: int, results: Sequence[Tensor], before: Scatter | None) -> Scatter:
        draft, turn = self._drafts[number], self._rounds_before[number] + index
        passage, filling = self._passages[turn], self._filling[turn]
        memory = self._memory(passage.numels, turn, "scatter.receive")
        if before is not None and turn > 0 and filling == self._filling[turn - 1]:
            memory["scatter.send"] = before.swap.send
            found = draft.scatter(index, passage, None, memory)
        else:
            memory |= self._memory(passage.numels, filling, "scatter.send")
            found = draft.scatter(index, passage, results, memory)
        if passage.passes:
            assert before is not None
            passed = passage.passed_on(self._passages[turn - 1], before.swap.receive, found.swap.send)
            found = replace(found, leaving=(*found.leaving, *passed), passes=True)
        return found

    def _turns(self) -> Iterator[tuple[int, str, int]]:
        """Yield how much memory each role needs in each of its turns; every other turn takes the same memory."""
        for number, draft in enumerate(self._drafts):
            for role, numel in draft.numels.items():
                yield number, role, numel
        for turn, passage in enumerate(self._passages):
            for role, numel in passage.numels.items():
                yield (turn if role == "scatter.receive" else self._filling[turn]), role, numel

    def _memory(self, numels: Mapping[str, int], turn: int, *roles: str) -> dict[str, Tensor]:
        """Return the memory of those of some roles that need any."""
        if self.memory:
            return {role: self.memory[f"{role}.{turn % 2}"] for role in roles if role in numels}
        return memory_of({role: numels[role] for role in roles if role in numels}, self._dtype, self._device)

    def _once(self, key: tuple[int, ...], make: Callable[[], T]) -> T:
        """Return what is made for a stage, and keep it where its memory is kept."""
        found: T = self._views[key] if key in self._views else make()
        if self._device.type == "cpu":
            self._views[key] = found
        return found


# ------------------------------------------------------------------ how it is worked out


@dataclass
class _Draft:
    """One stage before memory is given to it: which legs it gathers, computes and scatters."""

    plan: Plan
    rank: int
    peers: Sequence[int]
    name: str
    moving: tuple[int, ...]
    local: tuple[tuple[Local, ...], ...]
    ways: tuple[Routes, Routes]
    gathers: bool
    rounds: Rounds
    at_once: Mapping[int, int]

    def __post_init__(self) -> None:
        there, assignments = self.ways[0], self.plan.assignments
        self._gather = Passage("gather", there.stored, there.assembled, self.rank, self.peers)
        self._summed = self.plan.summed(self.moving)
        alike = self.plan.alike(number for number in self.moving if assignments[number].owner == self.rank)
        cuts = [(some, range(0, len(some), self.at_once.get(some[0], len(some)))) for some in alike]
        self._batches = [some[start : start + starts.step] for some, starts in cuts for start in starts]
        self._shapes = [assignments[batch[0]].matrix.shape for batch in self._batches]

    @cached_property
    def numels(self) -> dict[str, int]:
        """How much memory the stage needs by role, those of `scatter` left out."""
        matrices = sum(len(batch) * math.prod(shape) for batch, shape in zip(self._batches, self._shapes, strict=True))
        return {"matrices": matrices, "results": matrices} | (self._gather.numels if self.gathers else {})

    def gather(self, memory: Mapping[str, Tensor]) -> Gather:
        """Return what travels to the owners, with its views of the memory."""
        matrices = self.assembled(memory["matrices"])
        of = _by_assignment(self._batches, matrices)
        reads = [(leg, view_in_matrix(leg.piece, of[leg.assignment])) for leg in self._gather.stored.get(self.rank, ())]
        if not self.gathers:
            return Gather(self.moving, tuple(reads), None, (), tuple(matrices))
        swap = self._gather.swap(f"the gather of {self.name}", memory)
        reads += self._gather.on_wire(swap.send)
        return Gather(self.moving, tuple(reads), swap, self._gather.copies(of, swap.receive), tuple(matrices))

    def portions(self, dtype: torch.dtype, device: torch.device) -> Iterator[Portion]:
        """Yield batches with the legs that are read into them; with the first what else is folded in the bucket."""
        owned = {number for batch in self._batches for number in batch}
        others = tuple(number for number in self.moving if number not in owned)
        reads = _legs_by_assignment(self._gather.stored.get(self.rank, ()))
        for batch, shape in zip(self._batches, self._shapes, strict=True):
            numel = len(batch) * math.prod(shape)
            memory = memory_of({"x": numel, "out": numel}, dtype, device)
            x, out = (some.view(-1, *shape) for some in memory.values())
            ends = [(leg, matrix) for n, matrix in zip(batch, x.unbind(), strict=True) for leg in reads[n]]
            into = tuple((leg, view_in_matrix(leg.piece, matrix)) for leg, matrix in ends)
            yield Portion((*batch, *others), into, (x, out, batch))
            others = ()
        if others:
            yield Portion(others, (), None)

    def compute(self, matrices: Sequence[Tensor], results: Sequence[Tensor]) -> Compute:
        """Return what is computed, and what is done with the results."""
        of = _by_assignment(self._batches, results)
        staying = tuple(
            (leg, view_in_matrix(leg.piece, of[leg.assignment])) for leg in self.ways[1].stored.get(self.rank, ())
        )
        batches = tuple((x, out, some) for some, x, out in zip(self._batches, matrices, results, strict=False))
        return Compute(batches, self.local, self._summed, staying, self.rounds, tuple(results))

    def scatter(
        self, index: int, passage: Passage, results: Sequence[Tensor] | None, memory: Mapping[str, Tensor]
    ) -> Scatter:
        """Return one round of the results that travel back, with its views of the memory; None: filled already."""
        told = f", round {index + 1} of {self.rounds.count}" if self.rounds.count > 1 else ""
        swap = passage.swap(f"the scatter of {self.name}{told}", memory)
        copies = () if results is None else passage.copies(_by_assignment(self._batches, results), swap.send)
        leaving = tuple((wire, matrix) for matrix, wire in copies)
        return Scatter(leaving, swap, tuple(passage.on_wire(swap.receive)))

    def assembled(self, memory: Tensor) -> list[Tensor]:
        """Return the batches, each (b, rows, cols), one after the other in memory."""
        sizes = [len(batch) * math.prod(shape) for batch, shape in zip(self._batches, self._shapes, strict=True)]
        parts = torch.split(memory[: sum(sizes)], sizes)
        return [part.view(-1, *shape) for part, shape in zip(parts, self._shapes, strict=True)]


def _passages(plan: Plan, rank: int, peers: Sequence[int], drafts: Sequence[_Draft]) -> list[Passage]:
    """Return what travels back in each round of all stages, one after the other; late results in rounds that follow."""
    total, first = sum(draft.rounds.count for draft in drafts), 0
    stored: list[dict[int, list[Leg]]] = [{} for _ in range(total)]
    assembled: list[dict[int, list[Leg]]] = [{} for _ in range(total)]
    for draft in drafts:
        for ends, legs in ((stored, draft.ways[1].stored), (assembled, draft.ways[1].assembled)):
            for peer, leg in ((peer, leg) for peer, some in legs.items() if peer != rank for leg in some):
                holder = rank if ends is stored else peer
                turn = first + plan.exchange_of(leg.assignment, holder, draft.rounds)
                append(ends[turn].setdefault(peer, []), leg)
        first += draft.rounds.count
    owned = {number for number, assignment in enumerate(plan.assignments) if assignment.owner == rank}
    return [Passage("scatter", *ends, rank, peers, owned) for ends in zip(stored, assembled, strict=True)]


def _fillings(passages: Sequence[Passage], first_of_stages: Sequence[int]) -> list[int]:
    """Return for each round how often the send buffer has been filled anew before: replicas are sent the same."""
    found = [0] * bool(passages)
    for turn, (one, other) in enumerate(itertools.pairwise(passages), start=1):
        found.append(found[-1] + (turn in first_of_stages or not one.sends_as(other)))
    return found


def _drafts(
    plan: Plan, rank: int, peers: Sequence[int], at_once: Mapping[int, int]
) -> tuple[list[_Draft], tuple[tuple[Local, ...], ...]]:
    """Return a draft for each bucket that moves, with the local matrices that came before; and those after the last.

    One more is for results that are passed on after the last bucket.
    """
    drafts, waiting = list[_Draft](), list[Local]()

    def taken() -> tuple[tuple[Local, ...], ...]:
        of = {local.assignment: local for local in waiting}
        waiting.clear()
        return tuple(tuple(of[number] for number in alike) for alike in plan.alike(of))

    for number, bucket in enumerate(plan.buckets):
        moving = tuple(index for index in bucket if plan.moves(index))
        own = [index for index in bucket if plan.assignments[index].owner == rank and not plan.moves(index)]
        kept = [plan.routes(number, rank, gather=there, numbers=own).stored for there in (True, False)]
        reads, writes = (_legs_by_assignment(stored.get(rank, ())) for stored in kept)
        waiting += [Local(index, reads[index], writes[index]) for index in own]
        if moving:
            there, back = (plan.routes(number, rank, gather=way, numbers=moving) for way in (True, False))
            name, gathers, rounds = f"bucket {number}", plan.gathers(number), plan.rounds(number)
            drafts.append(_Draft(plan, rank, peers, name, moving, taken(), (there, back), gathers, rounds, at_once))
    if plan.late:
        nothing, rounds = (Routes({}, {}), Routes({}, {})), Rounds(plan.late)
        drafts.append(_Draft(plan, rank, peers, "what is passed on", (), (), nothing, False, rounds, at_once))
    return drafts, taken()


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
