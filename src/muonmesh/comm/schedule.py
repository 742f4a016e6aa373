"""Schedule: the actions of one rank in a step, computed once from the plan and the rank.

Every step reads the same pieces into the same memory, makes the same copies, orthogonalizes the same matrices and
writes the same pieces. So the first step computes these lists, and later steps reuse them. The user's tensors may
move from step to step, so the schedule keeps no views of them. Its tables (`muonmesh.layout.piece_table`) give the
places of pieces in a tensor.

On a CPU the memory is kept too. There are two buffers for each role, such as "the send buffer of a gather", because
buckets take turns. Each is as large as its largest bucket needs, and the views of its copies are kept as well. On a
device, torch's allocator keeps freed memory for reuse, and other parts of a training run need the memory between two
steps. So on a device each bucket allocates its memory when it begins to travel, and frees it as early as possible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from muonmesh.comm.passage import CopyPairs, Passage
from muonmesh.comm.views import Elements, memory_of
from muonmesh.comm.wire import Swap
from muonmesh.comm.work import Local
from muonmesh.layout import Plan
from muonmesh.layout.piece_table import NOWHERE, PieceTable, Row
from muonmesh.layout.routes import Leg, Routes, append

Batch = tuple[Tensor, Tensor, tuple[int, ...]]
"""Matrices (b, rows, cols), the tensor for their results, and their assignments."""

Portion = tuple[tuple[int, ...], Elements, tuple[Batch, ...]]
"""Assignments whose gradients are folded now, the elements to read, and at most one batch."""


@dataclass(frozen=True)
class Stage:
    """One bucket with transfers, from this rank's point of view.

    Attributes:
        number: The number of the stage.
        name: Its name in errors, with the number of its bucket in the plan.
        moving: The assignments whose matrices need a transfer.
        local: Local matrices that are computed in this stage, by shape and settings.
        passage: The transfer to the owners.
        gathers: Whether anything travels to the owners.
        late: Whether nothing is gathered, on a device. Then gradients are read only when they are needed (`portions`).
        back: The routes of the results back.
        exchanges: The number of exchanges in which the results travel; 0 if nothing travels.
        fits: Whether there is memory for all copies of the results in one exchange.
        first: The number of the first of these exchanges, counted over all stages.
        summed: Assignments whose matrices need sums before they are written, see `Plan.summed`.
        reads: The pieces whose momentum this rank stores. Their buffers are this rank's ``batches``, and then the send
            buffer; pieces that this rank does not send are in no buffer.
        staying: The pieces that this rank writes straight from the results of its ``batches``.
        batches, shapes: The assignments that this rank orthogonalizes, equal matrices together, and their shapes.
    """

    number: int
    name: str
    moving: tuple[int, ...]
    local: tuple[Local, ...]
    passage: Passage
    gathers: bool
    late: bool
    back: Routes
    exchanges: int
    fits: bool
    first: int
    summed: Mapping[int, int]
    reads: PieceTable = field(default_factory=PieceTable)
    staying: PieceTable = field(default_factory=PieceTable)
    batches: Sequence[tuple[int, ...]] = ()
    shapes: Sequence[tuple[int, int]] = ()

    @property
    def _sizes(self) -> list[int]:
        return [len(batch) * math.prod(shape) for batch, shape in zip(self.batches, self.shapes, strict=True)]

    @property
    def numel(self) -> int:
        """The number of elements of the matrices that this rank orthogonalizes."""
        return sum(self._sizes)

    def assembled(self, memory: Tensor) -> tuple[Tensor, ...]:
        """Return the batches as adjacent views of ``memory``, each (b, rows, cols)."""
        parts = torch.split(memory[: self.numel], self._sizes)
        return tuple(part.view(-1, *shape) for part, shape in zip(parts, self.shapes, strict=True))

    def by_assignment(self, buffers: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return each matrix, a view of its batch, by assignment."""
        return {
            number: matrix
            for batch, buffer in zip(self.batches, buffers, strict=True)
            for number, matrix in zip(batch, buffer.unbind(), strict=True)
        }


@dataclass(frozen=True)
class Gather:
    """The transfer of one bucket to the owners; the attributes are in the order of their use.

    Attributes:
        reads: The pieces that this rank stores, with their target: this rank's matrices, or the send buffer.
        swap: The collective; None if nothing travels.
        arriving: The copies from the receive buffer into the matrices.
        matrices: The matrices that this rank orthogonalizes, equal matrices together: (b, rows, cols) each.
    """

    reads: Elements
    swap: Swap | None
    arriving: CopyPairs
    matrices: tuple[Tensor, ...]


