"""Exchange: runs a Plan. Gather to the owners, compute, scatter back."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from muonmesh.comm.meeting import meeting
from muonmesh.comm.storage import this_rank
from muonmesh.layout import Piece, Plan, Routes
from muonmesh.layout.gram import slab
from muonmesh.layout.plan import Leg
from muonmesh.numerics.kernels.memory import scratch
from muonmesh.numerics.threads import run_all

_made: Counter[tuple[int, ...]] = Counter()
"""How many exchanges of these ranks this process has made; they make them together."""


@dataclass(frozen=True)
class Local:
    """A Matrix that a rank holds whole, owns, and shares with nobody: nothing of it moves."""

    assignment: int
    read: tuple[Leg, ...]
    write: tuple[Leg, ...]


class Work(Protocol):
    """What the exchange asks of the optimizer, of which it knows nothing else.

    A `Leg` names elements of one matrix: where they lie in the local storage of parameter number ``leg.parameter`` of
    the plan, read as a contiguous array, and where they lie in the assembled matrix.
    """

    def prepare(self, assignments: Sequence[int]) -> None:
        """Get ready to read what this rank stores of these matrices, each named once a step."""

    def local(self, matrices: Sequence[Local]) -> None:
        """Read, orthogonalise and write matrices that are this rank's alone; they have not been prepared."""

    def read(self, leg: Leg, into: Tensor) -> None:
        """Write the values of a leg's elements ``into`` a tensor of the shape of its piece, any strides."""

    def orthogonalize(self, batches: Sequence[tuple[Tensor, Tensor, int]]) -> None:
        """Orthogonalise batches: matrices (b, rows, cols), where to write the results, and whose settings they share.

        The last is the number of one of the batch's assignments.
        """

    def factor(self, assignment: int, segment: int, gram: Tensor) -> Tensor:
        """Return F so that F X is X after a segment of the steps, from X Xᵀ (rows, rows)."""

    def write(self, leg: Leg, update: Tensor) -> None:
        """Apply an update to a leg's elements; ``update`` is contiguous and of the shape of its piece."""

    def step_adamw(self) -> None:
        """Step AdamW's half, which needs no exchange, while the first gather travels."""


class Idle:
    """Work of a rank that takes part in what others wait for, and has nothing to read, compute or write itself."""

    def prepare(self, assignments: Sequence[int]) -> None:
        """Nothing."""

    def local(self, matrices: Sequence[Local]) -> None:
        """Nothing."""

    def read(self, leg: Leg, into: Tensor) -> None:
        """Send zeros."""
        into.zero_()

    def orthogonalize(self, batches: Sequence[tuple[Tensor, Tensor, int]]) -> None:
        """Send back zeros."""
        for _, out, _ in batches:
            out.zero_()

    def factor(self, assignment: int, segment: int, gram: Tensor) -> Tensor:
        """Change nothing."""
        return torch.eye(len(gram), dtype=gram.dtype, device=gram.device)

    def write(self, leg: Leg, update: Tensor) -> None:
        """Nothing."""

    def step_adamw(self) -> None:
        """Nothing."""


@dataclass
class Counts:
    """What the last step did on this rank; `Plan` and routes say what it should have been."""

    orthogonalized: int = 0
    collectives: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds_waiting: float = 0.0


@dataclass
class _Batch:
    """Same-shaped matrices of one bucket on their owner, assembled into one buffer."""

    assignments: tuple[int, ...]
    shape: tuple[int, int]

    @property
    def numel(self) -> int:
        return len(self.assignments) * math.prod(self.shape)


@dataclass
class _Stage:
    """One bucket as this rank sees it: what moves in it, and the local matrices to compute while that travels."""

    moving: tuple[int, ...]
    local: tuple[Local, ...]
    batches: tuple[_Batch, ...]
    gather: Routes
    scatter: Routes
    gathers: bool
    scatters: bool


@dataclass
class _Slab:
    """The columns of a matrix that this rank stores, for the Gram exchange."""

    assignment: int
    rows: int
    segments: int
    width: int
    legs: tuple[Leg, ...]
    counts: bool  # whether this rank is of the copy whose columns are summed


