"""Muon: its half of one step, what is done to the matrices between the exchange's moves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from muonmesh.comm.matrix_sums import MatrixSums
from muonmesh.comm.storage import Storage, local_of, local_shape, this_rank
from muonmesh.comm.views import contiguous, view_in_matrix
from muonmesh.comm.work import Ends, Local
from muonmesh.layout import Layout, Piece, Plan, overlap
from muonmesh.layout.routes import Leg
from muonmesh.numerics.kernels import select
from muonmesh.numerics.kernels.memory import scratch
from muonmesh.numerics.kernels.threads import run_all
from muonmesh.numerics.newton_schulz import orthogonalize
from muonmesh.numerics.rules import Rule, parts
from muonmesh.settings import Precision
from muonmesh.step.adjacent import adjacent_matrices
from muonmesh.step.blocks import Blocks, Momentum
from muonmesh.step.device_copies import DeviceCopies
from muonmesh.step.flags import Flags
from muonmesh.step.offload import Offload
from muonmesh.step.planning import Holdings
from muonmesh.step.slots import Slot, create_state, view_in_storage
from muonmesh.step.stack import SMALL, Stack
from muonmesh.step.update_squares import UpdateSquares

_AT_ONCE_ON_A_DEVICE = 1 << 28
"""Elements of equal matrices that one task orthogonalises on a device, where each call has the whole device. On a CPU
the number of threads and the kernels say how many (`MuonStep._at_once`)."""

_WORTH_A_THREAD = 1 << 18
"""Elements of equal matrices from which on threads share them out; below, waiting for each other's Python costs more
[measured]."""


class _Ready(NamedTuple):
    """A `Slot` made ready for the pieces of its matrices: each tensor is local and contiguous, as pieces index it.

    Attributes:
        slot: Where it comes from.
        rule: The rule of its group.
        weights: The parameter, or a copy of one that is not contiguous, which `MuonStep.finish` writes back.
        momenta: What the rule keeps as "momentum", by key; gradients are folded into it in place, or into what its
            codes stand for. None if there is no state: no rank has ever had a gradient. Where the host does not
            wait for the flags, this rank has not, and the parameter is no shard of which another rank may have one.
        beside: What the rule keeps as "weights", by key, written in place together with them.
        gradient: Of the elements whose momentum is stored here; zeros where only this rank has none. None if
            ``momenta`` is.
        master: The master copy of the weights, written in place and then rounded to them; None if there is none.
    """

    slot: Slot
    rule: Rule
    weights: Tensor
    momenta: Mapping[str, Tensor | Momentum] | None
    beside: dict[str, Tensor]
    gradient: Tensor | None
    master: Tensor | None


class MuonStep:
    """The Muon half of one step on a CPU: what the exchange reads, computes and writes (`muonmesh.comm.work.Work`).

    Everything is done piece by piece in the local storage, read as a contiguous array; a storage that is not
    contiguous is worked on in a contiguous copy that `finish` writes back. On a device `MuonStepTogether` replaces the
    elementwise parts of this class.

    Args:
        plan: Who orthogonalises what.
        holdings: For each Matrix the pieces whose momentum is stored here (`Planned.momentum_holdings`).
        slots: The parameters of the plan, as it numbers them; None for one that only other ranks hold.
        rules: For each param group the snapshot of its rule; None for AdamW's groups.
        flags: What all ranks agreed on.
        precision: The optimizer's dtypes.
        device: Where the parameters are.
        step_elementwise: AdamW's half, which the exchange calls while the first matrices travel.
        update_squares: To which the squares of the updates are added, if `Muon.metrics` has asked for them.
        blocks: Those of momentum in int8; None where it is kept in a floating-point dtype.
        offload: Brings state that lies on the host; None where it is with the parameters.
    """

    def __init__(
        self,
        plan: Plan,
        holdings: Holdings,
        slots: Sequence[Slot | None],
        rules: Sequence[Rule | None],
        flags: Flags,
        precision: Precision,
        *,
        device: torch.device,
        step_elementwise: Callable[[], None],
        update_squares: UpdateSquares | None,
        blocks: Blocks | None = None,
        offload: Offload | None = None,
    ) -> None:
        self._plan = plan
        self._copies = None if offload is None else DeviceCopies(offload, plan, holdings, slots)
        self._prepared: list[int] = []
        self._blocks = blocks
        self._agreed: Tensor | None = None
        self._coded: dict[tuple[Tensor, str], Momentum] = {}  # a flat tensor has one for all its parameters
        self._holdings = holdings
        self._slots = slots
        self._rules = rules
        self._device = device
        self._flags = flags
        self._nonzero: Sequence[bool] | Tensor = flags.nonzero
        self._precision = precision
        self.step_elementwise = step_elementwise
        self._update_squares = update_squares
        self._ready: dict[int, _Ready] = {}  # by parameter; filled before threads read it
        self._kept_of_owned: Mapping[int, Mapping[str, Tensor]] = {}
        self._scales: dict[tuple[int, int, int], float] = {}
        self._alone = MatrixSums(plan, rank=this_rank(), device=device)
        # By assignment: sums over it that its rule asks for, and what that keeps of the matrix as one number.
        self._matrix_sums: dict[int, tuple[tuple[Tensor, ...], Mapping[str, Tensor]]] = {}
        self.unsuited: dict[int, Tensor] = {}  # by assignment: whether it does not suit its rule, 0-d bool

    def fetch(self, assignments: Sequence[int]) -> None:
        """Begin to bring the state of these matrices' parameters, where it lies on the host."""
        if self._copies is not None:
            self._collect(assignments)

    def prepare(self, assignments: Sequence[int]) -> None:
        """Create missing state and fold the gradients into the momenta of these matrices."""
        self._collect_arrived(assignments)
        here = [number for number in assignments if self._plan.assignments[number].parameter in self._ready]
        run_all([functools.partial(self._fold, number) for number in here], device=self._device)

    def _collect(self, assignments: Iterable[int]) -> None:
        """Collect in ``_ready`` what this rank stores of the parameters of these matrices; each parameter once a step.

        State that is missing is created here. A rank that stores nothing of a matrix may be asked all the same. State
        that lies on the host may be on its way when this returns; `_collect_arrived` waits for it.
        """
        wanted = dict.fromkeys(self._plan.assignments[assignment].parameter for assignment in assignments)
        fresh = {n: slot for n in wanted if (slot := self._slots[n]) is not None and n not in self._ready}
        for number, slot in fresh.items():
            self._create(number, slot)
        if self._copies is not None:
            self._copies.take(fresh.values())
        for number, slot in fresh.items():
            rule = self._rules[slot.group]
            assert rule is not None
            here: Mapping[str, Tensor] = {} if self._copies is None else self._copies.values(slot)
            gradient, master = slot.gradient, here.get("master", slot.state.get("master"))
            momenta: Mapping[str, Tensor | Momentum] | None = None
            if slot.created:
                momenta = slot.kept_as("momentum")
                momenta = {key: here.get(key, kept) for key, kept in momenta.items()} if here else momenta
            if momenta is not None and self._blocks is not None:
                momenta = {key: self._momentum(slot, key, self._blocks) for key in momenta}
            if momenta is not None:
                if gradient is None:  # missing on this shard only: counts as zero
                    shape = local_shape(slot.momentum_storage)
                    gradient = torch.zeros(shape, dtype=self._precision.state, device=self._device)
                elif slot.momentum_storage is not slot.gradient_storage:
                    gradient = _restricted(gradient, slot.storage, slot.momentum_storage)
            local = local_of(slot.tensor)
            weights = local if local.is_contiguous() else local.contiguous()
            master = None if master is None else local_of(master)
            beside = slot.kept_as("weights")
            beside = {key: here.get(key, kept) for key, kept in beside.items()} if here else beside
            self._ready[number] = _Ready(slot, rule, weights, momenta, beside, gradient, master)

    def _create(self, number: int, slot: Slot) -> None:
        """Create the state of a parameter that is missing, if it may have a gradient."""
        if not slot.is_complete(self._precision) and (self._flags.present[number] or self._another_may_have(slot)):
            create_state(slot, self._precision)

    def _collect_arrived(self, assignments: Iterable[int]) -> None:
        """`_collect`, and let what is computed from now on wait for state that is on its way."""
        numbers = list(assignments)
        self._collect(numbers)
        if self._copies is not None:
            self._copies.arrive(slot for slot in map(self._slot, numbers) if slot is not None)
            self._prepared += numbers

    def _slot(self, assignment: int) -> Slot | None:
        return self._slots[self._plan.assignments[assignment].parameter]

    def _have_read(self) -> None:
        """Give the momentum back of what was prepared, where it lies on the host."""
        if self._copies is not None:
            for number in self._copies.have_read(self._prepared):
                if number in self._ready:  # of a flat buffer it may be a parameter of which nothing is here
                    self._ready[number] = self._ready[number]._replace(momenta={})
            self._prepared = []

    def _have_written(self, ends: Ends) -> None:
        """Give the other state back of what is written, likewise."""
        if self._copies is not None:
            for number in self._copies.have_written(ends):
                if number in self._ready:
                    self._ready[number] = self._ready[number]._replace(beside={}, master=None)

    def _momentum(self, slot: Slot, key: str, blocks: Blocks) -> Momentum:
        """Return what is kept in int8 under a key; what was loaded in another dtype is encoded in this step."""
        place = slot.tensor, key
        if place not in self._coded:
            local = local_of(slot.state[key])
            found = Momentum.of(blocks, slot.name, slot.tensor, key, local, slot.state)
            if found.codes is not local:
                slot.state[key] = slot.state_layouts[key].storage.wrap(found.codes)
            self._coded[place] = found
        return self._coded[place]

    def measure_blocks(self, into: Tensor) -> None:
        """Write the largest momenta of the blocks that ranks share, as they will be after this step."""
        assert self._blocks is not None
        self._collect(self._blocks.shared)
        for number in self._blocks.shared:
            ready = self._ready.get(self._plan.assignments[number].parameter)
            if ready is None or ready.momenta is None:
                continue
            for piece in self._holdings[number]:
                values = self._folded(number, piece)
                for key, kept in ready.momenta.items():
                    assert isinstance(kept, Momentum)
                    kept.measure(number, piece, values[key], into)
        self._agreed = into

    def _another_may_have(self, slot: Slot) -> bool:
        """Whether the gradient of another shard may make the whole matrix move, for all that this rank knows.

        Where the host waits, ``flags.present`` says whether any rank has a gradient. Where it does not wait, that says
        only whether this rank has one. So a shard has its state from the first step on, and its writes are masked on
        the device. Replicas all have a gradient, or none of them has.
        """
        layout = slot.storage.layout
        return self._flags.stop is not None and layout is not None and slot.storage.copies < len(layout.ranks)

    def _fold(self, assignment: int) -> None:
        """Fold the gradient of a matrix into the momentum that is stored here, unless the matrix is left alone."""
        ready = self._ready[self._plan.assignments[assignment].parameter]
        if ready.gradient is None or ready.momenta is None:
            return
        coded = [kept for kept in ready.momenta.values() if isinstance(kept, Momentum)]
        if self._nonzero[assignment] is False and all(kept.loaded is None for kept in coded):
            return
        # All pieces before any is written: some may share a block, whose old scale is gone then.
        folded = [(piece, self._folded(assignment, piece)) for piece in self._holdings[assignment]]
        for piece, values in folded:
            for key, kept in ready.momenta.items():
                if isinstance(kept, Momentum):
                    kept.write(assignment, piece, values[key], self._agreed)

    def _folded(self, assignment: int, piece: Piece) -> dict[str, Tensor]:
        """Return the momentum of a piece, by key, with its gradient folded in: views of it, or what codes stand for."""
        ready, flag = self._ready[self._plan.assignments[assignment].parameter], self._nonzero[assignment]
        assert ready.momenta is not None
        assert ready.gradient is not None
        values = values_of(ready.momenta, assignment, piece)
        if flag is not False:
            parts.fold(ready.rule, view_in_storage(ready.gradient, piece), values, active=_mask(flag))
        return values

    def run_local(self, alike: Sequence[Sequence[Local]]) -> None:
        """Take matrices that nobody else has through the whole step, a batch of equal ones in each task.

        What one operation leaves in the cache the next one finds there. In bf16 each task has a thread of its own, so
        no thread waits for another; see `_run`.
        """
        tasks: list[tuple[int, Callable[[], None]]] = []
        for some in alike:
            self._collect_arrived(matrix.assignment for matrix in some)
            assignment = self._plan.assignments[some[0].assignment]
            size = self._at_once(len(some), assignment.matrix.shape)
            for stored in _by_storage(some):
                for start in range(0, len(stored), size):
                    batch = stored[start : start + size]
                    tasks.append((assignment.flops * len(batch), functools.partial(self._local, batch)))
        self._run(tasks)
        self._have_read()

    def _local(self, batch: Sequence[Local]) -> None:
        matrix = self._plan.assignments[batch[0].assignment].matrix
        x, out = (
            scratch(role, (len(batch), *matrix.shape), dtype=self._precision.compute, device=self._device)
            for role in ("matrices", "results")
        )
        if (stack := self._stack(batch)) is not None:
            stack.fold(x)
            self._orthogonalize(x, out, [matrix.assignment for matrix in batch])
            stack.apply(out)
            return
        for local, target in zip(batch, x.unbind(), strict=True):
            if self._blocks is not None:
                self._fold(local.assignment)
            for leg in local.read:
                self._read(leg, view_in_matrix(leg.piece, target), fold=self._blocks is None)
        self._orthogonalize(x, out, [matrix.assignment for matrix in batch])
        for local, result in zip(batch, out.unbind(), strict=True):
            ends = tuple((leg, view_in_matrix(leg.piece, result)) for leg in local.write)
            if asked := self._plan.summed([local.assignment]):
                self._alone.take(asked, ends, self)
            for leg, update in ends:
                self._write(leg, update)

    def _stack(self, batch: Sequence[Local]) -> Stack | None:
        """Return small matrices, to be worked on side by side; None where they are large, alone, or not alike."""
        first, asked = batch[0], (self._blocks, self._copies, self._update_squares) != (None, None, None)
        planned = self._plan.assignments[first.assignment]
        if asked or len(batch) == 1 or planned.matrix.numel > SMALL or first.stored == "in pieces":
            return None
        if self._plan.summed([first.assignment]) or any(self._nonzero[some.assignment] is not True for some in batch):
            return None
        rows, cols = planned.matrix.shape
        shape = (cols, rows) if first.stored == "transposed" else (rows, cols)
        group, found = self._ready[planned.parameter].slot.group, None
        for run in adjacent_matrices(self._plan, batch):
            ready = self._ready[run.parameter]
            if ready.gradient is None or ready.momenta is None or ready.slot.group != group or not ready.slot.created:
                return None
            scale = self._scale(run.assignment, group, ready.rule)
            if found is None:
                found = Stack(ready.rule, scale, first.stored == "transposed")
            if scale != found.scale:
                return None
            weights, rounded = (ready.weights, {}) if ready.master is None else (ready.master, {"": ready.weights})
            found.add(
                run,
                shape,
                gradient={"": ready.gradient},
                momenta=cast("Mapping[str, Tensor]", ready.momenta),  # not coded, or it was asked for
                weights={"": weights},
                beside=ready.beside,
                rounded=rounded,
            )
        return found if found is not None and found.is_alike(len(batch)) else None

    def read(self, ends: Ends) -> None:
        """Write the directions of legs' elements, after `prepare`."""
        run_all([functools.partial(self._read, leg, into) for leg, into in ends], device=self._device)
        self._have_read()

    def _read(self, leg: Leg, into: Tensor, *, fold: bool = False) -> None:
        """Write the direction of a leg's elements; ``fold`` folds their gradient into the momentum on the way."""
        ready, piece = self._ready[leg.parameter], leg.piece
        if ready.momenta is None:  # without state no gradient has ever been folded in, so the direction is zero
            into.zero_()
            return
        assert ready.gradient is not None
        values, gradient = values_of(ready.momenta, leg.assignment, piece), view_in_storage(ready.gradient, piece)
        flag = self._nonzero[leg.assignment]
        if fold and flag is not False:
            parts.fold(ready.rule, gradient, values, active=_mask(flag), into=into)
        else:
            parts.write_direction(ready.rule, gradient, values, into)

    def read_kept(self, assignment: int, key: str, piece: Piece, into: Tensor) -> None:
        """Write what a rule keeps by row, column or matrix; zeros if there is no state here."""
        slot = self._slot(assignment)
        assert slot is not None
        self._create(self._plan.assignments[assignment].parameter, slot)  # and take no more than these numbers
        if slot.created:
            into.copy_(view_in_storage(local_of(slot.state[key]), piece))
        else:
            into.zero_()

    def take_kept(self, kept: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Take what is kept of the matrices that this rank owns."""
        self._kept_of_owned = kept

    def write_kept(self, assignment: int, key: str, piece: Piece, numbers: Tensor) -> None:
        """Keep the numbers by row, column or matrix that `Rule.whole` has changed, unless the matrix is left alone."""
        flag, slot = self._nonzero[assignment], self._slot(assignment)
        assert slot is not None
        if flag is False or not slot.created:
            return
        kept = view_in_storage(local_of(slot.state[key]), piece)
        kept.copy_(numbers if flag is True else torch.where(flag, numbers, kept))

    def orthogonalize(self, batches: Sequence[tuple[Tensor, Tensor, Sequence[int]]]) -> None:
        """Orthogonalise batches (matrices, results, their assignments)."""
        tasks: list[tuple[int, Callable[[], None]]] = []
        for batch, out, assignments in batches:
            size = self._at_once(len(batch), (batch.shape[1], batch.shape[2]))
            flops = self._plan.assignments[assignments[0]].flops
            for start in range(0, len(assignments), size):
                some = slice(start, start + size)
                task = functools.partial(self._orthogonalize, batch[some], out[some], assignments[some])
                tasks.append((flops * len(assignments[some]), task))
        self._run(tasks)

    def _at_once(self, count: int, shape: tuple[int, int]) -> int:
        """Return how many of ``count`` equal matrices are orthogonalised by one task."""
        rows, cols = sorted(shape)
        if self._device.type != "cpu":
            return max(1, _AT_ONCE_ON_A_DEVICE // (rows * cols))
        kernels = select(
            self._precision.kernels, device=self._device, dtype=self._precision.compute, rows=rows, cols=cols
        )
        threads = 1 if count * rows * cols < _WORTH_A_THREAD else torch.get_num_threads()
        turns = -(-count // (threads * kernels.at_once))  # of each thread, so that all have equally many
        return max(1, -(-count // (threads * turns)))

    def _run(self, tasks: Sequence[tuple[int, Callable[[], None]]]) -> None:
        """Run (cost, task) pairs, the costliest first: in bf16 each on a thread of its own (`run_all` says when not).

        In fp32 and fp64 the bits of a product depend on how many threads share it. There the tasks are run one after
        the other, each on all threads, so that they do not depend on how many tasks there are.
        """
        tasks = sorted(tasks, key=lambda task: -task[0])
        ordered = [task for _, task in tasks]
        if self._precision.compute == torch.bfloat16 and ordered:
            run_all(ordered, device=self._device, costs=[cost for cost, _ in tasks])
        else:
            for task in ordered:
                task()

    def _orthogonalize(self, batch: Tensor, out: Tensor, assignments: Sequence[int]) -> None:
        rule = self._rule(assignments[0])
        if rule.balances():
            for assignment, matrix in zip(assignments, batch.unbind(), strict=True):
                own, planned = self._rule(assignment), self._plan.assignments[assignment].matrix
                parts.balance_whole(own, matrix, rows=planned.rows, cols=planned.cols)
        if rule.orthogonalizes:
            orthogonalize(
                batch,
                coefficients=rule.coefficients,
                steps=rule.steps,
                method=rule.method,
                dtype=self._precision.compute,
                kernels=self._precision.kernels,
                out=out,
                overwrite=True,
                times=self._steps_of(assignments),
            )
        else:
            out.copy_(batch)
        if rule.changes_matrices():
            for assignment, matrix in zip(assignments, out.unbind(), strict=True):
                own, planned = self._rule(assignment), self._plan.assignments[assignment].matrix
                kept = self._kept_of_owned.get(assignment, {})
                parts.change_whole(own, matrix, kept, rows=planned.rows, cols=planned.cols)

    def _steps_of(self, assignments: Sequence[int]) -> Tensor | None:
        """Return what results are multiplied by before they travel; None: each rank multiplies what it writes."""
        return None

    def _rule(self, assignment: int) -> Rule:
        slot = self._slot(assignment)
        assert slot is not None
        rule = self._rules[slot.group]
        assert rule is not None
        return rule

    def exponents(self, leg: Leg, update: Tensor, into: Tensor) -> None:
        """Write the largest exponent of a leg's elements in each sum that its rule asks for."""
        if self._changes(leg):
            rule, weights, beside, scale = self._written(leg)
            into.copy_(parts.exponents(rule, weights, update, beside, scale=scale))

    def limbs(self, leg: Leg, update: Tensor, exponents: Tensor, into: Tensor) -> None:
        """Write what a leg's elements add to these sums."""
        if self._changes(leg):
            rule, weights, beside, scale = self._written(leg)
            count = self._plan.assignments[leg.assignment].matrix.numel
            into.copy_(parts.limbs(rule, weights, update, beside, exponents, scale=scale, count=count))

    def write_told(self, assignment: int, into: Tensor) -> None:
        """Write what is kept of a matrix as one number, if this rank owns it."""
        kept = self._kept_of_owned.get(assignment, {})
        for key, number in zip(self._plan.told(assignment), into.unbind(), strict=True):
            if key in kept:
                number.copy_(kept[key].view(()))

    def take_sums(self, assignment: int, sums: Tensor, told: Tensor) -> None:
        """Take the sums over a matrix and what is kept of it, for what writes it; keep what the rule makes of them."""
        keys, found = self._plan.told(assignment), sums.unbind()
        self._matrix_sums[assignment] = found, dict(zip(keys, told.unbind(), strict=True))
        if self._slots[self._plan.assignments[assignment].parameter] is None:
            return
        rule, kept = self._rule(assignment), self._kept_of_owned.get(assignment, {})
        if all(key in kept for key in keys):
            rule.keep({key: kept[key].view(()) for key in keys}, found)
        unsuited, flag = rule.unsuited(found), self._nonzero[assignment]
        if unsuited is not None and flag is not False:  # of a matrix that is left alone nothing is added up
            self.unsuited[assignment] = unsuited if flag is True else unsuited & flag

    def write(self, ends: Ends) -> None:
        """Decay and update legs' elements, unless their matrix is left alone."""
        run_all([functools.partial(self._write, leg, update) for leg, update in ends], device=self._device)
        self._have_written(ends)

    def _write(self, leg: Leg, update: Tensor) -> None:
        if not self._changes(leg):
            return
        update, flag = contiguous(update), self._nonzero[leg.assignment]
        rule, weights, beside, scale = self._written(leg)
        ready = self._ready[leg.parameter]
        squares: list[Tensor] | None = None if self._update_squares is None else []
        sums, told = self._matrix_sums.get(leg.assignment, ((), {}))
        active = _mask(flag)
        parts.apply(rule, weights, update, beside, scale=scale, active=active, sums=sums, told=told, squares=squares)
        if ready.master is not None:
            view_in_storage(ready.weights, leg.piece).copy_(weights)
        if self._update_squares is not None and squares is not None:
            self._update_squares.add(ready.slot.group, torch.stack(squares).sum() / ready.slot.storage.copies)

    def _changes(self, leg: Leg) -> bool:
        """Whether a leg's elements may change: there is state, and the host does not know that the matrix stays."""
        return self._nonzero[leg.assignment] is not False and self._ready[leg.parameter].slot.created

    def _written(self, leg: Leg) -> tuple[Rule, Tensor, dict[str, Tensor], float]:
        """Return what a leg's elements are written with.

        Returns:
            The rule; the weights to change, which are the master where there is one; what the rule keeps beside them;
            and the update scale of the whole matrix: `Rule.apply` is given its product with ``lr`` as ``size``.
        """
        ready = self._ready[leg.parameter]
        weights = ready.weights if ready.master is None else ready.master
        scale = self._scale(leg.assignment, ready.slot.group, ready.rule)
        return ready.rule, view_in_storage(weights, leg.piece), views_of(ready.beside, leg.piece), scale

    def _scale(self, assignment: int, group: int, rule: Rule) -> float:
        """Return the update scale of the whole matrix; there are few shapes and many legs."""
        matrix = self._plan.assignments[assignment].matrix
        key = group, matrix.rows, matrix.cols
        found = self._scales.get(key)
        if found is None:
            found = self._scales[key] = rule.scale(matrix.rows, matrix.cols)
        return found

    def finish(self) -> None:
        """Write back the storages that were worked on in a copy, and create the state of what was not worked on.

        A rank may hold an empty shard, of which it has nothing to fold or to write. Its state is empty too, but
        checkpoints look for it on every rank.
        """
        for ready in self._ready.values():
            local = local_of(ready.slot.tensor)
            if ready.weights is not local:
                local.copy_(ready.weights)
        for number, slot in enumerate(self._slots):
            if slot is None or number in self._ready or not self._flags.present[number]:
                continue
            if not slot.is_complete(self._precision):
                create_state(slot, self._precision)
        if self._copies is not None:
            self._copies.finish()


def _by_storage(some: Sequence[Local]) -> list[list[Local]]:
    """Return matrices that are stored alike, together."""
    found: dict[str, list[Local]] = {}
    for local in some:
        found.setdefault(local.stored, []).append(local)
    return list(found.values())


def _layout(storage: Storage) -> Layout:
    assert storage.layout is not None  # only AdamW steps parameters of which nobody said where they live
    return storage.layout


def _restricted(local: Tensor, storage: Storage, place: Storage) -> Tensor:
    """Return the elements of a local tensor whose momentum this rank stores, in the order of the momentum.

    Where replicas share the momentum (``shard_state``), each of them has the whole gradient of its shard and keeps the
    momentum of a part of it.

    Args:
        local: Laid out as ``storage`` says, contiguous.
        storage: Where the parameter lives.
        place: Where its momentum lives; this rank stores nothing there that it does not store in ``storage``.
    """
    rank = this_rank()
    own = torch.zeros(local_shape(place), dtype=local.dtype, device=local.device)
    first = local.storage_offset()  # of a gradient that is a view into a bucket of DDP's or FSDP2's
    for target in _layout(place).blocks(rank):
        for block in _layout(storage).blocks(rank):
            shared = overlap(block, target)  # ``matrix_*`` of this Piece are places in the momentum
            if shared is not None:
                part = local.as_strided(shared.shape, shared.storage_strides, first + shared.storage_start)
                own.as_strided(shared.shape, shared.matrix_strides, shared.matrix_start).copy_(part)
    return own


def views_of(kept: Mapping[str, Tensor], piece: Piece) -> dict[str, Tensor]:
    """Return the elements that a piece names of each contiguous local storage."""
    return {key: view_in_storage(value, piece) for key, value in kept.items()}


def values_of(momenta: Mapping[str, Tensor | Momentum], assignment: int, piece: Piece) -> dict[str, Tensor]:
    """Return the momentum of a piece of a matrix: views of it, or what its codes stand for."""
    return {
        key: kept.read(assignment, piece) if isinstance(kept, Momentum) else view_in_storage(kept, piece)
        for key, kept in momenta.items()
    }


def _mask(flag: bool | Tensor) -> Tensor | None:
    return flag if isinstance(flag, Tensor) else None