@dataclass(frozen=True)
class Scatter:
    """One exchange that brings results of a bucket to ranks that store them.

    Attributes:
        leaving: The copies into the send buffer: from the results, and from the previous receive buffer, if any.
        swap: The collective.
        arrived: The pieces that are written from the receive buffer.
        again: Whether the next exchange of the bucket sends the same elements.
        last: Whether no later exchange of the bucket copies from the results.
    """

    leaving: CopyPairs
    swap: Swap
    arrived: Elements
    again: bool
    last: bool


T = TypeVar("T")


class Schedule:
    """The actions of one rank in each step, for the matrices of a plan.

    There is one stage for each bucket with transfers. Local matrices need no transfer. They are computed in the next
    stage, whatever their bucket is; the local matrices after the last stage are computed while its results travel.

    Args:
        plan: The plan.
        rank: The rank of this process.
        peers: All ranks of the plan, in the order of their process group.
        dtype: The dtype of wire buffers and matrices.
        device: The device of wire buffers and matrices.
        at_once: How many equal matrices are gathered into one batch (`Batching.at_once`); None: all of them.

    Attributes:
        stages: The stages, in their order.
        left: Local matrices after the last stage, by shape and settings.
        memory: The buffers that are kept between steps, by role; empty on a device.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        peers: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        at_once: Callable[[int, int], int] | None = None,
    ) -> None:
        """Compute the schedule, and allocate the buffers on a CPU."""
        self.stages, self.left = _stages(plan, rank, peers, at_once, on_device=device.type != "cpu")
        self._passages = _passages(plan, rank, peers, self.stages)
        self._rank, self._dtype, self._device = rank, dtype, device
        self._arriving = [PieceTable(tuple(passage.on_wire(0))) for passage in self._passages]
        self._views: dict[tuple[int, int | str], Any] = {}
        numels: dict[str, int] = {}
        for role, turn, numel in self._turns() if device.type == "cpu" else ():
            numels[f"{role}.{turn % 2}"] = max(numel, numels.get(f"{role}.{turn % 2}", 0))
        self.memory = {name: memory_of(numel, dtype, device) for name, numel in numels.items()}

    def gather(self, stage: Stage) -> Gather:
        """Return the transfer of a stage's pieces to their owners, with its buffers."""

        def make() -> Gather:
            matrices = stage.assembled(self._memory("matrices", stage.number, stage.numel))
            if not stage.gathers:
                return Gather(Elements(stage.reads, matrices), None, (), matrices)
            passage = stage.passage
            send = self._memory("gather.send", stage.number, passage.sends)
            receive = self._memory("gather.receive", stage.number, passage.receives)
            swap = passage.swap(f"the gather of {stage.name}", send, receive)
            arriving = passage.copies(stage.by_assignment(matrices), swap.receive)
            return Gather(Elements(stage.reads, (*matrices, swap.send)), swap, arriving, matrices)

        return self._once(stage, "gather", make)

    def portions(self, stage: Stage) -> Iterator[Portion]:
        """Yield the batches of a late stage with the pieces that are read into them, each in memory of its own.

        The first portion also has the bucket's assignments that other ranks own.
        """
        for (numbers, table), batch, shape in zip(self._tables(stage), stage.batches, stage.shapes, strict=False):
            numel = len(batch) * math.prod(shape)
            x, out = (memory_of(numel, self._dtype, self._device).view(-1, *shape) for _ in range(2))
            yield numbers, Elements(table, (x,)), ((x, out, batch),)
        if not stage.batches:
            yield stage.moving, Elements(stage.reads, ()), ()

    def _tables(self, stage: Stage) -> list[tuple[tuple[int, ...], PieceTable]]:
        """Return for each batch of a late stage the assignments that are folded with it, and their table."""

        def make() -> list[tuple[tuple[int, ...], PieceTable]]:
            owned = {number for batch in stage.batches for number in batch}
            others = tuple(number for number in stage.moving if number not in owned)
            found = []
            for number, batch in enumerate(stage.batches):
                some = {*batch, *others} if number == 0 else {*batch}
                rows = (row for row in stage.reads.rows if row.assignment in some)
                table = PieceTable(tuple(replace(row, buffer=min(row.buffer, 0)) for row in rows))
                found.append(((*batch, *others) if number == 0 else batch, table))
            return found

        found: list[tuple[tuple[int, ...], PieceTable]] = stage.reads.once("portions", make)
        return found

    def batches(self, stage: Stage, matrices: Sequence[Tensor]) -> tuple[Batch, ...]:
        """Return the batches of a gathered stage, with buffers for their results."""
        results = self._once(
            stage, "results", lambda: stage.assembled(self._memory("results", stage.number, stage.numel))
        )
        return tuple(zip(matrices, results, stage.batches, strict=True))

    def staying(self, stage: Stage, results: Sequence[Tensor]) -> Elements:
        """Return the pieces of this rank that are written straight from the results of a stage."""
        return self._once(stage, "staying", lambda: Elements(stage.staying, results))

    def scatter(
        self,
        stage: Stage,
        index: int,
        results: Sequence[Tensor],
        received: Tensor | None = None,
        sent: Tensor | None = None,
    ) -> Scatter:
        """Return one exchange that brings results of a stage to other ranks, with its buffers.

        Args:
            stage: The stage.
            index: The number of the exchange in this stage.
            results: The results of the batches of `batches` or `portions`; empty after the `Scatter.last` of the stage.
            received: The receive buffer of the previous exchange of the stage, whose results may be passed on.
            sent: The send buffer of the previous exchange, if this one sends the same elements `again`.
        """
        turn = stage.first + index
        passage, *later = self._passages[turn : stage.first + stage.exchanges]

        def make() -> Scatter:
            receive = self._memory("scatter.receive", turn, passage.receives)
            send = self._memory("scatter.send", 0, passage.sends) if sent is None else sent
            told = f", exchange {index + 1} of {stage.exchanges}" if stage.exchanges > 1 else ""
            swap = passage.swap(f"the scatter of {stage.name}{told}", send, receive)
            copies = passage.copies(stage.by_assignment(results), swap.send) if results and sent is None else ()
            leaving = tuple((wire, matrix) for matrix, wire in copies)
            if received is not None:
                leaving += passage.passed_on(self._passages[turn - 1], received, swap.send)
            again = bool(later) and later[0].sends_as(passage)
            last = not any(one.copies_results and not one.sends_as(passage) for one in later)
            return Scatter(leaving, swap, Elements(self._arriving[turn], (swap.receive,)), again, last)

        return self._once(stage, index, make)

    def _turns(self) -> Iterator[tuple[str, int, int]]:
        """Yield (role, turn, number of elements) for each buffer; even turns share one buffer, odd turns another."""
        for stage in self.stages:
            yield "matrices", stage.number, stage.numel
            yield "results", stage.number, stage.numel
            if stage.gathers:
                yield "gather.send", stage.number, stage.passage.sends
                yield "gather.receive", stage.number, stage.passage.receives
        for turn, passage in enumerate(self._passages):
            yield "scatter.send", 0, passage.sends
            yield "scatter.receive", turn, passage.receives

    def _memory(self, role: str, turn: int, numel: int) -> Tensor:
        return self.memory[f"{role}.{turn % 2}"] if self.memory else memory_of(numel, self._dtype, self._device)

    def _once(self, stage: Stage, what: int | str, make: Callable[[], T]) -> T:
        """Return the result of ``make`` for a stage; keep it for later steps if buffers are kept."""
        key = stage.number, what
        found: T = self._views[key] if key in self._views else make()
        if self.memory:
            self._views[key] = found
        return found


