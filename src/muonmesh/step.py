"""Step: the tensors of one optimizer step, and what is done to them between the exchange's moves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from muonmesh.comm.exchange import Local, contiguous, place
from muonmesh.comm.storage import Storage, local_of, local_shape, this_rank
from muonmesh.layout import Layout, Piece, Plan, overlap
from muonmesh.layout.plan import Leg, pieces
from muonmesh.numerics.kernels import select
from muonmesh.numerics.kernels.memory import scratch
from muonmesh.numerics.newton_schulz import gram_factor, gram_segments, orthogonalize
from muonmesh.numerics.rules import AdamWRule, MuonRule, apply_update, update_momentum, write_direction
from muonmesh.numerics.scale import update_scale
from muonmesh.numerics.threads import run_all

_TOGETHER_ELSEWHERE = 1 << 26
"""Elements orthogonalised together where one call has the whole device."""

_PROBE = 4096
"""Elements looked at first when asking whether a gradient is exactly zero; nearly always enough."""


RUNNING = ("running_norm", "running_norm_steps")
"""State of `clip`: for each matrix of a tensor the running norm of its gradients, and how many that has seen."""

Holdings = tuple[tuple[Piece, ...], ...]
"""For each Matrix of a plan, the pieces of it that this rank stores."""


@dataclass
class Slot:
    """One parameter in one step.

    Attributes:
        name: Canonical name.
        tensor: The parameter as the user holds it, possibly a DTensor.
        state: Its entry in the optimizer's state.
        gradient: Local part of its gradient, contiguous, or None; a partial one as the DTensor that it is.
        group: Number of its group.
        storage: Where it lives.
        place: Where its momentum lives.
        matrices: How many matrices its tensor holds, those of other parameters in a flat tensor too.
    """

    name: str
    tensor: Tensor
    state: dict[str, Any]
    gradient: Tensor | None
    group: int
    storage: Storage
    place: Storage
    matrices: int


@dataclass(frozen=True)
class Precision:
    """The dtypes of one optimizer: of orthogonalisation and wire, of the momentum, of fp32 masters or None."""

    compute: torch.dtype
    state: torch.dtype
    master: torch.dtype | None


@dataclass
class Flags:
    """What all ranks agreed on before anything was written.

    Attributes:
        nonzero: For each Matrix whether any rank has a non-zero gradient in it: booleans, or where the host
            does not wait for them (CUDA) 0-d bool tensors.
        present: For each Muon parameter whether any rank has a gradient.
        skip: Whether some rank says that this step changes nothing.
        overflow: Whether some rank's GradScaler has found an overflow: a 0-d bool tensor.
        only_creates_state: Whether this is the step by which torch's checkpoint code creates state: learning
            rate 0 and every gradient exactly zero.
        stop: 0-d bool tensor, true if some rank found an error or skips, which the host does not know yet; None on
            CPU.
    """

    nonzero: list[bool] | list[Tensor]
    present: list[bool]
    overflow: Tensor
    skip: bool = False
    only_creates_state: bool = False
    stop: Tensor | None = None


class Sums:
    """Sums of squares of one step's updates by group, for `Muon.metrics`."""

    def __init__(self) -> None:
        self._squares: dict[int, list[Tensor]] = {}

    def add(self, group: int, squares: Tensor) -> None:
        """Add to a group's sum, from any thread."""
        self._squares.setdefault(group, []).append(squares)

    def of(self, group: int) -> Tensor | None:
        """Return a group's sum, 0-d fp64, or None if nothing was added."""
        squares = self._squares.get(group)
        return torch.stack(squares).sum() if squares else None


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
        meanwhile: Callable[[], None],
        sums: Sums | None,
    ) -> None:
        self._plan = plan
        self._holdings = holdings
        self._slots = {number: slot for number, slot in enumerate(slots) if slot is not None}
        self._rules = {number: rule for number, rule in enumerate(rules) if rule is not None}
        self._device = device
        self._flags = flags
        self._precision = precision
        self.meanwhile = meanwhile
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
            elif slot.place is not slot.storage:
                slot.gradient = _restricted(slot.gradient, slot.storage, slot.place)

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


def create_state(slot: Slot, precision: Precision) -> None:
    """Create the momentum, the running norms of `clip` and the master of a Muon parameter where missing."""
    local = local_of(slot.tensor)
    if "momentum_buffer" not in slot.state:
        shape = local.shape if slot.place is slot.storage else local_shape(slot.place)
        zeros = torch.zeros(shape, dtype=precision.state, device=local.device)
        slot.state["momentum_buffer"] = slot.place.wrap(zeros)
    for key in RUNNING:  # always, so that a checkpoint has something to be loaded into
        if key not in slot.state:
            slot.state[key] = torch.zeros(running_shape(slot.matrices), dtype=torch.float32, device=local.device)
    _create_master(slot, precision)


def running_shape(matrices: int) -> tuple[int, ...]:
    """Return the shape of a tensor's running norms: 0-d for a single matrix, as AdamW's step count."""
    return () if matrices == 1 else (matrices,)


