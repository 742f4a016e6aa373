"""Schedule: the actions of one rank in a step, computed once from the plan and the rank.

Every step reads the same pieces into the same memory, makes the same copies, orthogonalizes the same matrices and
writes the same pieces. So the first step computes these lists, and later steps reuse them. The user's tensors may
move from step to step, so the schedule keeps no views of them. Its tables (`muonmesh.layout.piece_table`) give the
places of pieces in a tensor.

Buckets take turns in two buffers for each role, such as "the send buffer of a gather". On a CPU this memory is kept
between steps, as large as the largest bucket needs (`scratch`). On a device, torch's allocator keeps freed memory for
reuse, and other parts of a training run need the memory between two steps. So there each bucket allocates its memory
when it begins to travel, and frees it as early as possible.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from muonmesh.comm.communicator import AllToAll
from muonmesh.comm.packed_all_to_all import CopyPairs, PackedAllToAll
from muonmesh.comm.step_callbacks import Batching, LocalBatch
from muonmesh.comm.views import Elements, by_shape
from muonmesh.layout import Plan
from muonmesh.layout.piece_table import NOWHERE, PieceTable, Row
from muonmesh.layout.plan import Routes, Shapes
from muonmesh.numerics.kernels.threads import scratch

Batch = tuple[Tensor, Tensor, tuple[int, ...], Shapes]
"""Matrices one after the other, memory for their results, their assignments and their shapes."""

Portion = tuple[tuple[int, ...], Elements, Sequence[Batch]]
"""Assignments whose gradients are folded now, the elements to read, and at most one batch."""


@dataclass(frozen=True)
class Stage:
    """One bucket with transfers, from this rank's point of view.

    Attributes:
        number: The number of the stage.
        name: Its name in errors, with the number of its bucket in the plan.
        moving: The assignments whose matrices need a transfer.
        local: Local matrices that are computed in this stage, those of one task together.
        to_owners: The transfer to the owners.
        gathers: Whether anything travels to the owners.
        back: The exchanges in which the results travel back; none if nothing travels.
        fits: Whether there is memory for all copies of the results in one exchange.
        first: The number of the first of these exchanges, counted over all stages.
        summed: Assignments whose matrices need sums before they are written, see `Plan.summed`.
        reads: The pieces whose momentum this rank stores. Their buffers are this rank's ``batches``, and then the send
            buffer; pieces that this rank does not send are in no buffer.
        staying: The pieces that this rank writes straight from the results of its ``batches``.
        batches, shapes: The assignments that this rank orthogonalizes, those of one task together, and the shapes of
            each task.
        portions: If nothing is gathered, on a device, gradients are read only when they are needed: for each batch the
            assignments that are folded with it, and their table. Else empty.
    """

    number: int
    name: str
    moving: tuple[int, ...]
    local: Sequence[LocalBatch]
    to_owners: PackedAllToAll
    gathers: bool
    back: Sequence[PackedAllToAll]
    fits: bool
    first: int
    summed: Mapping[int, int]
    reads: PieceTable
    staying: PieceTable
    batches: Sequence[tuple[int, ...]]
    shapes: Sequence[Shapes]
    portions: Sequence[tuple[tuple[int, ...], PieceTable]]

    @property
    def _sizes(self) -> list[int]:
        return [_numel(shapes) for shapes in self.shapes]

    @property
    def numel(self) -> int:
        """The number of elements of the matrices that this rank orthogonalizes."""
        return sum(self._sizes)

    def assembled(self, memory: Tensor) -> tuple[Tensor, ...]:
        """Return the memory of each batch, adjacent views of ``memory``."""
        return torch.split(memory[: self.numel], self._sizes)

    def by_assignment(self, buffers: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return each matrix, a view of the memory of its batch, by assignment."""
        batches = zip(buffers, self.shapes, strict=True)
        views = [view for buffer, shapes in batches for equal in by_shape(buffer, shapes) for view in equal.unbind()]
        return dict(zip(itertools.chain.from_iterable(self.batches), views, strict=True))


@dataclass(frozen=True)
class Gather:
    """The transfer of one bucket to the owners; the attributes are in the order of their use.

    Attributes:
        reads: The pieces that this rank stores, with their target: this rank's matrices, or the send buffer.
        all_to_all: The collective; None if nothing travels.
        arriving: The copies from the receive buffer into the matrices.
        matrices: The matrices that this rank orthogonalizes, those of each batch one after the other.
    """

    reads: Elements
    all_to_all: AllToAll | None
    arriving: CopyPairs
    matrices: tuple[Tensor, ...]