# ------------------------------------------------------------------ how it is worked out


def _passages(plan: Plan, rank: int, peers: Sequence[int], stages: Sequence[Stage]) -> list[Passage]:
    """Return the passage of each exchange that brings results back, of all stages in order."""
    total = sum(stage.exchanges for stage in stages)
    stored: list[dict[int, list[Leg]]] = [{} for _ in range(total)]
    assembled: list[dict[int, list[Leg]]] = [{} for _ in range(total)]
    for stage in stages:
        for ends, legs in ((stored, stage.back.stored), (assembled, stage.back.assembled)):
            for peer, leg in ((peer, leg) for peer, some in legs.items() if peer != rank for leg in some):
                append(ends[stage.first + leg.exchange].setdefault(peer, []), leg)
    owned = {number for number, assignment in enumerate(plan.assignments) if assignment.owner == rank}
    return [Passage("scatter", Routes(*ends), rank, peers, owned) for ends in zip(stored, assembled, strict=True)]


def _stages(
    plan: Plan, rank: int, peers: Sequence[int], at_once: Callable[[int, int], int] | None, *, on_device: bool
) -> tuple[list[Stage], tuple[Local, ...]]:
    """Return a stage for each bucket with transfers, and the local matrices after the last bucket.

    Each stage has the local matrices before it.
    """
    stages, waiting, first = list[Stage](), dict[int, tuple[Sequence[Leg], Sequence[Leg]]](), 0

    def taken() -> tuple[Local, ...]:
        of = dict(waiting)
        waiting.clear()
        return tuple(
            Local.of(
                [(number, *of[number]) for number in alike],
                plan.assignments[alike[0]].matrix.shape,
                plan.summed(alike),
            )
            for alike in plan.alike(of)
        )

    for number, bucket in enumerate(plan.buckets):
        moving = tuple(index for index in bucket if plan.moves(index))
        own = [index for index in bucket if plan.assignments[index].owner == rank and not plan.moves(index)]
        reads, writes = (_legs_by_assignment(way.stored.get(rank, ())) for way in _ways(plan, number, rank, own))
        waiting.update({index: (reads[index], writes[index]) for index in own})
        if moving:
            there, back = _ways(plan, number, rank, moving)
            passage = Passage("gather", there, rank, peers)
            owned = plan.alike(index for index in moving if plan.assignments[index].owner == rank)
            sizes = [len(some) if at_once is None else at_once(some[0], len(some)) for some in owned]
            cuts = [(some, range(0, len(some), size)) for some, size in zip(owned, sizes, strict=True)]
            batches = [some[start : start + starts.step] for some, starts in cuts for start in starts]
            shapes = [plan.assignments[batch[0]].matrix.shape for batch in batches]
            gathers, exchanges, summed = plan.gathers(number), plan.exchanges(number), plan.summed(moving)
            what = len(stages), f"bucket {number}", moving, taken(), passage, gathers, on_device and not gathers
            places = {
                index: (buffer, place * math.prod(shapes[buffer]))
                for buffer, batch in enumerate(batches)
                for place, index in enumerate(batch)
            }
            reads_here = _in_matrices(there.stored.get(rank, ()), places) + passage.on_wire(len(batches))
            held = () if there is back else _not_sent(plan, rank, moving, reads_here)
            staying = _in_matrices(back.stored.get(rank, ()), places)
            tables = PieceTable((*reads_here, *held)), PieceTable(tuple(staying))
            scatter = back, exchanges, plan.fits(number), first
            stages.append(Stage(*what, *scatter, summed, *tables, batches, shapes))
            first += exchanges
    return stages, taken()


