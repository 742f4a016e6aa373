"""Muon: its half of one step, what is done to the matrices between the exchange's moves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from muonmesh.comm.exchange import Local, contiguous, place
from muonmesh.comm.storage import Storage, local_of, local_shape, this_rank
from muonmesh.layout import Layout, Plan, overlap
from muonmesh.layout.plan import Leg
from muonmesh.numerics.kernels import select
from muonmesh.numerics.kernels.memory import scratch
from muonmesh.numerics.newton_schulz import gram_factor, gram_segments, orthogonalize
from muonmesh.numerics.rules import MuonRule, apply_update, update_momentum, write_direction
from muonmesh.numerics.scale import update_scale
from muonmesh.numerics.threads import run_all
from muonmesh.settings import Precision
from muonmesh.step.flags import Flags
from muonmesh.step.planning import Holdings
from muonmesh.step.slots import Slot, create_state, view_of
from muonmesh.step.sums import Sums

_TOGETHER_ELSEWHERE = 1 << 26
"""Elements orthogonalised together where one call has the whole device."""


class MuonStep:
    """The Muon half of one step: what the exchange reads, computes and writes (`muonmesh.comm.exchange.Work`).

    Everything is done piece by piece in the local storage, read as a contiguous array; a storage that is not
    contiguous is worked on in a contiguous copy that `finish` writes back.
    """

    def __init__(
        self,
        plan: Plan,
        holdings: Holdings,
        slots: Sequence[Slot | None],
        rules: Sequence[MuonRule | None],
        flags: Flags,
        precision: Precision,
        *,
        device: torch.device,
        step_adamw: Callable[[], None],
        sums: Sums | None,
    ) -> None:
        self._plan = plan
        self._holdings = holdings
        self._slots = {number: slot for number, slot in enumerate(slots) if slot is not None}
        self._rules = {number: rule for number, rule in enumerate(rules) if rule is not None}
        self._device = device
        self._flags = flags
        self._precision = precision
        self.step_adamw = step_adamw
        self._sums = sums
        self._weights = {number: _contiguous(local_of(slot.tensor)) for number, slot in self._slots.items()}
        self._ready: set[int] = set()  # parameters whose state and gradient are as the momentum is stored

    def prepare(self, assignments: Sequence[int]) -> None:
        """Create missing state and fold the gradients into the momenta of these matrices."""
        here = [number for number in assignments if self._plan.assignments[number].parameter in self._slots]
        self._create_states(here)
        run_all([functools.partial(self._fold, number) for number in here], device=self._device)

    def _create_states(self, assignments: Sequence[int]) -> None:
        fresh = {self._plan.assignments[assignment].parameter for assignment in assignments} - self._ready
        self._ready |= fresh
        for number in fresh:
            slot = self._slots[number]
            if self._flags.present[number]:
                create_state(slot, self._precision)
            if "momentum_buffer" not in slot.state:
                continue
            if slot.gradient is None:  # missing on this shard only: counts as zero
                slot.gradient = torch.zeros_like(local_of(slot.state["momentum_buffer"]))
            elif slot.momentum_storage is not slot.storage:
                slot.gradient = _restricted(slot.gradient, slot.storage, slot.momentum_storage)

    def _fold(self, assignment: int) -> None:
        flag = self._active(assignment)
        number = self._plan.assignments[assignment].parameter
        slot, rule = self._slots[number], self._rules[number]
        if flag is False or slot.gradient is None:
            return
        momentum = local_of(slot.state["momentum_buffer"])
        for piece in self._holdings[assignment]:
            update_momentum(view_of(momentum, piece), view_of(slot.gradient, piece), rule, active=_mask(flag))

    def local(self, matrices: Sequence[Local]) -> None:
        """Take matrices that nobody else has through the whole step, one batch on one thread after the other.

        What one operation leaves in the thread's cache the next one finds there, and no thread waits for another.
        """
        self._create_states([matrix.assignment for matrix in matrices])
        same: dict[tuple[str, tuple[int, int]], list[Local]] = {}
        for matrix in matrices:
            assignment = self._plan.assignments[matrix.assignment]
            settings = self._plan.parameters[assignment.parameter].settings
            same.setdefault((settings, assignment.matrix.shape), []).append(matrix)
        tasks: list[tuple[int, Callable[[], None]]] = []
        for (_, shape), some in same.items():
            size = self._at_once(len(some), shape)
            flops = self._plan.assignments[some[0].assignment].flops
            for start in range(0, len(some), size):
                batch = some[start : start + size]
                tasks.append((flops * len(batch), functools.partial(self._local, batch)))
        self._run(tasks)

    def _local(self, batch: Sequence[Local]) -> None:
        matrix = self._plan.assignments[batch[0].assignment].matrix
        device = self._device
        x, out = (
            scratch(role, (len(batch), *matrix.shape), dtype=self._precision.compute, device=device)
            for role in ("matrices", "results")
        )
        for local, target in zip(batch, x.unbind(), strict=True):
            for leg in local.read:
                self.read(leg, place(leg.piece, target), fold=True)
        self._orthogonalize(x, out, batch[0].assignment)
        for local, result in zip(batch, out.unbind(), strict=True):
            for leg in local.write:
                self.write(leg, contiguous(place(leg.piece, result)))

    def read(self, leg: Leg, into: Tensor, *, fold: bool = False) -> None:
        """Write the direction of a leg's elements; ``fold`` folds their gradient into the momentum on the way."""
        slot, rule = self._slots[leg.parameter], self._rules[leg.parameter]
        if "momentum_buffer" not in slot.state:  # no rank has ever had a gradient
            into.zero_()
            return
        momentum = view_of(local_of(slot.state["momentum_buffer"]), leg.piece)
        assert slot.gradient is not None
        gradient = view_of(slot.gradient, leg.piece)
        flag = self._active(leg.assignment)
        if fold and flag is not False:
            update_momentum(momentum, gradient, rule, active=_mask(flag), into=into)
        else:
            write_direction(momentum, gradient, rule, into)

    def orthogonalize(self, batches: Sequence[tuple[Tensor, Tensor, int]]) -> None:
        """Orthogonalise batches (matrices, results, an assignment whose settings they share)."""
        tasks: list[tuple[int, Callable[[], None]]] = []
        for batch, out, assignment in batches:
            size = self._at_once(len(batch), (batch.shape[1], batch.shape[2]))
            flops = self._plan.assignments[assignment].flops
            for part, into in zip(torch.split(batch, size), torch.split(out, size), strict=True):
                tasks.append((flops * len(part), functools.partial(self._orthogonalize, part, into, assignment)))
        self._run(tasks)

    def _at_once(self, count: int, shape: tuple[int, int]) -> int:
        """Return how many of ``count`` equal matrices are orthogonalised by one task."""
        rows, cols = sorted(shape)
        if self._device.type != "cpu":
            return max(1, _TOGETHER_ELSEWHERE // (rows * cols))
        kernels = select("auto", device=self._device, dtype=self._precision.compute, rows=rows, cols=cols)
        return max(1, min(-(-count // torch.get_num_threads()), kernels.at_once))

    def _run(self, tasks: Sequence[tuple[int, Callable[[], None]]]) -> None:
        """Run (cost, task) pairs: whole matrices on threads, but not in dtypes whose bits depend on their number."""
        tasks = sorted(tasks, key=lambda task: -task[0])
        ordered = [task for _, task in tasks]
        if self._precision.compute == torch.bfloat16 and ordered:
            run_all(ordered, device=self._device, costs=[cost for cost, _ in tasks])
        else:
            for task in ordered:
                task()

    def _orthogonalize(self, batch: Tensor, out: Tensor, assignment: int) -> None:
        rule = self._rules[self._plan.assignments[assignment].parameter]
        orthogonalize(
            batch,
            coefficients=rule.coefficients,
            steps=rule.steps,
            method=rule.method,
            dtype=self._precision.compute,
            out=out,
            overwrite=True,
        )

    def factor(self, assignment: int, segment: int, gram: Tensor) -> Tensor:
        """Return what a segment of the steps multiplies a matrix by, from its Gram matrix."""
        rule = self._rules[self._plan.assignments[assignment].parameter]
        return gram_factor(gram, gram_segments(rule.coefficients, rule.steps)[segment])

    def write(self, leg: Leg, update: Tensor) -> None:
        """Decay and update a leg's elements, unless their matrix is left alone."""
        flag = self._active(leg.assignment)
        if flag is False:
            return
        slot, rule = self._slots[leg.parameter], self._rules[leg.parameter]
        matrix = self._plan.assignments[leg.assignment].matrix
        scale = rule.extra_scale_factor * update_scale(matrix.rows, matrix.cols, rule.scale_mode)
        weights = view_of(self._weights[leg.parameter], leg.piece)
        master = slot.state.get("master")
        if master is None:
            apply_update(weights, update, rule, scale=scale, active=_mask(flag))
        else:
            held = view_of(local_of(master), leg.piece)
            apply_update(held, update, rule, scale=scale, active=_mask(flag))
            weights.copy_(held)
        if self._sums is not None:
            copies = slot.storage.copies
            squares = update.double().square().sum() * (rule.lr * scale) ** 2 / copies
            self._sums.add(slot.group, squares)

    def finish(self) -> None:
        """Write back the storages that were worked on in a copy, and give empty shards their empty state."""
        for number, slot in self._slots.items():
            if self._flags.present[number]:
                create_state(slot, self._precision)
            local = local_of(slot.tensor)
            if self._weights[number] is not local:
                local.copy_(self._weights[number])

    def _active(self, assignment: int) -> bool | Tensor:
        return self._flags.nonzero[assignment]


def _layout(storage: Storage) -> Layout:
    assert storage.layout is not None  # only AdamW steps parameters of which nobody said where they live
    return storage.layout


def _restricted(local: Tensor, storage: Storage, place: Storage) -> Tensor:
    """Return the elements of a local tensor that this rank also stores at ``place``, as they are stored there."""
    rank = this_rank()
    kept = torch.zeros(local_shape(place), dtype=local.dtype, device=local.device)
    for target in _layout(place).blocks(rank):
        for block in _layout(storage).blocks(rank):
            shared = overlap(block, target)
            if shared is not None:
                part = local.as_strided(shared.shape, shared.storage_strides, shared.storage_start)
                kept.as_strided(shared.shape, shared.matrix_strides, shared.matrix_start).copy_(part)
    return kept


def _contiguous(local: Tensor) -> Tensor:
    return local if local.is_contiguous() else local.contiguous()


def _mask(flag: bool | Tensor) -> Tensor | None:
    return flag if isinstance(flag, Tensor) else None
