"""Exchange: runs a Plan: matrices travel to their owners, and updates travel back to all ranks that hold a part."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from muonmesh.comm.communicator import Communicator, PendingCollective
from muonmesh.comm.factored_exchange import FactoredExchange
from muonmesh.comm.matrix_sums import MatrixSums
from muonmesh.comm.packed_all_to_all import CopyPairs
from muonmesh.comm.schedule import Batch, Gather, Schedule, Stage
from muonmesh.comm.step_callbacks import Batching, LocalBatch, StepCallbacks
from muonmesh.comm.views import Elements, by_shape
from muonmesh.layout import Plan
from muonmesh.layout.factored_plan import FactoredPlan
from muonmesh.numerics.kernels.threads import run_all, scratch


@dataclass
class _UnderWay:
    """A stage that has begun in this step. A field is cleared as soon as its memory is no longer needed.

    Attributes:
        stage: The stage of the schedule.
        summed: The sums over matrices that are still to be computed; before that, these matrices are not written.
        gather: The gather, until its matrices are orthogonalized.
        transfer: The transfer under way: first of the gather, later of the newest exchange of results.
        results: The orthogonalized matrices, until they have been copied for the last time.
        staying: The pieces that are still to be written straight from the results, because this rank stores them.
        exchanged: The number of exchanges of results that have begun.
        arrived: The pieces that arrive in the newest of these exchanges, until they are written.
        send: The send buffer of this exchange, if the next one sends the same elements again.
    """

    stage: Stage
    summed: Mapping[int, int]
    gather: Gather | None = None
    transfer: PendingCollective | None = None
    results: Sequence[Tensor] = ()
    staying: Elements | None = None
    exchanged: int = 0
    arrived: Elements | None = None
    send: Tensor | None = None


class _BatchInMemory(NamedTuple):
    """A local batch in memory for its matrices and results, with views of both: by shape, and of its pieces.

    It refers to the tensors of `scratch` weakly. When those are dropped, as with their thread, so is this.
    """

    memory: Sequence[weakref.ref[Tensor]]
    matrices_by_shape: Sequence[Tensor]
    results_by_shape: Sequence[Tensor]
    reads: Elements
    writes: Elements


class Exchange:
    """Replays a `Schedule`: gather the pieces of each matrix to its owner, orthogonalize, scatter the results.

    One bucket travels while another is computed. A bucket moves by one all-to-all with unequal splits in each
    direction, or by several on the way back if there are replicas (`Plan.exchanges`). Pieces that stay on their rank
    are not part of it. A single rank runs the same code with nothing to move. State by row, column or matrix
    travels before and after the matrices, by the `FactoredExchange`.

    Args:
        plan: The plan, the same on every rank of the group.
        group: Process group of exactly ``plan.ranks``; None for one rank.
        dtype: Dtype of the matrices on the wire and in the orthogonalization.
        factored_dtype: Dtype of state by row, column or matrix on the wire.
        device: The device on which matrices are assembled.
        batching: Which matrices are computed together.

    Attributes:
        plan: The plan that this exchange runs.
        group: The process group of the plan's ranks.
        communicator: Sends to the other ranks; counts the steps, and the work and traffic of the last step.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        factored_dtype: torch.dtype,
        device: torch.device,
        batching: Batching,
    ) -> None:
        self.plan, self.group, self.communicator = plan, group, Communicator(plan.ranks, group)
        self._dtype, self._device, self._batching = dtype, device, batching
        self._batches: dict[LocalBatch, _BatchInMemory] = {}  # as the last step had them on a CPU
        self._sums = MatrixSums(plan, rank=self.communicator.rank, device=device)
        beside = FactoredPlan.beside(plan)
        self._carried = None if beside is None else FactoredExchange(beside, self.communicator, factored_dtype, device)

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule of this rank, made when the first step begins: batches are for the threads of that time."""
        return Schedule(
            self.plan, self.communicator.rank, self.communicator.peers, self._dtype, self._device, self._batching
        )

    def reduce_sums(self, sums: Tensor, *, name: str = "the sum of the norms") -> Tensor:
        """Return the elementwise sum of an fp64 vector over all ranks; ``name`` names it in errors."""
        return self.communicator.reduce(sums, dist.ReduceOp.SUM, name, counted=False)

    def run(self, callbacks: StepCallbacks) -> None:
        """Run one step for every matrix of the plan. All ranks of the group call this."""
        if self._carried is not None:
            self._carried.gather(callbacks.factored_states)
        before, current, stages = None, None, self.schedule.stages
        if stages:
            current = self._gather(stages[0], callbacks)
        callbacks.step_elementwise()  # while the first bucket travels
        while current is not None:
            ahead = stages[current.stage.number + 1 :]
            after = self._gather(ahead[0], callbacks) if ahead else None
            self._compute(current, before, callbacks)
            self._scatter(current)
            self._write_what_stays(current, callbacks)
            self._run_local(current.stage.local, callbacks)
            if not current.stage.fits:  # there is no memory for the next bucket beside two such exchanges
                self._pass_on(current, callbacks)
            before, current = current, after
        self._run_local(self.schedule.trailing, callbacks)
        self._receive(before, callbacks)
        if self._carried is not None:
            self._carried.scatter(callbacks.factored_states)

    def _gather(self, stage: Stage, callbacks: StepCallbacks) -> _UnderWay:
        """Read this rank's pieces into the send buffer, or into its own matrices, and start to move them."""
        if stage.portions:
            return _UnderWay(stage, stage.summed)
        gather = self.schedule.gather(stage)
        callbacks.prepare(stage.moving, gather.reads, self._ahead(stage))
        transfer = None if gather.all_to_all is None else self.communicator.start(gather.all_to_all)
        return _UnderWay(stage, stage.summed, gather, transfer)

    def _ahead(self, stage: Stage) -> Sequence[int]:
        """Return the matrices that are prepared after those of a stage."""
        return next((after.moving for after in self.schedule.stages[stage.number + 1 :]), ())

    def _run_local(self, batches: Sequence[LocalBatch], callbacks: StepCallbacks) -> None:
        """Prepare, compute and finalize matrices that only this rank holds, each batch in a task of its own.

        On a CPU each task has a thread of its own, and each operation finds the result of the previous operation in the
        cache. On a device the batches follow each other.
        """
        tasks: list[tuple[Sequence[int], Callable[[], None]]] = []
        for number, batch in enumerate(batches):
            ahead = batches[number + 1].assignments if number + 1 < len(batches) else ()
            tasks.append((batch.assignments, partial(self._run_batch, batch, ahead, callbacks)))
            self.communicator.counts.orthogonalized += len(batch.assignments)
        self._run_costly(tasks)

    def _run_batch(self, batch: LocalBatch, ahead: Sequence[int], callbacks: StepCallbacks) -> None:
        memory = [scratch(role, shape, dtype=self._dtype, device=self._device) for role, shape in batch.memory]
        callbacks.repeat(batch, partial(self._run_in_memory, batch, ahead, callbacks), memory)

    def _run_in_memory(
        self, batch: LocalBatch, ahead: Sequence[int], callbacks: StepCallbacks, *memory: Tensor
    ) -> None:
        views = self._batches.get(batch)
        if views is None or any([of() is not tensor for of, tensor in zip(views.memory, memory, strict=True)]):
            (x, out), references = batch.buffers(memory), []
            if x.is_cpu:  # where the same memory serves every step (`scratch`)
                x, out = x.view(-1), out.view(-1)  # which are not the tensors that `scratch` holds
                references = [weakref.ref(tensor, partial(_drop, weakref.ref(self), batch)) for tensor in memory]
            batches = by_shape(x, batch.shapes), by_shape(out, batch.shapes)
            views = _BatchInMemory(references, *batches, Elements(batch.reads, (x,)), Elements(batch.writes, (out,)))
            if references:
                self._batches[batch] = views
        callbacks.prepare(batch.assignments, views.reads, ahead)
        shared = None if batch.shared_layout is None else memory[0]
        callbacks.compute(batch.assignments, views.matrices_by_shape, views.results_by_shape, shared)
        if batch.summed:
            self._sums.take(batch.summed, views.writes, callbacks.summands)
        callbacks.finalize(views.writes)

    def _run_costly(self, tasks: Sequence[tuple[Sequence[int], Callable[[], None]]]) -> None:
        """Run tasks, each given with its matrices: on a CPU the costliest first, each on a thread of its own."""
        if len(tasks) < 2 or self._device.type != "cpu":
            for _, task in tasks:
                task()
            return
        costs = [self.plan.assignments[numbers[0]].flops * len(numbers) for numbers, _ in tasks]
        order = sorted(range(len(tasks)), key=lambda number: -costs[number])
        run_all([tasks[number][1] for number in order], device=self._device, costs=[costs[number] for number in order])

    def _compute(self, current: _UnderWay, before: _UnderWay | None, callbacks: StepCallbacks) -> None:
        """Assemble this rank's matrices from the received pieces and orthogonalize them; then receive earlier results.

        If nothing was gathered, matrices are read and orthogonalized some at a time, because there is no memory for all
        of them with their squares. The results of the stage before are received after the first of these batches, which
        frees their memory.
        """
        self.communicator.finish(current.transfer)
        if current.gather is not None:
            self._copy(current.gather.arriving)
            matrices, current.gather, current.transfer = current.gather.matrices, None, None  # frees the wire buffers
            current.results = self._orthogonalize(self.schedule.batches(current.stage, matrices), callbacks)
            del matrices
        else:
            for moving, reads, batches in self.schedule.portions(current.stage):
                callbacks.prepare(moving, reads, self._ahead(current.stage))
                current.results = (*current.results, *self._orthogonalize(batches, callbacks))
                del reads, batches  # frees the matrices
                self._receive(before, callbacks)
        self._receive(before, callbacks)
        current.staying = Elements(current.stage.staying, current.results)

    def _orthogonalize(self, batches: Sequence[Batch], callbacks: StepCallbacks) -> tuple[Tensor, ...]:
        """Orthogonalize batches, each in a task of its own, and return the results."""
        tasks: list[tuple[Sequence[int], Callable[[], None]]] = []
        for x, out, numbers, shapes in batches:
            tasks.append((numbers, partial(callbacks.compute, numbers, by_shape(x, shapes), by_shape(out, shapes))))
            self.communicator.counts.orthogonalized += len(numbers)
        self._run_costly(tasks)
        return tuple(out for _, out, *_ in batches)

    def _scatter(self, current: _UnderWay) -> None:
        """Start the next exchange of results, if there is one; free the results after the last copy."""
        if not current.stage.back:
            current.results = ()
            return
        received = None if current.arrived is None else current.arrived.buffers[0]
        exchange = self.schedule.scatter(current.stage, current.exchanged, current.results, received, current.send)
        self._copy(exchange.leaving)
        current.arrived, current.send = exchange.arrived, exchange.all_to_all.send if exchange.again else None
        current.transfer, current.exchanged = self.communicator.start(exchange.all_to_all), current.exchanged + 1
        if exchange.last:
            current.results = ()

    def _pass_on(self, current: _UnderWay, callbacks: StepCallbacks) -> None:
        """Run the remaining exchanges of results; the last one is still under way when this returns.

        One exchange travels while the results of the previous exchange are written, so there is memory for two.
        """
        while current.exchanged < len(current.stage.back):
            arrived = current.arrived
            self.communicator.finish(current.transfer)
            self._scatter(current)
            self._write(current, arrived, callbacks)

    def _write_what_stays(self, current: _UnderWay, callbacks: StepCallbacks) -> None:
        """Write results that stayed on this rank while others travel, unless sums must be computed first."""
        if not current.summed and current.staying is not None:
            callbacks.finalize(current.staying)
            current.staying = None

    def _receive(self, current: _UnderWay | None, callbacks: StepCallbacks) -> None:
        """Receive and write the results of a stage, if this has not been done."""
        if current is not None:
            self._pass_on(current, callbacks)
            self.communicator.finish(current.transfer)
            arrived, current.arrived, current.transfer = current.arrived, None, None
            self._write(current, arrived, callbacks)

    def _write(self, current: _UnderWay, arrived: Elements | None, callbacks: StepCallbacks) -> None:
        """Write results that have arrived, after the sums over their matrices."""
        self._sum(current, arrived, callbacks)
        if arrived is not None:
            callbacks.finalize(arrived)

    def _sum(self, current: _UnderWay, arrived: Elements | None, callbacks: StepCallbacks) -> None:
        """Compute the missing sums over the matrices of a stage, if any, and then write the results that stayed here.

        These matrices are not written before. All summands of this rank have stayed here or have arrived.
        """
        if current.summed:
            views = [view for elements in (current.staying, arrived) if elements is not None for view in elements]
            self._sums.take(current.summed, views, callbacks.summands, self.communicator, name=current.stage.name)
            current.summed = {}
            self._write_what_stays(current, callbacks)

    def _copy(self, copies: CopyPairs) -> None:
        run_all([partial(to.copy_, of) for to, of in copies], device=self._device)


def _drop(exchange: weakref.ref[Exchange], batch: LocalBatch, memory: weakref.ref[Tensor]) -> None:
    """Forget the views of a batch in memory that nobody else holds any more."""
    batches = {} if (of := exchange()) is None else of._batches
    if (views := batches.get(batch)) is not None and any([memory is other for other in views.memory]):
        batches.pop(batch, None)
