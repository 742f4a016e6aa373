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
from dataclasses import dataclass
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
        local_count: How many matrices are this rank's alone.
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
        self.local_count = sum(map(len, itertools.chain(self.left, *(draft.local for draft in self._drafts))))
        self._passages = _passages(plan, rank, peers, self._drafts)
        self.relays = any(passage.passes for passage in self._passages)
        self._rank, self._dtype, self._device = rank, dtype, device
        self.stages = len(self._drafts)
        self._rounds_before = [0, *itertools.accumulate(draft.rounds.count for draft in self._drafts)]
        self._filling = _fillings(self._passages, self._rounds_before)
        self._views: dict[tuple[int, ...], Any] = {}
        numels: dict[str, int] = {}
        for role, turn, numel in self._turns() if device.type == "cpu" else ():
            numels[f"{role}.{turn % 2}"] = max(numel, numels.get(f"{role}.{turn % 2}", 0))
        self.memory = {name: memory_of(numel, dtype, device) for name, numel in numels.items()}

    def name(self, number: int) -> str:
        """Return what errors call a stage: by the number that its bucket has in the plan."""
        return self._drafts[number].name

    def moving(self, number: int) -> tuple[int, ...]:
        """Return the assignments of a stage that move; none if there is no such stage."""
        return self._drafts[number].moving if number < self.stages else ()

    def gather(self, number: int) -> Gather:
        """Return a stage up to its matrices, with memory for it."""
        draft = self._drafts[number]
        if self._device.type != "cpu" and not draft.gathers:
            return Gather(draft.moving, (), None, (), (), late=True)
        return self._once((number,), lambda: self._gather(number, draft))

    def _gather(self, number: int, draft: _Draft) -> Gather:
        matrices, passage = draft.assembled(self._memory("matrices", number, draft.numel)), draft.passage
        of = _by_assignment(draft.batches, matrices)
        reads = [(leg, view_in_matrix(leg.piece, of[leg.assignment])) for leg in passage.stored.get(self._rank, ())]
        if not draft.gathers:
            return Gather(draft.moving, tuple(reads), None, (), tuple(matrices))
        send = self._memory("gather.send", number, passage.sends)
        receive = self._memory("gather.receive", number, passage.receives)
        swap = passage.swap(f"the gather of {draft.name}", send, receive)
        reads += passage.on_wire(swap.send)
        return Gather(draft.moving, tuple(reads), swap, passage.copies(of, swap.receive), tuple(matrices))

    def portions(self, number: int) -> Iterator[Portion]:
        """Yield what is computed of a stage whose gather is late, each time in memory of its own.

        These are batches with the legs that are read into them; with the first what else is folded in the bucket.
        """
        draft = self._drafts[number]
        owned = {number for batch in draft.batches for number in batch}
        others = tuple(number for number in draft.moving if number not in owned)
        reads = _legs_by_assignment(draft.passage.stored.get(self._rank, ()))
        for batch, shape in zip(draft.batches, draft.shapes, strict=True):
            memory = (self._memory(role, number, len(batch) * math.prod(shape)) for role in ("matrices", "results"))
            x, out = (some.view(-1, *shape) for some in memory)
            ends = [(leg, matrix) for n, matrix in zip(batch, x.unbind(), strict=True) for leg in reads[n]]
            into = tuple((leg, view_in_matrix(leg.piece, matrix)) for leg, matrix in ends)
            yield Portion((*batch, *others), into, (x, out, batch))
            others = ()
        if others:
            yield Portion(others, (), None)

    def compute(self, number: int, matrices: Sequence[Tensor], results: Sequence[Tensor] | None = None) -> Compute:
        """Return what is computed of a stage, with memory for it, and what is done with the results.

        Args:
            number: Of the stage.
            matrices: Those of `gather`.
            results: Where they have been computed already.
        """
        return self._once((number, -1), lambda: self._compute(number, self._drafts[number], matrices, results))

    def _compute(
        self, number: int, draft: _Draft, matrices: Sequence[Tensor], results: Sequence[Tensor] | None
    ) -> Compute:
        if results is None:
            results = draft.assembled(self._memory("results", number, draft.numel))
        of, legs = _by_assignment(draft.batches, results), draft.back.stored.get(self._rank, ())
        staying = tuple((leg, view_in_matrix(leg.piece, of[leg.assignment])) for leg in legs)
        batches = tuple((x, out, some) for some, x, out in zip(draft.batches, matrices, results, strict=False))
        return Compute(batches, draft.local, draft.summed, staying, draft.rounds, tuple(results))

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
        receive = self._memory("scatter.receive", turn, passage.receives)
        filled = before if turn > 0 and filling == self._filling[turn - 1] else None
        send = self._memory("scatter.send", filling, passage.sends) if filled is None else filled.swap.send
        told = f", round {index + 1} of {draft.rounds.count}" if draft.rounds.count > 1 else ""
        swap = passage.swap(f"the scatter of {draft.name}{told}", send, receive)
        copies = () if filled is not None else passage.copies(_by_assignment(draft.batches, results), swap.send)
        leaving = tuple((wire, matrix) for matrix, wire in copies)
        if passage.passes:
            assert before is not None
            leaving += passage.passed_on(self._passages[turn - 1], before.swap.receive, swap.send)
        return Scatter(leaving, swap, tuple(passage.on_wire(swap.receive)), passage.passes)

    def _turns(self) -> Iterator[tuple[str, int, int]]:
        """Yield how much memory each role needs in each of its turns; every other turn takes the same memory."""
        for number, draft in enumerate(self._drafts):
            yield "matrices", number, draft.numel
            yield "results", number, draft.numel
            if draft.gathers:
                yield "gather.send", number, draft.passage.sends
                yield "gather.receive", number, draft.passage.receives
        for turn, passage in enumerate(self._passages):
            yield "scatter.send", self._filling[turn], passage.sends
            yield "scatter.receive", turn, passage.receives

    def _memory(self, role: str, turn: int, numel: int) -> Tensor:
        return self.memory[f"{role}.{turn % 2}"] if self.memory else memory_of(numel, self._dtype, self._device)

    def _once(self, key: tuple[int, ...], make: Callable[[], T]) -> T:
        """Return what is made for a stage, and keep it where its memory is kept."""
        found: T = self._views[key] if key in self._views else make()
        if self._device.type == "cpu":
            self._views[key] = found
        return found