@dataclass(frozen=True)
class Scatter:
    """One exchange that brings results of a bucket to ranks that store them.

    Attributes:
        leaving: The copies into the send buffer: from the results, and from the previous receive buffer, if any.
        all_to_all: The collective.
        arrived: The pieces that are written from the receive buffer.
        again: Whether the next exchange of the bucket sends the same elements.
        last: Whether no later exchange of the bucket copies from the results.
    """

    leaving: CopyPairs
    all_to_all: AllToAll
    arrived: Elements
    again: bool
    last: bool


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
        batching: Which matrices one task computes.

    Attributes:
        stages: The stages, in their order.
        trailing: Local matrices after the last stage, those of one task together.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        peers: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        batching: Batching | None = None,
    ) -> None:
        batching = batching or Batching()
        self.stages, self.trailing = stages_of(plan, rank, peers, batching, on_device=device.type != "cpu")
        self._dtype, self._device = dtype, device

    def gather(self, stage: Stage) -> Gather:
        """Return the transfer of a stage's pieces to their owners, with its buffers."""
        matrices = stage.assembled(self._memory("gathered matrices", stage.number, stage.numel))
        if not stage.gathers:
            return Gather(Elements(stage.reads, matrices), None, (), matrices)
        packed = stage.to_owners
        send = self._memory("gather.send", stage.number, packed.sends)
        receive = self._memory("gather.receive", stage.number, packed.receives)
        all_to_all = packed.all_to_all(f"the gather of {stage.name}", send, receive)
        arriving = packed.copies(stage.by_assignment(matrices), all_to_all.receive)
        return Gather(Elements(stage.reads, (*matrices, all_to_all.send)), all_to_all, arriving, matrices)

    def portions(self, stage: Stage) -> Iterator[Portion]:
        """Yield the portions of a stage with the pieces that are read into its batch, in memory of its own."""
        for number, (numbers, table) in enumerate(stage.portions):
            yield numbers, *self._in_memory(table, stage, number)  # this generator keeps none of the memory alive

    def _in_memory(self, table: PieceTable, stage: Stage, number: int) -> tuple[Elements, Sequence[Batch]]:
        """Return the elements of a table, and batch ``number`` of a stage, if there is one, in new memory."""
        batches = []
        for batch, shapes in [*zip(stage.batches, stage.shapes, strict=True)][number : number + 1]:
            x, out = (torch.empty(_numel(shapes), dtype=self._dtype, device=self._device) for _ in range(2))
            batches.append((x, out, batch, shapes))
        return Elements(table, [x for x, *_ in batches]), batches

    def batches(self, stage: Stage, matrices: Sequence[Tensor]) -> tuple[Batch, ...]:
        """Return the batches of a gathered stage, with buffers for their results."""
        results = stage.assembled(self._memory("gathered results", stage.number, stage.numel))
        return tuple(zip(matrices, results, stage.batches, stage.shapes, strict=True))

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
        packed, *later = stage.back[index:]
        receive = self._memory("scatter.receive", stage.first + index, packed.receives)
        send = self._memory("scatter.send", 0, packed.sends) if sent is None else sent
        suffix = f", exchange {index + 1} of {len(stage.back)}" if len(stage.back) > 1 else ""
        all_to_all = packed.all_to_all(f"the scatter of {stage.name}{suffix}", send, receive)
        copies = packed.copies(stage.by_assignment(results), all_to_all.send) if results and sent is None else ()
        leaving = tuple((wire, matrix) for matrix, wire in copies)
        if received is not None:
            leaving += packed.passed_on(stage.back[index - 1], received, all_to_all.send)
        again = bool(later) and later[0].sends_as(packed)
        last = not any(following.copies_results and not following.sends_as(packed) for following in later)
        return Scatter(leaving, all_to_all, Elements(packed.arriving, (all_to_all.receive,)), again, last)

    def _memory(self, role: str, number: int, numel: int) -> Tensor:
        """Return memory for a bucket or an exchange; even turns share one buffer on a CPU, odd turns another."""
        return scratch(f"{role} {number % 2}", (numel,), dtype=self._dtype, device=self._device)


# ------------------------------------------------------------------ how it is worked out


