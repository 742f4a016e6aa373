"""Muon's half of one step on a device: few launches for pieces of many matrices, and the host waits for nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from muonmesh.comm.storage import local_of
from muonmesh.comm.views import view_in_matrix
from muonmesh.comm.work import Ends, Local
from muonmesh.numerics.coefficients import coefficient_set, for_rows
from muonmesh.numerics.kernels import select
from muonmesh.numerics.kernels.memory import upload
from muonmesh.numerics.newton_schulz import orthogonalize, room_for
from muonmesh.numerics.rules import together
from muonmesh.numerics.rules.together import Factors, Folded, Updated, Wholes
from muonmesh.step.adjacent import adjacent_matrices
from muonmesh.step.muon import MuonStep, values_of
from muonmesh.step.slots import view_in_storage

_MOMENTUM = "momentum_buffer"

_LARGE = 1 << 26
"""Elements of a matrix from which on its memory counts for more than the launches of a product by panels."""


class MuonStepTogether(MuonStep):
    """`MuonStep` on a device: what is done element by element is done to all pieces of a bucket at once.

    Gradients are folded into the momenta and directions written in one pass where what is stored is also what is read,
    which it nearly always is.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what `MuonStep` takes."""
        super().__init__(*args, **kwargs)
        nonzero = self._flags.nonzero
        if not isinstance(nonzero, Tensor):  # the host has waited
            nonzero = upload(nonzero, dtype=torch.bool, device=self._device)
        self._active = nonzero
        self._unfolded: list[int] = []
        self._factors: dict[int, Factors] = {}

    def prepare(self, assignments: Sequence[int]) -> None:
        """Create missing state; the gradients are folded when the matrices are read, unless momentum is coded."""
        if self._blocks is not None:
            super().prepare(assignments)
            return
        self._collect_arrived(assignments)
        self._unfolded += [number for number in assignments if self._plan.assignments[number].parameter in self._ready]

    def read(self, ends: Ends) -> None:
        """Fold the gradients of what was prepared, and write the directions of legs' elements."""
        found: dict[object, Folded] = {}
        for number in self._unfolded:
            ready = self._ready[self._plan.assignments[number].parameter]
            if ready.gradient is None or ready.momenta is None:
                continue
            for piece in self._holdings[number]:
                views = values_of(ready.momenta, number, piece)
                found[number, piece] = Folded(view_in_storage(ready.gradient, piece), views, number, True, None)
        self._unfolded = []
        for leg, into in ends:
            ready, key = self._ready[leg.parameter], (leg.assignment, leg.piece)
            if ready.gradient is None or ready.momenta is None:  # no replica has had a gradient so far
                into.zero_()
            elif (known := found.get(key)) is not None and known.into is None:
                found[key] = Folded(known.gradient, known.state, known.matrix, True, into)
            else:
                gradient, views = (
                    view_in_storage(ready.gradient, leg.piece),
                    values_of(ready.momenta, leg.assignment, leg.piece),
                )
                found[key, len(found)] = Folded(gradient, views, leg.assignment, False, into)
        by_group: dict[int, list[Folded]] = {}
        for folded in found.values():
            by_group.setdefault(self._group(folded.matrix), []).append(folded)
        for group, pieces in by_group.items():
            pieces.sort(key=lambda piece: not piece.folds)  # what is only read has been folded then
            together.fold(pieces, self._factors_of(group))
        self._have_read()

    def run_local(self, alike: Sequence[Sequence[Local]]) -> None:
        """Take matrices that nobody else has through the whole step, a batch of equal ones at a time."""
        batches: list[Sequence[Local]] = []
        for some in alike:
            shape = self._plan.assignments[some[0].assignment].matrix.shape
            size = 1 if shape[0] * shape[1] >= _LARGE else self._at_once(len(some), shape)
            if self._copies is not None:
                size = min(size, self._copies.at_once(shape[0] * shape[1]))
            batches += [some[start : start + size] for start in range(0, len(some), size)]
        for number, batch in enumerate(batches):
            for after in batches[number + 1 : number + 2]:
                self.fetch([local.assignment for local in after])
            self._local(batch)

    def _local(self, batch: Sequence[Local]) -> None:
        numbers = [local.assignment for local in batch]
        shape = self._plan.assignments[numbers[0]].matrix.shape
        if len(batch) == 1 and shape[0] * shape[1] >= _LARGE and self._local_in_room(batch):
            return
        x = torch.empty((len(batch), *shape), dtype=self._precision.compute, device=self._device)
        out = torch.empty_like(x)
        if (wholes := self._wholes(batch, x)) is not None:
            factors = self._factors_of(self._group(numbers[0]))
            together.fold_wholes(wholes, _as_stored(batch, x), factors)
            self._orthogonalize(x, out, numbers)
            together.apply_wholes(wholes, _as_stored(batch, out), factors)
            return
        self.prepare(numbers)
        self.read(_ends(batch, x, read=True))
        self._orthogonalize(x, out, numbers)
        ends = _ends(batch, out, read=False)
        if asked := self._plan.summed(numbers):
            self._alone.take(asked, ends, self)
        self.write(ends)

    def _local_in_room(self, batch: Sequence[Local]) -> bool:
        """`_local` of one large matrix in little more memory than it takes; False if it must take the general way."""
        (number,) = numbers = [local.assignment for local in batch]
        rule, (rows, cols) = self._rule(number), self._plan.assignments[number].matrix.shape
        # Of these kernels alone it is known that panels have the bits of the whole, which another layout may multiply.
        kernels = select(
            self._precision.kernels, device=self._device, dtype=self._precision.compute, rows=rows, cols=cols
        )
        more = (
            kernels.normalize is None
            or rule.balances()
            or rule.changes_matrices()
            or not coefficient_set(for_rows(rule.coefficients, rule.steps, rows)[0]).begins_with_polynomials
        )
        if more or not rule.orthogonalizes:
            return False
        room, x = room_for(rows, cols, dtype=self._precision.compute, device=self._device)
        wholes, factors = self._wholes(batch, x), self._factors_of(self._group(number))
        if wholes is None:
            return False
        together.fold_wholes(wholes, _as_stored(batch, x), factors)
        out = orthogonalize(
            x,
            coefficients=rule.coefficients,
            steps=rule.steps,
            method=rule.method,
            dtype=self._precision.compute,
            kernels=self._precision.kernels,
            times=self._steps_of(numbers),
            room=room,
        )
        together.apply_wholes(wholes, _as_stored(batch, out), factors)
        return True

    def _wholes(self, batch: Sequence[Local], like: Tensor) -> Wholes | None:
        """Return a batch of matrices that are stored in order here, with their state; None if one is not.

        Small matrices mostly are, and take the host longer than the device. The general way takes the others, and all
        if more is asked for than weights and momentum.
        """
        group = self._group(batch[0].assignment)
        asked = (self._blocks, self._copies, self._update_squares) != (None, None, None)
        if asked or not self._factors_of(group).fuses:
            return None
        (_, rows, cols), runs = like.shape, adjacent_matrices(self._plan, batch)
        found = Wholes([], [], [], [], [local.assignment for local in batch])
        apart = len(batch) == 1 or any(run.stored == "transposed" for run in runs)
        for run in runs:
            slot = self._slots[run.parameter]
            if slot is None or run.stored == "in pieces" or slot.gradient is None or slot.group != group:
                return None
            state, weights = slot.state, local_of(slot.tensor)
            if slot.state_layouts.keys() != {_MOMENTUM} or not weights.is_contiguous():
                return None
            if not slot.is_complete(self._precision):
                self._create(run.parameter, slot)
            tensors = [slot.gradient, local_of(state[_MOMENTUM]), weights]
            if "master" in state:
                tensors.append(local_of(state["master"]))
            # The common case, of a parameter that is one matrix, needs no other view of it.
            alone = run.count == 1 and weights.ndim == 2
            as_they_are = weights.numel() == run.count * rows * cols and (alone or not apart)
            shape = (cols, rows) if run.stored == "transposed" else (rows, cols)
            for some, tensor in zip(found.kept, tensors, strict=False):
                some += (tensor,) if as_they_are else run.of(tensor, shape, apart=apart)
        return found if len(found.masters) in (0, len(found.weights)) and found.can_fuse(like) else None

    def _steps_of(self, assignments: Sequence[int]) -> Tensor | None:
        """Return what the results of matrices are multiplied by, (n,), where they arrive as steps."""
        if self._every_step is None:
            return None
        return together.of_each(assignments, self._every_step)[0][:, 0]

    def write(self, ends: Ends) -> None:
        """Decay and update legs' elements, unless their matrix is left alone."""
        by_group: dict[int, list[Updated]] = {}
        for leg, update in ends:
            ready = self._ready[leg.parameter]
            if not ready.slot.created:  # no replica has had a gradient so far, so nothing is to be written
                continue
            _, weights, beside, scale = self._written(leg)
            rounded = None if ready.master is None else view_in_storage(ready.weights, leg.piece)
            sums, told = self._matrix_sums.get(leg.assignment, ((), {}))
            copies = 1 if self._update_squares is None else ready.slot.storage.copies
            piece = Updated(weights, update, beside, leg.assignment, scale, rounded, sums, told, copies)
            by_group.setdefault(ready.slot.group, []).append(piece)
        for group, pieces in by_group.items():
            squares = together.apply(pieces, self._factors_of(group), measured=self._update_squares is not None)
            if self._update_squares is not None and squares is not None:
                self._update_squares.add(group, squares)
        self._have_written(ends)

    def _factors_of(self, group: int) -> Factors:
        if group not in self._factors:
            rule = self._rules[group]
            assert rule is not None
            self._factors[group] = Factors(rule, self._active, self._every_scale, only_zeros=self._flags.only_zeros)
        return self._factors[group]

    @cached_property
    def _every_scale(self) -> Tensor:
        """The update scale of each matrix, fp64 (n,), in one copy; 0 for what this rank does not store."""
        found = []
        for number, assignment in enumerate(self._plan.assignments):
            slot = self._slots[assignment.parameter]
            rule = None if slot is None else self._rules[slot.group]
            found.append(0.0 if slot is None or rule is None else self._scale(number, slot.group, rule))
        return upload(found, dtype=torch.float64, device=self._device)

    @cached_property
    def _every_step(self) -> Tensor | None:
        """What the result of each matrix is multiplied by before it travels, (n,), fp32 or wider; None: by nothing.

        By its step where that is all that its weights need of it (`together.Factors.arrives`), else by 1.
        """
        slots = [self._slots[assignment.parameter] for assignment in self._plan.assignments]
        groups = sorted({slot.group for slot in slots if slot is not None})
        if not any(self._factors_of(group).arrives for group in groups):
            return None
        steps = [self._factors_of(group).step for group in groups]
        if len(groups) > 1:
            rows = [0 if slot is None else groups.index(slot.group) for slot in slots]
            steps = [torch.stack(steps).gather(0, upload([rows], dtype=torch.int64, device=self._device))[0]]
        return steps[0].to(torch.promote_types(self._precision.compute, torch.float32))

    def _group(self, assignment: int) -> int:
        slot = self._slot(assignment)
        assert slot is not None
        return slot.group


def _ends(batch: Sequence[Local], matrices: Tensor, *, read: bool) -> Ends:
    return tuple(
        (leg, view_in_matrix(leg.piece, matrix))
        for local, matrix in zip(batch, matrices.unbind(), strict=True)
        for leg in (local.read if read else local.write)
    )


def _as_stored(batch: Sequence[Local], matrices: Tensor) -> Sequence[Tensor]:
    """Return a batch as its matrices are stored: as one tensor or, if one is transposed or alone, as one each."""
    if len(batch) > 1 and all(local.stored == "as it is" for local in batch):
        return (matrices,)
    return [
        matrix.mT if local.stored == "transposed" else matrix
        for local, matrix in zip(batch, matrices.unbind(), strict=True)
    ]
