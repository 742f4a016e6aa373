"""Exchange: runs a Plan: matrices travel to their owners, and updates travel back to all ranks that hold a part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

from muonmesh.comm.companions import CompanionExchange
from muonmesh.comm.matrix_sums import MatrixSums
from muonmesh.comm.passage import CopyPairs
from muonmesh.comm.schedule import Batch, Gather, Scatter, Schedule, Stage
from muonmesh.comm.wire import Transfer, Wire
from muonmesh.comm.work import LegViews, Work
from muonmesh.layout import Plan
from muonmesh.layout.companion_plan import CompanionPlan
from muonmesh.numerics.kernels.threads import run_all


@dataclass
class _UnderWay:
    """A stage that has begun in this step. A field is cleared as soon as its memory is no longer needed.

    Attributes:
        stage: The stage of the schedule.
        summed: The sums over matrices that must still be taken; until then nothing of these matrices is written.
        gather: The gather, until its matrices are orthogonalized.
        transfer: The transfer under way: of the gather, later of the newest round of the scatter.
        results: The orthogonalized matrices, until the last copy is made from them.
        staying: The legs that are still to be written straight from the results, because their storage is here.
        scatter: The newest round of the scatter.
    """

    stage: Stage
    summed: Mapping[int, int]
    gather: Gather | None = None
    transfer: Transfer | None = None
    results: Sequence[Tensor] = ()
    staying: LegViews = ()
    scatter: Scatter | None = None


class Exchange:
    """Replays a `Schedule`: gather the pieces of each matrix to its owner, orthogonalize, scatter the results.

    One bucket travels while another computes. A bucket moves by one `Wire.swap` each way with unequal splits, back by
    several where there are many replicas (`Plan.rounds`); what stays on a rank never enters it. One rank alone runs the
    same code with nothing to move. What rules keep by row, column or matrix travels before the matrices and after them,
    by the `CompanionExchange`.

    Args:
        plan: The same on every rank of the group.
        group: Process group of exactly ``plan.ranks``; None when that is one rank.
        dtype: Dtype of the wire and of the orthogonalization.
        companion_dtype: Dtype of what rules keep by row, column or matrix, which travels too.
        device: Where the matrices are assembled.
        blocks: How many blocks of momentum in int8 the ranks agree on.
        at_once: For each matrix owned here how many of its equals are orthogonalized together; if unsaid, all.

    Attributes:
        plan: The plan that it runs.
        group: Its process group.
        wire: To the other ranks; counts the steps and what the last one did.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        companion_dtype: torch.dtype = torch.float32,
        device: torch.device,
        blocks: int = 0,
        at_once: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self.plan, self.group, self.wire = plan, group, Wire(plan.ranks, group)
        self._dtype, self._device, self._blocks, self._at_once = dtype, device, blocks, at_once
        self._matrix_sums = MatrixSums(plan, rank=self.wire.rank, device=device, wire=self.wire)
        beside = CompanionPlan.beside(plan)
        self._carried = None if beside is None else CompanionExchange(beside, self.wire, companion_dtype, device)
        self._latest: Scatter | None = None  # kept where what arrives in it may be passed on

    @cached_property
    def schedule(self) -> Schedule:
        """What this rank does; takes the memory for it, so it is worked out when the first step begins."""
        return Schedule(self.plan, self.wire.rank, self.wire.peers, self._dtype, self._device, self._at_once)

    @property
    def memory(self) -> list[Tensor]:
        """What is kept from step to step."""
        return list(self.schedule.memory.values()) if "schedule" in self.__dict__ else []

    def reduce_sums(self, sums: Tensor, *, what: str = "the sum of the norms") -> Tensor:
        """Return the elementwise sum of an fp64 vector over all ranks; ``what`` names it in errors."""
        return self.wire.reduce(sums, dist.ReduceOp.SUM, what, counted=False)

    def run(self, work: Work) -> None:
        """Take every matrix of the plan through one step; all ranks of the group call it."""
        if self._blocks:
            largest = torch.zeros(self._blocks, dtype=torch.int32, device=self._device)
            work.measure_blocks(largest)
            self.wire.reduce(largest, dist.ReduceOp.MAX, "the agreement on blocks of momentum")
        if self._carried is not None:
            self._carried.gather(work.companions)
        before, here, stages = None, None, self.schedule.stages
        if stages:
            work.fetch(stages[0].moving)
            here = self._gather(stages[0], work)
        work.step_elementwise()  # while the first bucket travels
        while here is not None:
            ahead = stages[here.stage.number + 1 :]
            after = self._gather(ahead[0], work) if ahead else None
            self._compute(here, before, work)
            self._scatter(here, 0)
            self._write_what_stays(here, work)
            work.run_local(here.stage.local)
            self._scatter_the_rest(here, work)
            before, here = here, after
        work.run_local(self.schedule.left)
        self.wire.counts.orthogonalized += self.schedule.local_count
        self._receive(before, work)
        self._latest = None
        if self._carried is not None:
            self._carried.scatter(work.companions)

    def _gather(self, stage: Stage, work: Work) -> _UnderWay:
        """Read this rank's pieces into the send buffer and start to move them; own pieces go straight home."""
        if ahead := self.schedule.stages[stage.number + 1 :]:
            work.fetch(ahead[0].moving)
        if stage.late:
            return _UnderWay(stage, stage.summed)
        gather = self.schedule.gather(stage)
        work.read(stage.moving, gather.reads)
        transfer = None if gather.swap is None else self.wire.swap(gather.swap)
        return _UnderWay(stage, stage.summed, gather, transfer)

    def _compute(self, here: _UnderWay, before: _UnderWay | None, work: Work) -> None:
        """Assemble this rank's matrices from what arrived and orthogonalize them; meanwhile the last results arrive.

        Matrices that are all here are read and orthogonalized some at a time: there is no memory for all, their squares
        and more. The last results have arrived when the first of these have been computed, and give their memory.
        """
        self.wire.finish(here.transfer)
        if here.gather is not None:
            self._copy(here.gather.arriving)
            matrices, here.gather, here.transfer = here.gather.matrices, None, None  # and no wire buffers
            here.results = self._orthogonalize(self.schedule.batches(here.stage, matrices), work)
            del matrices
        else:
            for moving, reads, batches in self.schedule.portions(here.stage):
                work.read(moving, reads)
                here.results = (*here.results, *self._orthogonalize(batches, work))
                del reads, batches  # and the matrices
                self._receive(before, work)
        self._receive(before, work)
        here.staying = self.schedule.staying(here.stage, here.results)

    def _orthogonalize(self, batches: Sequence[Batch], work: Work) -> tuple[Tensor, ...]:
        """Orthogonalize batches and return the results."""
        work.orthogonalize(batches)
        self.wire.counts.orthogonalized += sum(len(some) for _, _, some in batches)
        return tuple(out for _, out, _ in batches)

    def _scatter(self, here: _UnderWay, index: int) -> None:
        """Start to move the results to every holder, or a part of them; give them up when all have left."""
        if index < here.stage.rounds.count:
            one = self.schedule.scatter(here.stage, index, here.results, here.scatter or self._latest)
            if one.passes:
                self.wire.finish(here.transfer)
            self._copy(one.leaving)
            here.scatter, here.transfer = replace(one, leaving=()), self.wire.swap(one.swap)
            self._latest = here.scatter if self.schedule.relays else None
        if index >= self.schedule.last_filling(here.stage):
            here.results = ()

    def _scatter_the_rest(self, here: _UnderWay, work: Work) -> None:
        """Move the results' other parts; the last one is still on its way then.

        One part travels while the one before it is written, so there is memory for two of them.
        """
        rounds = here.stage.rounds
        if rounds.count and not rounds.near:  # what sums are taken over is here
            self._sum(here, (), work)
        for index in range(1, rounds.count):
            arrived, transfer = here.scatter.arrived if here.scatter is not None else (), here.transfer
            self._scatter(here, index)
            self._write_what_stays(here, work)
            self.wire.finish(transfer)
            self._sum(here, arrived, work)
            work.write(arrived)

    def _write_what_stays(self, here: _UnderWay, work: Work) -> None:
        """Apply what stayed here while the rest travels, unless sums are to be taken first."""
        if not here.summed and here.staying:
            work.write(here.staying)
            here.staying = ()

    def _receive(self, here: _UnderWay | None, work: Work) -> None:
        """Apply what arrived of a stage, if that has not been done."""
        if here is not None:
            arrived = () if here.scatter is None else here.scatter.arrived
            self.wire.finish(here.transfer)
            here.scatter = here.transfer = None
            self._sum(here, arrived, work)
            if arrived:
                work.write(arrived)

    def _sum(self, here: _UnderWay, arrived: LegViews, work: Work) -> None:
        """Take the sums over the matrices of a stage, if there are any still to be taken, and write what stayed here.

        Nothing of these matrices is written before. What the sums are taken over has stayed here or has arrived.
        """
        if here.summed:
            legs = (*here.staying, *arrived)
            self._matrix_sums.take(here.summed, legs, work.summands, what=here.stage.name)
            work.write(here.staying)
            here.summed, here.staying = {}, ()

    def _copy(self, copies: CopyPairs) -> None:
        run_all([partial(to.copy_, of) for to, of in copies], device=self._device)
