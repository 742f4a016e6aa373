"""DeviceStep: the step of Muon's parameters on a device, with few kernel launches and without waits of the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from muonmesh.comm.work import Local
from muonmesh.numerics.kernels import fused
from muonmesh.numerics.kernels.memory import upload
from muonmesh.numerics.kernels.recording import places_of, run_again
from muonmesh.numerics.rules import on_device
from muonmesh.numerics.rules.muon import MuonRule
from muonmesh.numerics.rules.on_device import Factors, Folded, Updated
from muonmesh.step.muon_step import MuonStep, leg_views_of
from muonmesh.step.ready import ReadyParameters
from muonmesh.step.stack import Stack
from muonmesh.step.update_squares import UpdateSquares

_Piece = TypeVar("_Piece", Folded, Updated)

_FUSED = {("gradient", ""), ("momenta", "momentum_buffer"), ("weights", ""), ("rounded", "")}
"""Columns of a `Stack` that the fused kernels can read and write."""


class DeviceStep(MuonStep):
    """A step on a device: each per-element operation takes all pieces of a bucket at once."""

    def __init__(
        self, ready: ReadyParameters, elementwise: Sequence[Callable[[], None]], squares: UpdateSquares | None
    ) -> None:
        super().__init__(ready, elementwise, squares)
        nonzero = ready.nonzero
        if not isinstance(nonzero, Tensor):  # the CPU has waited for the flags
            nonzero = upload(nonzero, dtype=torch.bool, device=ready.device)
        self._active = nonzero
        self._factors: dict[int, Factors] = {}

    def fold(self, pieces: Sequence[Folded]) -> None:
        """Fold the gradients of these pieces into momentum, the pieces of a group together."""
        for group, some in self._by_group(pieces).items():
            on_device.fold(some, self._factors_of(group))

    def apply(self, pieces: Sequence[Updated]) -> None:
        """Decay and update the weights of these pieces, the pieces of a group together."""
        for group, some in self._by_group(pieces).items():
            squares = on_device.apply(some, self._factors_of(group), measured=self._update_squares is not None)
            if self._update_squares is not None and squares is not None:
                self._update_squares.add(group, squares)

    def _by_group(self, pieces: Sequence[_Piece]) -> dict[int, list[_Piece]]:
        found: dict[int, list[_Piece]] = {}
        for piece in pieces:
            found.setdefault(self._ready.group(piece.matrix), []).append(piece)
        return found

    def run_local(self, alike: Sequence[Sequence[Local]]) -> None:
        """Do the whole step of matrices that only this rank holds, one batch of equal matrices at a time."""
        batches: list[Sequence[Local]] = []
        for some in alike:
            shape = self._ready.plan.assignments[some[0].assignment].matrix.shape
            size = self.at_once(len(some), some[0].assignment)
            if self._ready.copies is not None:
                size = min(size, self._ready.copies.at_once(shape[0] * shape[1]))
            batches += [some[start : start + size] for start in range(0, len(some), size)]
        for number, batch in enumerate(batches):
            for after in batches[number + 1 : number + 2]:
                self.fetch([local.assignment for local in after])
            self._local(batch)

    def _local(self, batch: Sequence[Local]) -> None:
        numbers = [local.assignment for local in batch]
        shape = self._ready.plan.assignments[numbers[0]].matrix.shape
        x, out = self._memory(numbers, (len(batch), *shape))
        if (stack := self._stack(batch)) is not None:
            self._run_stack(stack, batch, x, out)
            return
        self.read(numbers, leg_views_of(batch, x, read=True))
        self.orthogonalize_batch(x, out, numbers)
        legs = leg_views_of(batch, out, read=False)
        self.take_sums(numbers, legs)
        self.write(legs)

    def _run_stack(self, stack: Stack, batch: Sequence[Local], x: Tensor, out: Tensor) -> None:
        """Step a stack of matrices; repeat the recorded launches if all its tensors are at the recorded addresses."""
        numbers, rule, factors = stack.matrices, stack.rule, self._factors_of(self._ready.group(stack.matrices[0]))
        orthogonalizer, times = self._ready.orthogonalizer(numbers[0]), self.steps_of(numbers)
        vectors = factors.active, factors.applied(torch.float32)[0], factors.size, times
        given = [x, out, *(vector for vector in vectors if vector is not None)]
        columns = stack.columns.items()
        written = [tensor for (name, _), some in columns if name != "gradient" for tensor in some]
        assert isinstance(rule, MuonRule)  # other rules do not fuse
        key = rule.momentum, rule.nesterov, *places_of(x, out, *stack.columns["gradient", ""], *written)

        def whole(*_: Tensor) -> None:
            self._fold_stack(stack, batch, x)
            orthogonalizer(x, out=out, overwrite=not rule.sees_direction, times=times)
            self._apply_stack(stack, batch, out)

        found = self._ready.recordings.setdefault((numbers[0], len(numbers)), {})
        changes = rule.balances() or rule.changes_matrices() or not rule.orthogonalizes
        if self._ready.graphs is None and orthogonalizer.repeats and not changes:
            run_again(found, whole, given, ("whole", *key))
        else:
            run_again(found, lambda *_: self._fold_stack(stack, batch, x), given, ("fold", *key))
            self.orthogonalize_batch(x, out, numbers)
            run_again(found, lambda *_: self._apply_stack(stack, batch, out), given, ("apply", *key))
        torch.autograd.graph.increment_version(written)

    def _memory(self, numbers: Sequence[int], shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return memory for matrices and their results: the memory of their CUDA graph, if they have a graph."""
        dtype = self._ready.precision.compute
        if self._ready.graphs is not None:
            overwrite, timed = not self._ready.rule(numbers[0]).sees_direction, self._every_step is not None
            key = self._ready.orthogonalizer(numbers[0]).graph_key(shape, dtype, overwrite=overwrite, timed=timed)
            if (found := self._ready.graphs.memory(*key)) is not None:
                return found
        x = torch.empty(shape, dtype=dtype, device=self._ready.device)
        return x, torch.empty_like(x)

    def _stack(self, batch: Sequence[Local]) -> Stack | None:
        """Return a batch as a stack, which one kernel folds and one kernel applies; None if this is not possible.

        It is possible if this rank stores each matrix in order, as most small matrices are; their launches take the CPU
        longer than the device. It is not possible with int8 momentum, state in CPU memory or metrics.
        """
        numbers = [local.assignment for local in batch]
        asked = (self._ready.blocks, self._ready.copies, self._update_squares) != (None, None, None)
        factors = self._factors_of(self._ready.group(numbers[0]))
        if asked or not factors.fuses:
            return None
        self._ready.arrive(numbers)
        stack = Stack.of(self._ready, batch, apart=_are_apart(batch))
        if stack is None or not stack.columns.keys() <= _FUSED:
            return None
        dtypes = {some[0].dtype for some in stack.columns.values()} | {self._ready.precision.compute}
        return stack if fused.can_fuse(self._ready.device, tuple(dtypes)) else None

    def _fold_stack(self, stack: Stack, batch: Sequence[Local], into: Tensor) -> None:
        factors, columns = self._factors_of(self._ready.group(stack.matrices[0])), stack.columns
        gradients, momenta = columns["gradient", ""], columns["momenta", "momentum_buffer"]
        on_device.fold_in_one(gradients, momenta, _as_stored(batch, into), stack.matrices, factors)

    def _apply_stack(self, stack: Stack, batch: Sequence[Local], updates: Tensor) -> None:
        factors, written = self._factors_of(self._ready.group(stack.matrices[0])), stack.columns["weights", ""]
        rounded = stack.columns.get(("rounded", ""))
        weights, masters = (written, ()) if rounded is None else (rounded, written)
        stored = _as_stored(batch, updates)
        on_device.apply_in_one(weights, masters, stored, stack.matrices, factors)

    def steps_of(self, assignments: Sequence[int]) -> Tensor | None:
        """Return the factors by which owners multiply results of matrices before sending, (n,); None: no factor."""
        if self._every_step is None:
            return None
        return on_device.of_each(assignments, self._every_step)[0][:, 0]

    def _factors_of(self, group: int) -> Factors:
        if group not in self._factors:
            rule = self._ready.rules[group]
            assert rule is not None
            only_zeros = self._ready.flags.stop is None  # only a gradient of zeros leaves a matrix unchanged
            self._factors[group] = Factors(rule, self._active, self._every_scale, only_zeros=only_zeros)
        return self._factors[group]

    @cached_property
    def _every_scale(self) -> Tensor:
        """The update scale of each matrix, fp64 (n,), in one copy; 0 for matrices that this rank does not store."""
        known: dict[object, float] = {}  # most matrices are of few shapes
        found = []
        for number, assignment in enumerate(self._ready.plan.assignments):
            entry, kind = self._ready.entries[assignment.parameter], None
            if entry is not None:
                kind = entry.member.group, assignment.matrix.shape
                if kind not in known:
                    known[kind] = self._ready.scale(number)
            found.append(known.get(kind, 0.0))
        return upload(found, dtype=torch.float64, device=self._ready.device)

    @cached_property
    def _every_step(self) -> Tensor | None:
        """The factor by which the owner multiplies each result before sending, (n,), fp32 or wider; None: no factor.

        The factor is the step of the matrix if the weights need nothing else (`on_device.Factors.arrives`), else 1.
        """
        entries = [self._ready.entries[assignment.parameter] for assignment in self._ready.plan.assignments]
        groups = sorted({entry.member.group for entry in entries if entry is not None})
        if not any(self._factors_of(group).arrives for group in groups):
            return None
        steps = [self._factors_of(group).step for group in groups]
        if len(groups) > 1:
            rows = [0 if entry is None else groups.index(entry.member.group) for entry in entries]
            steps = [torch.stack(steps).gather(0, upload([rows], dtype=torch.int64, device=self._ready.device))[0]]
        return steps[0].to(torch.promote_types(self._ready.precision.compute, torch.float32))


def _are_apart(batch: Sequence[Local]) -> bool:
    """Whether kernels get one tensor for each matrix: true if a matrix is stored transposed, or is the only one."""
    return len(batch) == 1 or {local.stored for local in batch} != {"as it is"}


def _as_stored(batch: Sequence[Local], matrices: Tensor) -> Sequence[Tensor]:
    """Return a batch as its matrices are stored: one tensor for all or, if they are apart, one tensor for each."""
    if not _are_apart(batch):
        return (matrices,)
    return [
        matrix.mT if local.stored == "transposed" else matrix
        for local, matrix in zip(batch, matrices.unbind(), strict=True)
    ]
