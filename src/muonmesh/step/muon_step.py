"""MuonStep: the step of Muon's parameters: the work on matrices before, between and after the transfers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from muonmesh.comm.views import Elements
from muonmesh.comm.work import Local, Work
from muonmesh.numerics.kernels.recording import run_again
from muonmesh.numerics.kernels.triton_launch import is_watched
from muonmesh.numerics.rules import parts
from muonmesh.step.by_kernel import ByKernel, Repeatable
from muonmesh.step.by_parts import ByParts
from muonmesh.step.int8_codec import Int8Codec
from muonmesh.step.offload import DeviceCopies, Offload
from muonmesh.step.planning import Planned
from muonmesh.step.ready import ReadyParameters
from muonmesh.step.stored_companions import RuleSums, StoredCompanions


class MuonStep(Work):
    """The step of Muon's parameters: reads, computes and writes for the exchange (`muonmesh.comm.work.Work`).

    Pieces are views of the local storage, read as a contiguous array. If a storage is not contiguous, the step works on
    a contiguous copy. One kernel takes all pieces of a table if it can (`ByKernel`). The parts of the rule take all
    others (`ByParts`).

    Args:
        planned: The plan.
        ready: The parameters of the step. While they last, the same object takes one step after the other.
        offload: Copies state from CPU memory and back; None if state is on the device of the parameters.

    Attributes:
        ready: The parameters of the step.
        companions: State of rules by row, column or matrix.
        summands: The sums that rules take over matrices.
    """

    companions: StoredCompanions
    summands: RuleSums

    def __init__(self, planned: Planned, ready: ReadyParameters, offload: Offload | None = None) -> None:
        if ready.precision.int8:
            ready.codec = Int8Codec(planned.blocks, ready.find)
        elif offload is not None:
            ready.codec = DeviceCopies(offload, planned, ready.entries)
        self.ready, self._by_kernel, self._by_parts = ready, ByKernel.where_usable(ready), ByParts(ready)
        self._elementwise: Sequence[Callable[[], None]] = ()
        self._recordings: dict[Hashable, Any] = {}
        self._places: dict[Local, tuple[list[int], Repeatable | None, object]] = {}

    def begin(self, elementwise: Sequence[Callable[[], None]]) -> None:
        """Begin a step of parameters that are ready.

        Args:
            elementwise: One function for each group of an elementwise rule, such as AdamW's; called while the first
                matrices travel.
        """
        self._elementwise, companions = elementwise, StoredCompanions(self.ready)
        self.companions, self.summands = companions, RuleSums(self.ready, companions)
        if self._by_kernel is not None:
            self._by_kernel.begin()

    def step_elementwise(self) -> None:
        """Step the parameters of elementwise rules, such as AdamW's parameters."""
        for step_group in self._elementwise:
            step_group()

    def prepare(self, assignments: Sequence[int], elements: Elements, ahead: Sequence[int] = ()) -> None:
        """Fold the gradients of matrices into their momenta, and write the directions."""
        codec, folded = self.ready.codec, False
        if codec is not None:
            codec.arrive(assignments, ahead)
            folded = codec.fold(elements.table)  # first, because directions are computed from decoded codes
        rows = elements.table.rows if self._by_kernel is None else self._by_kernel.fold(elements)
        self._by_parts.fold(elements, rows, folded=folded)
        if codec is not None:
            codec.have_read(elements.table)

    def repeat(self, batch: Local, run: Callable[..., object], memory: Sequence[Tensor]) -> None:
        """Run a batch that stays on its rank, or start again what it started on a device in the steps before.

        That is possible if fold, products and apply depend on nothing but the numbers on the device and the addresses
        that `ByKernel` keeps there.
        """
        kernels, ready = self._by_kernel, self.ready
        if kernels is None or ready.version is None or ready.squares is not None or is_watched(*memory):
            run(*memory)
            return
        facts = ready.version, ready.rules, kernels.active
        now = [*map(id, facts), *map(Tensor.data_ptr, memory)]
        last, place, _ = self._places.get(batch, ([], None, ()))
        if last != now:
            place = None
            if self._only_orthogonalizes(batch.assignments[0]):
                place = kernels.located(Elements(batch.reads, memory[:1]), Elements(batch.writes, memory[1:]))
            self._places[batch] = now, place, facts  # which stay alive, so that nothing else takes their identity
        if place is None:
            run(*memory)
        else:
            run_again(self._recordings, run, memory, (batch, place.facts), place.beside)
            torch.autograd.graph.increment_version(place.written)

    def _only_orthogonalizes(self, number: int) -> bool:
        """Whether the kernels between fold and apply are the same in every step."""
        kind = self.ready.of(number).kind
        alone = kind.rule.orthogonalizes and not (kind.balances or kind.changes)
        return alone and kind.orthogonalizer.repeats

    def compute(self, matrices: Sequence[int], batch: Tensor, out: Tensor) -> None:
        """Orthogonalize matrices of one group and shape, including what their rule does before and afterwards."""
        kind = self.ready.of(matrices[0]).kind
        rule = kind.rule
        if kind.balances:
            for number, matrix in zip(matrices, batch.unbind(), strict=True):
                self._change(number, "balance", matrix)
        if rule.orthogonalizes:
            kind.orthogonalizer(batch, out=out, overwrite=not rule.sees_direction)
        else:
            out.copy_(batch)
        if kind.changes:
            for number, direction, matrix in zip(matrices, batch.unbind(), out.unbind(), strict=True):
                self._change(number, "whole", matrix, direction=direction if rule.sees_direction else None)

    def _change(self, number: int, part: str, matrix: Tensor, **seen: Any) -> None:
        """Let a part of the rule of a matrix change it whole, together with its state by row, column or matrix."""
        one = self.ready.of(number)
        with self.companions.of(one) as state:
            rows, cols = one.matrix.rows, one.matrix.cols
            parts.change_whole(getattr(one.rule_in_turn, part), matrix, state, rows=rows, cols=cols, **seen)

    def finalize(self, elements: Elements) -> None:
        """Decay and update the elements of a table, unless their matrix stays unchanged."""
        rows = elements.table.rows if self._by_kernel is None else self._by_kernel.apply(elements)
        self._by_parts.apply(elements, rows, self.summands.sums_of)
        if self.ready.codec is not None:
            self.ready.codec.have_written(elements.table)