def stages_of(
    plan: Plan, rank: int, peers: Sequence[int], batching: Batching, *, on_device: bool = False
) -> tuple[list[Stage], list[LocalBatch]]:
    """Return a stage for each bucket with transfers, and the local matrices after the last bucket.

    Each stage has the local matrices before it.
    """
    stages, first, waiting = list[Stage](), 0, list[int]()
    for number, bucket in enumerate(plan.buckets):
        moving = tuple(index for index in bucket if plan.moves(index))
        owned = dict.fromkeys(index for index in bucket if plan.assignments[index].owner == rank)
        waiting += [index for index in owned if not plan.moves(index)]
        if moving:
            gather_routes, back = _routes(plan, number, rank, moving)
            packed, gathers = PackedAllToAll("gather", gather_routes, rank, peers), plan.gathers(number)
            exchanges = [
                PackedAllToAll("scatter", back.only(n), rank, peers, owned) for n in range(plan.exchanges(number))
            ]
            batches = _batches(plan, [index for index in owned if plan.moves(index)], batching)
            places = _places(plan, batches)
            reads = _in_matrices(gather_routes.stored.get(rank, ()), places) + packed.on_wire(len(batches))
            reads += () if gather_routes is back else _not_sent(plan, rank, moving, reads)
            local = _local(plan, rank, waiting, batching)
            gather_fields = len(stages), f"bucket {number}", moving, local, packed, gathers
            scatter_fields = exchanges, plan.fits(number), first, plan.summed(moving)
            tables = PieceTable(tuple(reads)), PieceTable(tuple(_in_matrices(back.stored.get(rank, ()), places)))
            shapes = [plan.shapes(batch) for batch in batches]
            portions = _portions(moving, tables[0], batches) if on_device and not gathers else ()
            stages.append(Stage(*gather_fields, *scatter_fields, *tables, batches, shapes, portions))
            first, waiting = first + len(exchanges), []
    return stages, _local(plan, rank, waiting, batching)


def _batches(plan: Plan, numbers: Sequence[int], batching: Batching, *, stays: bool = False) -> list[tuple[int, ...]]:
    """Return matrices that this rank owns, those that one task computes together."""
    size_of, fits = partial(batching.batch_size, stays=stays), partial(batching.fits, stays=stays)
    return plan.batches(numbers, size_of, batching.joins, fits)


def _places(plan: Plan, batches: Sequence[Sequence[int]]) -> dict[int, tuple[int, int]]:
    """Return the number of the batch of each matrix, and its place there."""
    places = {}
    for buffer, batch in enumerate(batches):
        sizes = [plan.assignments[index].matrix.numel for index in batch]
        starts = itertools.accumulate(sizes, initial=0)
        places.update({index: (buffer, start) for index, start in zip(batch, starts, strict=False)})
    return places


def _numel(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes))


def _local(plan: Plan, rank: int, numbers: Sequence[int], batching: Batching) -> list[LocalBatch]:
    """Return local matrices, those of one task together."""
    batches = []
    for batch in _batches(plan, numbers, batching, stays=True):
        places = _places(plan, [batch])
        reads, writes = (
            PieceTable(tuple(_in_matrices([row for n in batch for row in plan.rows(n, rank, gather=gather)], places)))
            for gather in (True, False)
        )
        shapes = plan.shapes(batch)
        layout = batching.shared_layout(batch[0], shapes)
        batches.append(LocalBatch(batch, shapes, plan.summed(batch), reads, writes, layout))
    return batches


def _portions(
    moving: Sequence[int], reads: PieceTable, batches: Sequence[tuple[int, ...]]
) -> list[tuple[tuple[int, ...], PieceTable]]:
    """Return the `Stage.portions`; the first one also has the matrices of other owners."""
    owned = {number for batch in batches for number in batch}
    others = tuple(number for number in moving if number not in owned)
    portions = []
    for batch in batches or [()]:
        assignments = dict.fromkeys((*batch, *others))
        rows = (replace(row, buffer=min(row.buffer, 0)) for row in reads.rows if row.assignment in assignments)
        portions.append((tuple(assignments), PieceTable(tuple(rows))))
        others = ()
    return portions


def _routes(plan: Plan, bucket: int, rank: int, numbers: Sequence[int]) -> tuple[Routes, Routes]:
    """Return the routes of a rank to the owners of some matrices, and back; one object if they are the same."""
    to_owners = plan.routes(bucket, rank, gather=True, numbers=numbers)
    return to_owners, to_owners if plan.returns(numbers) else plan.routes(bucket, rank, gather=False, numbers=numbers)


def _in_matrices(rows: Sequence[Row], places: Mapping[int, tuple[int, int]]) -> list[Row]:
    """Return rows in the matrices of this rank, from the buffer and the place of each matrix."""
    return [row.in_matrix(*places[row.assignment]) for row in rows if row.assignment in places]


def _not_sent(plan: Plan, rank: int, moving: Sequence[int], reads: Sequence[Row]) -> list[Row]:
    """Return rows for the other pieces whose momentum this rank stores: those that another replica sends."""
    sent = {(row.assignment, row.piece) for row in reads}
    rows = (row for number in moving for row in plan.rows(number, rank, gather=True))
    return [row.in_matrix(NOWHERE, 0) for row in rows if (row.assignment, row.piece) not in sent]