# ------------------------------------------------------------------ how it is worked out


@dataclass(frozen=True)
class _Draft:
    """One stage before memory is given to it.

    Attributes:
        name: What errors call it.
        moving: The assignments of which something moves.
        local: Local matrices that are computed in it.
        passage: What travels to the owners, if it ``gathers``.
        back: What travels back, in ``rounds``.
        summed: See `Plan.summed`.
        batches, shapes: The assignments that this rank orthogonalizes, equal ones together.
    """

    name: str
    moving: tuple[int, ...]
    local: tuple[tuple[Local, ...], ...]
    passage: Passage
    gathers: bool
    back: Routes
    rounds: Rounds
    summed: Mapping[int, int]
    batches: Sequence[tuple[int, ...]] = ()
    shapes: Sequence[tuple[int, int]] = ()

    @property
    def _sizes(self) -> list[int]:
        return [len(batch) * math.prod(shape) for batch, shape in zip(self.batches, self.shapes, strict=True)]

    @property
    def numel(self) -> int:
        """Elements of the matrices that this rank orthogonalizes."""
        return sum(self._sizes)

    def assembled(self, memory: Tensor) -> list[Tensor]:
        """Return the batches, each (b, rows, cols), one after the other in memory."""
        parts = torch.split(memory[: self.numel], self._sizes)
        return [part.view(-1, *shape) for part, shape in zip(parts, self.shapes, strict=True)]


def _passages(plan: Plan, rank: int, peers: Sequence[int], drafts: Sequence[_Draft]) -> list[Passage]:
    """Return what travels back in each round of all stages, one after the other; late results in rounds that follow."""
    total, first = sum(draft.rounds.count for draft in drafts), 0
    stored: list[dict[int, list[Leg]]] = [{} for _ in range(total)]
    assembled: list[dict[int, list[Leg]]] = [{} for _ in range(total)]
    for draft in drafts:
        for ends, legs in ((stored, draft.back.stored), (assembled, draft.back.assembled)):
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
            passage = Passage("gather", there.stored, there.assembled, rank, peers)
            owned = plan.alike(index for index in moving if plan.assignments[index].owner == rank)
            cuts = [(some, range(0, len(some), at_once.get(some[0], len(some)))) for some in owned]
            batches = [some[start : start + starts.step] for some, starts in cuts for start in starts]
            shapes = [plan.assignments[batch[0]].matrix.shape for batch in batches]
            gathers, rounds, name = plan.gathers(number), plan.rounds(number), f"bucket {number}"
            summed = plan.summed(moving)
            drafts.append(_Draft(name, moving, taken(), passage, gathers, back, rounds, summed, batches, shapes))
    if plan.late:
        nothing, rounds = Passage("gather", {}, {}, rank, peers), Rounds(plan.late)
        drafts.append(_Draft("what is passed on", (), (), nothing, False, Routes({}, {}), rounds, {}))
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