def _ways(plan: Plan, bucket: int, rank: int, numbers: Sequence[int]) -> tuple[Routes, Routes]:
    """Return the routes of a rank to the owners of some matrices, and back; one object if they are the same."""
    there = plan.routes(bucket, rank, gather=True, numbers=numbers)
    return there, there if plan.returns(numbers) else plan.routes(bucket, rank, gather=False, numbers=numbers)


def _in_matrices(legs: Sequence[Leg], places: Mapping[int, tuple[int, int]]) -> list[Row]:
    """Return the rows of legs whose matrices this rank owns, from the buffer and the place of each matrix."""
    return [Row.in_matrix(leg, *places[leg.assignment]) for leg in legs]


def _not_sent(plan: Plan, rank: int, moving: Sequence[int], reads: Sequence[Row]) -> list[Row]:
    """Return rows for the other pieces whose momentum this rank stores: those that another replica sends."""
    known, found = {(row.assignment, row.piece) for row in reads}, list[Row]()
    for number in moving:
        for piece in plan.holdings(number, rank):
            if (number, piece) not in known:
                found.append(Row(number, plan.assignments[number].parameter, piece, NOWHERE, 0, piece.matrix_strides))
    return found


def _legs_by_assignment(legs: Sequence[Leg]) -> dict[int, tuple[Leg, ...]]:
    found: dict[int, list[Leg]] = {}
    for leg in legs:
        found.setdefault(leg.assignment, []).append(leg)
    return {assignment: tuple(some) for assignment, some in found.items()}
