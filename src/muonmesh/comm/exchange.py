"""Exchange: runs a Plan: matrices travel to their owners, and updates travel back to all ranks that hold a part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

from muonmesh.comm.companions import CompanionExchange
from muonmesh.comm.matrix_sums import MatrixSums
from muonmesh.comm.passage import Copies
from muonmesh.comm.schedule import Compute, Gather, Scatter, Schedule
from muonmesh.comm.wire import Transfer, Wire
from muonmesh.comm.work import Ends, Work
from muonmesh.layout import Plan
from muonmesh.layout.companion_plan import CompanionPlan
from muonmesh.numerics.kernels.threads import run_all


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
        if group is None and len(plan.ranks) > 1:
            raise ValueError(f"group: found None for ranks {plan.ranks}; needed their process group")
        self.plan, self.group, self.wire = plan, group, Wire(plan.ranks, group)
        self._dtype, self._device, self._blocks, self._at_once = dtype, device, blocks, at_once
        self._matrix_sums = MatrixSums(plan, rank=self.wire.rank, device=device, wire=self.wire)
        beside = CompanionPlan.beside(plan)
        self._carried = None if beside is None else CompanionExchange(beside, self.wire, companion_dtype, device)
        self._gathered: dict[int, Gather] = {}
        self._computed: dict[int, Compute] = {}
        self._under_way: dict[int, Transfer | None] = {}
        self._scattered: dict[int, Scatter] = {}
        self._latest: tuple[Scatter, Transfer] | None = None  # kept where what arrives in it may be passed on

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
        count = self.schedule.stages
        if count:
            work.fetch(self.schedule.moving(0))
            self._gather(0, work)
        work.step_elementwise()  # while the first bucket travels
        for number in range(count):
            if number + 1 < count:
                self._gather(number + 1, work)
            self._compute(number, work)
            self._scatter(number, 0)
            self._write_what_stays(number, 0, work)
            work.run_local(self._computed[number].local)
            self._scatter_the_rest(number, work)
        work.run_local(self.schedule.left)
        self.wire.counts.orthogonalized += self.schedule.local_count
        if count:
            self._receive(count - 1, work)
        self._latest = None
        if self._carried is not None:
            self._carried.scatter(work.companions)

    def _gather(self, number: int, work: Work) -> None:
        """Read this rank's pieces into the send buffer and start to move them; own pieces go straight home."""
        work.fetch(self.schedule.moving(number + 1))
        stage = self._gathered[number] = self.schedule.gather(number)
        if not stage.late:
            work.read(stage.moving, stage.reads)
        self._under_way[number] = None if stage.swap is None else self.wire.swap(stage.swap)

    def _compute(self, number: int, work: Work) -> None:
        """Assemble this rank's matrices from what arrived and orthogonalize them; meanwhile the last results arrive."""
        stage = self._gathered.pop(number)
        self._finish(self._under_way.pop(number))
        if stage.late:
            self._compute_portions(number, work)
        else:
            self._copy(stage.arriving)
            matrices = stage.matrices
            del stage  # and its wire buffers, where they are not kept
            back = self.schedule.compute(number, matrices)
            del matrices
            work.orthogonalize(back.batches)
            self.wire.counts.orthogonalized += sum(len(some) for _, _, some in back.batches)
            self._computed[number] = replace(back, batches=())  # what was orthogonalized is not needed any more
        if number - 1 in self._computed:
            self._receive(number - 1, work)

    def _compute_portions(self, number: int, work: Work) -> None:
        """Orthogonalize matrices that are all here, some at a time: there is no memory for all, their squares and more.

        The last results have arrived when the first of these have been computed, and give their memory.
        """
        results = []
        for portion in self.schedule.portions(number):
            work.read(portion.moving, portion.reads)
            if portion.batch is not None:
                work.orthogonalize([portion.batch])
                results.append(portion.batch[1])
                self.wire.counts.orthogonalized += len(portion.batch[2])
            del portion  # and the matrices
            if number - 1 in self._computed:
                self._receive(number - 1, work)
        self._computed[number] = self.schedule.compute(number, (), results)

    def _scatter(self, number: int, index: int) -> None:
        """Start to move the results to every holder, or a part of them."""
        stage = self._computed[number]
        if index < stage.rounds.count:
            before = self._scattered.get(number) if self._latest is None else self._latest[0]
            one = self.schedule.scatter(number, index, stage.results, before)
            if one.passes and self._latest is not None:
                self._finish(self._latest[1])
            self._copy(one.leaving)
            one = self._scattered[number] = replace(one, leaving=())  # nor are the results, but for what stays here
            started = self._under_way[number] = self.wire.swap(one.swap)
            self._latest = (one, started) if self.schedule.relays else None

    def _scatter_the_rest(self, number: int, work: Work) -> None:
        """Move the results' other parts; the last one is still on its way then.

        One part travels while the one before it is written, so there is memory for two of them.
        """
        stage = self._computed[number]
        if stage.rounds.count and not stage.rounds.near:  # what sums are taken over is here
            self._sum(number, (), work)
        del stage
        for index in range(1, self._computed[number].rounds.count):
            before, transfer = self._scattered[number], self._under_way.pop(number)
            self._scatter(number, index)
            self._write_what_stays(number, index, work)
            self._finish(transfer)
            self._sum(number, before.arrived, work)
            work.write(before.arrived)

    def _write_what_stays(self, number: int, index: int, work: Work) -> None:
        """Apply what stayed here while the rest travels, and give back the results that all have left in this round."""
        stage = self._computed[number]
        if not stage.summed and stage.staying:
            work.write(stage.staying)
            stage = replace(stage, staying=())
        if index >= self.schedule.last_filling(number):
            stage = replace(stage, results=())
        self._computed[number] = stage

    def _receive(self, number: int, work: Work) -> None:
        """Apply what arrived."""
        last, transfer = self._scattered.pop(number, None), self._under_way.pop(number, None)
        arrived = () if last is None else last.arrived
        self._finish(transfer)
        self._sum(number, arrived, work)
        work.write(arrived)
        del self._computed[number]

    def _sum(self, number: int, arrived: Ends, work: Work) -> None:
        """Take the sums over the matrices of a bucket, if there are any still to be taken, and write what stayed here.

        Nothing of these matrices is written before. What the sums are taken over has stayed here or has arrived.
        """
        stage = self._computed[number]
        if stage.summed:
            self._matrix_sums.take(
                stage.summed, (*stage.staying, *arrived), work.summands, what=self.schedule.name(number)
            )
            work.write(stage.staying)
            self._computed[number] = replace(stage, summed={}, staying=())

    def _finish(self, transfer: Transfer | None) -> None:
        if transfer is not None:
            self.wire.finish(transfer)

    def _copy(self, copies: Copies) -> None:
        run_all([partial(_copy, to, of) for to, of in copies], device=self._device)


def _copy(to: Tensor, of: Tensor) -> None:
    to.copy_(of)