@dataclass
class _Buffers:
    """Memory reused from step to step: by role, grown to the largest bucket."""

    dtype: torch.dtype
    device: torch.device
    kept: dict[str, Tensor] = field(default_factory=dict)

    def take(self, role: str, numel: int) -> Tensor:
        """Return ``numel`` elements; contents are whatever was there."""
        buffer = self.kept.get(role)
        if buffer is None or buffer.numel() < numel:
            buffer = self.kept[role] = torch.empty(numel, dtype=self.dtype, device=self.device)
        return buffer[:numel]


@dataclass
class _Transfer:
    """A collective under way, with the buffers that must outlive it; work is None where nothing moves."""

    work: dist.Work | None = None
    send: Tensor | None = None
    received: tuple[Tensor, ...] = ()
    results: dict[int, Tensor] = field(default_factory=dict)
    what: str = ""


class Exchange:
    """Runs a Plan over a process group. The only runtime object with state, and the only caller of collectives.

    Per bucket: gather the pieces of each matrix to its owner, orthogonalise same-shaped ones together, scatter
    the result to every holder. One bucket travels while another computes. A bucket moves by one
    ``all_to_all_single`` each way with unequal splits; what stays on a rank never enters it. World size 1 runs
    the same code with nothing to move.

    Args:
        plan: The same on every rank of the group.
        group: Process group of exactly ``plan.ranks``; None when that is one rank.
        dtype: Dtype of the wire and of the orthogonalisation.
        device: Where the buffers live.
    """

    def __init__(
        self, plan: Plan, *, group: dist.ProcessGroup | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        if group is None and len(plan.ranks) > 1:
            raise ValueError(f"group: found None for ranks {plan.ranks}; needed their process group")
        self.plan = plan
        self.group = group
        self.rank = this_rank() if len(plan.ranks) > 1 else plan.ranks[0]
        self.peers = tuple(dist.get_process_group_ranks(group)) if group is not None else plan.ranks
        self.counts = Counts()
        self.steps = 0  # begun, for messages
        self._key = f"waited/{plan.ranks}/{_made[plan.ranks]}"
        _made[plan.ranks] += 1
        self._buffers = _Buffers(dtype, device)
        self._stages = self._stage_buckets()
        self._slabs = [self._slab(number) for number in plan.grams]

    def reduce_flags(self, flags: Tensor) -> Tensor:
        """Return the elementwise maximum of small integer flags over all ranks."""
        self.steps += 1
        if self.group is not None:
            started = time.perf_counter()
            with self._meeting("the agreement before the step"):
                dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
            self.counts.seconds_waiting += time.perf_counter() - started
            self.counts.collectives += 1
        return flags

    def reduce_sums(self, sums: Tensor, *, what: str = "the sum of the norms") -> Tensor:
        """Return the elementwise sum of an fp64 vector over all ranks; ``what`` names it in errors."""
        if self.group is not None:
            with self._meeting(what):
                dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=self.group)
        return sums

    def _meeting(self, what: str) -> AbstractContextManager[None]:
        return meeting(self.plan.ranks, self._key, f"step {self.steps}", what)

    def run(self, work: Work) -> None:
        """Run every bucket of the plan once; all ranks of the group call it."""
        stages = self._stages
        gathered = [self._gather(0, work)] if stages else []
        work.step_adamw()
        scattered: list[_Transfer] = []
        for number in range(len(stages)):
            if number + 1 < len(stages):
                gathered.append(self._gather(number + 1, work))
            results = self._compute(number, gathered[number], work)
            scattered.append(self._scatter(number, results))
            work.local(stages[number].local)
            if number:
                self._receive(number - 1, scattered[number - 1], work)
        if stages:
            self._receive(len(stages) - 1, scattered[-1], work)
        self.counts.orthogonalized += sum(len(stage.local) for stage in stages)
        if self._slabs:
            self._sum_grams(work)

    def _slab(self, number: int) -> _Slab:
        assignment = self.plan.assignments[number]
        parameter = self.plan.parameters[assignment.parameter]
        found = slab(parameter.target, self.rank, assignment.matrix)
        assert found is not None  # `fits` has seen to it
        width, parts = found
        legs = tuple(Leg(number, assignment.parameter, piece, 0) for piece in parts)
        counts = self.rank in parameter.target.replica(parameter.target.ranks[0])
        return _Slab(number, assignment.matrix.shape[0], parameter.segments, width, legs, counts)

    def _sum_grams(self, work: Work) -> None:
        """Orthogonalise matrices where they lie, from sums of X Xᵀ over the ranks; in fp32, or fp64 if asked for."""
        dtype, device = torch.promote_types(self._buffers.dtype, torch.float32), self._buffers.device
        work.prepare([part.assignment for part in self._slabs if part.legs])
        columns = []
        for part in self._slabs:
            x = torch.zeros(part.rows, part.width, dtype=dtype, device=device)
            for leg in part.legs:
                work.read(leg, place(leg.piece, x))
            columns.append(x)
        # Norms in fp64: squares of fp32 neither overflow nor vanish there, and no sum of them depends on the scale.
        squares = [
            x.double().square().sum() if p.counts else x.new_zeros((), dtype=torch.float64)
            for p, x in zip(self._slabs, columns, strict=True)
        ]
        norms = self._reduce(torch.stack(squares)).sqrt()
        norms = torch.where(norms == 0, 1.0, torch.where(norms.isfinite(), norms, torch.nan))
        columns = [(x.double() / norm).to(dtype) for x, norm in zip(columns, norms, strict=True)]
        for segment in range(max(part.segments for part in self._slabs)):
            active = [number for number, part in enumerate(self._slabs) if segment < part.segments]
            sizes = [self._slabs[number].rows ** 2 for number in active]
            sums = torch.zeros(sum(sizes), dtype=dtype, device=device)
            grams = [g.view(math.isqrt(len(g)), -1) for g in torch.split(sums, sizes)]
            for number, gram in zip(active, grams, strict=True):
                if self._slabs[number].counts and self._slabs[number].width:
                    torch.mm(columns[number], columns[number].mT, out=gram)
            self._reduce(sums)
            for number, gram in zip(active, grams, strict=True):
                if self._slabs[number].width:
                    factor = work.factor(self._slabs[number].assignment, segment, gram)
                    columns[number] = factor @ columns[number]
        for part, x in zip(self._slabs, columns, strict=True):
            for leg in part.legs:
                work.write(leg, contiguous(place(leg.piece, x)))

    def _reduce(self, sums: Tensor) -> Tensor:
        started = time.perf_counter()
        with self._meeting("a sum of Gram matrices"):
            dist.all_reduce(sums, group=self.group)
        self.counts.seconds_waiting += time.perf_counter() - started
        self.counts.collectives += 1
        self.counts.bytes_sent += sums.numel() * sums.element_size()
        self.counts.bytes_received += sums.numel() * sums.element_size()
        return sums

    def _stage_buckets(self) -> list[_Stage]:
        plan, stages, waiting = self.plan, list[_Stage](), list[Local]()
        for number, bucket in enumerate(plan.buckets):
            gather = plan.routes(number, self.rank, gather=True)
            scatter = plan.routes(number, self.rank, gather=False)
            staying = {index for index in bucket if not plan.moves(index)}
            reads, writes = (_by_assignment(routes.held.get(self.rank, ())) for routes in (gather, scatter))
            waiting += [Local(i, reads[i], writes[i]) for i in bucket if i in staying and i in reads]
            if len(staying) < len(bucket):
                moving = tuple(index for index in bucket if index not in staying)
                gather, scatter = (_without(routes, staying) for routes in (gather, scatter))
                batches = self._batches(moving)
                gathers, scatters = plan.gathers(number), plan.scatters(number)
                stages.append(_Stage(moving, tuple(waiting), batches, gather, scatter, gathers, scatters))
                waiting = []
        if waiting:
            nothing = Routes({}, {})
            stages.append(_Stage((), tuple(waiting), (), nothing, nothing, gathers=False, scatters=False))
        return stages

    def _batches(self, bucket: Sequence[int]) -> tuple[_Batch, ...]:
        groups: dict[tuple[str, tuple[int, int]], list[int]] = {}
        for index in bucket:
            assignment = self.plan.assignments[index]
            if assignment.owner == self.rank:
                settings = self.plan.parameters[assignment.parameter].settings
                groups.setdefault((settings, assignment.matrix.shape), []).append(index)
        return tuple(_Batch(tuple(indices), shape) for (_, shape), indices in groups.items())

    def _gather(self, number: int, work: Work) -> _Transfer:
        """Read this rank's pieces into the send buffer and start moving them; own pieces go straight home."""
        stage = self._stages[number]
        work.prepare(stage.moving)
        matrices = self._matrices("matrices", number)
        copies = [(leg, _place(leg, matrices)) for leg in stage.gather.held.get(self.rank, ())]
        if not stage.gathers:
            self._read(copies, work)
            return _Transfer()
        slot = number % 2
        send, sent = self._segments(f"gather.send.{slot}", stage.gather.held)
        copies += [(leg, _wire(sent[peer], leg)) for peer, leg in self._travelling(stage.gather.held)]
        self._read(copies, work)
        receive, received = self._segments(f"gather.receive.{slot}", stage.gather.owned)
        return self._start(f"the gather of bucket {number}", send, sent, receive, received)

    def _compute(self, number: int, transfer: _Transfer, work: Work) -> dict[int, Tensor]:
        """Assemble this rank's matrices from what arrived and orthogonalise them; return them by assignment."""
        stage = self._stages[number]
        matrices = self._matrices("matrices", number)
        self._finish(transfer)
        self._copy(
            [
                (_place(leg, matrices), _wire(transfer.received[peer], leg))
                for peer, leg in self._travelling(stage.gather.owned)
            ]
        )
        gathered, results = (self._assembled(role, number) for role in ("matrices", "results"))
        work.orthogonalize(
            [(x, out, batch.assignments[0]) for (batch, x), (_, out) in zip(gathered, results, strict=True)]
        )
        orthogonal = self._matrices("results", number)
        self.counts.orthogonalized += len(orthogonal)
        return orthogonal

    def _scatter(self, number: int, results: dict[int, Tensor]) -> _Transfer:
        """Start moving the results to every holder."""
        stage = self._stages[number]
        if not stage.scatters:
            return _Transfer(results=results)
        slot = number % 2
        send, sent = self._segments(f"scatter.send.{slot}", stage.scatter.owned)
        self._copy(
            [(_wire(sent[peer], leg), _place(leg, results)) for peer, leg in self._travelling(stage.scatter.owned)]
        )
        receive, received = self._segments(f"scatter.receive.{slot}", stage.scatter.held)
        transfer = self._start(f"the scatter of bucket {number}", send, sent, receive, received)
        transfer.results = results
        return transfer

    def _receive(self, number: int, transfer: _Transfer, work: Work) -> None:
        """Apply what stayed here while the rest travels, then what arrived."""
        stage = self._stages[number]
        staying = [(leg, _place(leg, transfer.results)) for leg in stage.scatter.held.get(self.rank, ())]
        self._write(staying, work)
        self._finish(transfer)
        arrived = self._travelling(stage.scatter.held)
        self._write([(leg, _wire(transfer.received[peer], leg)) for peer, leg in arrived], work)
        transfer.results = {}

    def _read(self, copies: Sequence[tuple[Leg, Tensor]], work: Work) -> None:
        run_all(
            [lambda leg=leg, into=into: work.read(leg, into) for leg, into in copies],  # type: ignore[misc]
            device=self._buffers.device,
        )

    def _copy(self, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        run_all([lambda to=to, of=of: to.copy_(of) for to, of in copies], device=self._buffers.device)  # type: ignore[misc]

    def _write(self, updates: Sequence[tuple[Leg, Tensor]], work: Work) -> None:
        run_all(
            [lambda leg=leg, update=update: work.write(leg, contiguous(update)) for leg, update in updates],  # type: ignore[misc]
            device=self._buffers.device,
        )

    def _travelling(self, legs: dict[int, tuple[Leg, ...]]) -> list[tuple[int, Leg]]:
        """Return the legs that leave or reach this rank, each with the position of its peer in the group."""
        return [(self.peers.index(peer), leg) for peer, some in legs.items() if peer != self.rank for leg in some]

    def _assembled(self, role: str, number: int) -> list[tuple[_Batch, Tensor]]:
        """Return a bucket's batches on this rank with their (b, rows, cols) buffers."""
        batches = self._stages[number].batches
        buffer = self._buffers.take(f"{role}.{number % 2}", sum(batch.numel for batch in batches))
        parts = torch.split(buffer, [batch.numel for batch in batches])
        return [(batch, part.view(-1, *batch.shape)) for batch, part in zip(batches, parts, strict=True)]

    def _matrices(self, role: str, number: int) -> dict[int, Tensor]:
        """Return the buffers of a bucket's matrices on this rank by assignment."""
        return {
            assignment: matrix
            for batch, buffer in self._assembled(role, number)
            for assignment, matrix in zip(batch.assignments, buffer.unbind(), strict=True)
        }

    def _segments(self, role: str, legs: dict[int, tuple[Leg, ...]]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return a wire buffer and its segment for each peer; this rank's own segment is empty."""
        sizes = [
            0 if peer == self.rank or peer not in legs else legs[peer][-1].start + legs[peer][-1].piece.numel
            for peer in self.peers
        ]
        buffer = self._buffers.take(role, sum(sizes))
        return buffer, torch.split(buffer, sizes)

    def _start(
        self, what: str, send: Tensor, sent: Sequence[Tensor], receive: Tensor, received: tuple[Tensor, ...]
    ) -> _Transfer:
        with self._meeting(what):
            work = dist.all_to_all_single(
                receive,
                send,
                [segment.numel() for segment in received],
                [segment.numel() for segment in sent],
                group=self.group,
                async_op=True,
            )
        self.counts.collectives += 1
        self.counts.bytes_sent += send.numel() * send.element_size()
        self.counts.bytes_received += receive.numel() * receive.element_size()
        return _Transfer(work, send, received, what=what)

    def _finish(self, transfer: _Transfer) -> None:
        if transfer.work is not None:
            started = time.perf_counter()
            with self._meeting(transfer.what):
                transfer.work.wait()
            self.counts.seconds_waiting += time.perf_counter() - started
            transfer.work = transfer.send = None


def _by_assignment(legs: Sequence[Leg]) -> dict[int, tuple[Leg, ...]]:
    sorted_legs: dict[int, list[Leg]] = {}
    for leg in legs:
        sorted_legs.setdefault(leg.assignment, []).append(leg)
    return {assignment: tuple(some) for assignment, some in sorted_legs.items()}


def _without(routes: Routes, assignments: set[int]) -> Routes:
    held, owned = (
        {peer: tuple(leg for leg in legs if leg.assignment not in assignments) for peer, legs in ends.items()}
        for ends in (routes.held, routes.owned)
    )
    return Routes({p: legs for p, legs in held.items() if legs}, {p: legs for p, legs in owned.items() if legs})


def place(piece: Piece, matrix: Tensor) -> Tensor:
    """Return a piece's elements within its whole, contiguous matrix."""
    return matrix.as_strided(piece.shape, piece.matrix_strides, matrix.storage_offset() + piece.matrix_start)


def _place(leg: Leg, matrices: dict[int, Tensor]) -> Tensor:
    return place(leg.piece, matrices[leg.assignment])


def contiguous(update: Tensor) -> Tensor:
    """Return a tensor as it is or, if it is not contiguous, copied to memory that the thread uses again."""
    if update.is_contiguous():
        return update
    return scratch("update", update.shape, dtype=update.dtype, device=update.device).copy_(update)


def _wire(segment: Tensor, leg: Leg) -> Tensor:
    return segment[leg.start : leg.start + leg.piece.numel].view(leg.piece.shape)