def _create_master(slot: Slot, precision: Precision) -> None:
    local = local_of(slot.tensor)
    if precision.master is not None and precision.master != local.dtype and "master" not in slot.state:
        slot.state["master"] = slot.storage.wrap(local.detach().to(precision.master).contiguous())


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


def holdings_of(plan: Plan, rank: int, *, state: bool) -> Holdings:
    """Return for each Matrix of a plan the pieces of it that ``rank`` stores, or stores the momentum of."""
    found = []
    for assignment in plan.assignments:
        parameter = plan.parameters[assignment.parameter]
        found.append(tuple(pieces(parameter.source if state else parameter.target, rank, assignment.matrix)))
    return tuple(found)


def nonzero_on_host(plan: Plan, holdings: Holdings, slots: Sequence[Slot | None]) -> list[int]:
    """Return for each Matrix whether this rank's gradient has a non-zero (or NaN) element in it."""
    found = []
    for assignment, parts in zip(plan.assignments, holdings, strict=True):
        gradient = _gradient(slots[assignment.parameter])
        found.append(int(gradient is not None and any(_any_nonzero(view_of(gradient, piece)) for piece in parts)))
    return found


def nonzero_on_device(plan: Plan, holdings: Holdings, slots: Sequence[Slot | None], device: torch.device) -> Tensor:
    """Return the same as a uint8 tensor, without waiting for the device."""
    numbers, views = [], []
    for number, (assignment, parts) in enumerate(zip(plan.assignments, holdings, strict=True)):
        gradient = _gradient(slots[assignment.parameter])
        if gradient is not None:
            numbers += [number] * len(parts)
            views += [view_of(gradient, piece) for piece in parts]
    found = torch.zeros(len(plan.assignments), dtype=torch.uint8, device=device)
    if views:
        norms = torch.stack([norm.float() for norm in torch._foreach_norm(views, float("inf"))])
        index = torch.tensor(numbers).to(device, non_blocking=True)
        found.index_add_(0, index, (norms != 0).to(torch.uint8))
    return found.clamp_(max=1)


def _gradient(slot: Slot | None) -> Tensor | None:
    return None if slot is None or slot.gradient is None else local_of(slot.gradient)


def _any_nonzero(view: Tensor) -> bool:
    flat = view.view(-1) if view.is_contiguous() else view.reshape(-1)
    if flat.numel() <= _PROBE:
        return bool(flat.any())
    return bool(flat[:_PROBE].any()) or bool(flat.any())


def adamw_step(slots: Sequence[Slot], rule: AdamWRule, precision: Precision, flags: Flags) -> None:
    """Step one AdamW group with torch's own AdamW on what this rank stores.

    Moments have the dtype of the weights they move: the parameter's, or the master's.
    """
    weights, gradients, means, squares, steps, masters = [], [], [], [], [], []
    fused = slots[0].tensor.device.type == "cuda"
    for slot in slots:
        _create_master(slot, precision)
        weight = slot.state.get("master", slot.tensor)
        if "step" not in slot.state:
            local = local_of(weight)
            slot.state["step"] = torch.zeros((), dtype=torch.float32, device=local.device if fused else "cpu")
            slot.state["exp_avg"] = slot.storage.wrap(torch.zeros_like(local))
            slot.state["exp_avg_sq"] = slot.storage.wrap(torch.zeros_like(local))
        if slot.gradient is None:
            continue
        weights.append(local_of(weight))
        gradients.append(slot.gradient.to(weights[-1].dtype))
        means.append(local_of(slot.state["exp_avg"]))
        squares.append(local_of(slot.state["exp_avg_sq"]))
        steps.append(slot.state["step"])
        if "master" in slot.state:
            masters.append((local_of(slot.tensor), weights[-1]))
    if flags.only_creates_state or not weights:
        return
    lr = rule.lr
    if isinstance(lr, Tensor) and lr.device.type == "cpu":
        lr = float(lr)
    beta1, beta2 = rule.betas
    adamw(
        weights,
        gradients,
        means,
        squares,
        [],
        steps,
        foreach=not fused,
        fused=fused,
        found_inf=flags.stop.float() if fused and flags.stop is not None else None,
        amsgrad=False,
        maximize=False,
        beta1=beta1,
        beta2=beta2,
        lr=lr,
        weight_decay=rule.weight_decay,
        eps=rule.eps,
    )
    for parameter, master in masters:
        parameter.copy_(master)


def _contiguous(local: Tensor) -> Tensor:
    return local if local.is_contiguous() else local.contiguous()


def view_of(storage: Tensor, piece: Piece) -> Tensor:
    """Return the elements of a contiguous local storage that a piece names."""
    if piece.storage_start == 0 and piece.shape == storage.shape:
        return storage  # the common case: the whole of what is stored
    start = storage.storage_offset() + piece.storage_start
    return storage.as_strided(piece.shape, piece.storage_strides, start)


def _mask(flag: bool | Tensor) -> Tensor | None:
    return flag if isinstance(flag, Tensor) else None
