"""The owner exchange: each matrix travels to its owner, and its update travels back to all ranks that hold a part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor

from muonmesh.comm.matrix_sums import MatrixSums
from muonmesh.comm.schedule import Schedule
from muonmesh.comm.stages import Compute, Copies, Gather, Scatter, Swap
from muonmesh.comm.wire import Transfer, Wire
from muonmesh.comm.work import Ends, Work
from muonmesh.layout import Plan
from muonmesh.numerics.kernels.threads import run_all


class OwnerExchange:
    """Replays a `Schedule`: gather the pieces of each matrix to its owner, orthogonalize, scatter the results.

    One bucket travels while another computes. A bucket moves by one `Wire.swap` each way with unequal splits, back by
    several where there are many replicas (`Plan.rounds`); what stays on a rank never enters it. One rank alone runs the
    same code with nothing to move.

    Args:
        plan: Whose buckets to run.
        wire: To the other ranks.
        rank: This one.
        peers: All ranks, in the order of their process group.
        dtype: Of wire and orthogonalization.
        device: Where the matrices are assembled.
    """

    def __init__(
        self,
        plan: Plan,
        wire: Wire,
        *,
        rank: int,
        peers: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._wire = wire
        self._matrix_sums = MatrixSums(plan, rank=rank, device=device, wire=wire)
        self._device = device
        self._arguments = plan, rank, peers, dtype, device
        self._gathered: dict[int, Gather] = {}
        self._computed: dict[int, Compute] = {}
        self._under_way: dict[int, Transfer | None] = {}
        self._scattered: dict[int, Scatter] = {}
        self._latest: tuple[Scatter, Transfer] | None = None  # kept where what arrives in it may be passed on

    @cached_property
    def schedule(self) -> Schedule:
        """What this rank does; takes the memory for it, so it is worked out when the first step begins."""
        return Schedule(*self._arguments)

    @property
    def memory(self) -> Mapping[str, Tensor]:
        """What is kept from step to step, by role."""
        return self.schedule.memory if "schedule" in self.__dict__ else {}

    def run(self, work: Work, meanwhile: Callable[[], None]) -> None:
        """Run every bucket once; ``meanwhile`` is called while the first one travels."""
        count = self.schedule.stages
        if count:
            work.fetch(self.schedule.moving(0))
            self._gather(0, work)
        meanwhile()
        for number in range(count):
            if number + 1 < count:
                self._gather(number + 1, work)
            self._compute(number, work)
            self._scatter(number, 0)
            work.run_local(self._computed[number].local)
            if number:
                self._receive(number - 1, work)
            self._scatter_the_rest(number, work)
        work.run_local(self.schedule.left)
        self._wire.counts.orthogonalized += self.schedule.local_count
        if count:
            self._receive(count - 1, work)
        self._latest = None

    def _gather(self, number: int, work: Work) -> None:
        """Read this rank's pieces into the send buffer and start to move them; own pieces go straight home."""
        work.fetch(self.schedule.moving(number + 1))
        stage = self._gathered[number] = self.schedule.gather(number)
        work.read(stage.moving, stage.reads)
        self._under_way[number] = None if stage.swap is None else self._start(stage.swap)

    def _compute(self, number: int, work: Work) -> None:
        """Assemble this rank's matrices from what arrived and orthogonalize them."""
        stage = self._gathered.pop(number)
        self._finish(self._under_way.pop(number))
        self._copy(stage.arriving)
        back = self.schedule.compute(number, stage.matrices)
        del stage  # and its wire buffers, where they are not kept
        work.orthogonalize(back.batches)
        self._wire.counts.orthogonalized += sum(len(some) for _, _, some in back.batches)
        self._computed[number] = replace(back, batches=())  # what was orthogonalized is not needed any more

    def _scatter(self, number: int, index: int) -> None:
        """Start to move the results to every holder, or a part of them."""
        stage = self._computed[number]
        if index < stage.rounds.count:
            before = self._scattered.get(number) if self._latest is None else self._latest[0]
            one = self._scattered[number] = self.schedule.scatter(number, index, stage.results, before)
            if one.passes and self._latest is not None:
                self._finish(self._latest[1])
            self._copy(one.leaving)
            started = self._under_way[number] = self._start(one.swap)
            self._latest = (one, started) if self.schedule.relays else None

    def _scatter_the_rest(self, number: int, work: Work) -> None:
        """Move the results' other parts; the last one is still on its way then.

        One part travels while the one before it is written, so there is memory for two of them.
        """
        stage = self._computed[number]
        if stage.rounds.count and not stage.rounds.near:  # what sums are taken over is here
            self._sum(number, (), work)
        for index in range(1, stage.rounds.count):
            before, transfer = self._scattered[number], self._under_way.pop(number)
            self._scatter(number, index)
            self._finish(transfer)
            self._sum(number, before.arrived, work)
            work.write(before.arrived)

    def _receive(self, number: int, work: Work) -> None:
        """Apply what stayed here while the rest travels, then what arrived."""
        last, transfer = self._scattered.pop(number, None), self._under_way.pop(number, None)
        arrived = () if last is None else last.arrived
        if not self._computed[number].summed:
            work.write(self._computed[number].staying)
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

    def _start(self, swap: Swap) -> Transfer:
        return self._wire.swap(swap.what, swap.send, swap.receive, sent=swap.sent, received=swap.received)

    def _finish(self, transfer: Transfer | None) -> None:
        if transfer is not None:
            self._wire.finish(transfer)

    def _copy(self, copies: Copies) -> None:
        run_all([partial(_copy, to, of) for to, of in copies], device=self._device)


def _copy(to: Tensor, of: Tensor) -> None:
    to.copy_(of)
