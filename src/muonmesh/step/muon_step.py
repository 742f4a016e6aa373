"""MuonStep: the step of Muon's parameters: the work on matrices before, between and after the transfers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from muonmesh.comm.views import Elements
from muonmesh.comm.work import Work
from muonmesh.numerics.rules import parts
from muonmesh.step.by_kernel import ByKernel
from muonmesh.step.by_parts import ByParts
from muonmesh.step.ready import ReadyParameters
from muonmesh.step.stored_companions import RuleSums, StoredCompanions
from muonmesh.step.update_squares import UpdateSquares


class MuonStep(Work):
    """The step of Muon's parameters: reads, computes and writes for the exchange (`muonmesh.comm.work.Work`).

    Pieces are views of the local storage, read as a contiguous array. If a storage is not contiguous, the step works on
    a contiguous copy. One kernel takes all pieces of a table if it can (`ByKernel`). The parts of the rule take all
    others (`ByParts`).

    Args:
        ready: The parameters of the step.
        elementwise: One function for each group of an elementwise rule, such as AdamW's; called while the first
            matrices travel.
        squares: Adds up the squares of the updates for `Muon.metrics`; None if no metrics are wanted.

    Attributes:
        companions: State of rules by row, column or matrix.
        summands: The sums that rules take over matrices.
    """

    def __init__(
        self,
        ready: ReadyParameters,
        elementwise: Sequence[Callable[[], None]],
        squares: UpdateSquares | None,
    ) -> None:
        self._ready, self._elementwise = ready, elementwise
        self.companions: StoredCompanions = StoredCompanions(ready)
        self.summands: RuleSums = RuleSums(ready, self.companions)
        self._by_kernel = ByKernel.where_usable(ready, squares)
        self._by_parts = ByParts(ready, self.summands.found, squares)

    def step_elementwise(self) -> None:
        """Step the parameters of elementwise rules, such as AdamW's parameters."""
        for step_group in self._elementwise:
            step_group()

    def prepare(self, assignments: Sequence[int], elements: Elements, ahead: Sequence[int] = ()) -> None:
        """Fold the gradients of matrices into their momenta, and write the directions."""
        codec, folded = self._ready.codec, False
        if codec is not None:
            codec.arrive(assignments, ahead)
            folded = codec.fold(elements.table)  # first, because directions are computed from decoded codes
        rows = elements.table.rows if self._by_kernel is None else self._by_kernel.fold(elements)
        self._by_parts.fold(elements, rows, folded=folded)
        if codec is not None:
            codec.have_read(assignments)

    def compute(self, matrices: Sequence[int], batch: Tensor, out: Tensor) -> None:
        """Orthogonalize matrices of one group and shape, including what their rule does before and afterwards."""
        rule, orthogonalizer, *_ = self._ready.of(matrices[0]).kind
        if rule.balances():
            for number, matrix in zip(matrices, batch.unbind(), strict=True):
                one = self._ready.of(number)
                with self.companions.of(one) as kept:
                    parts.change_whole(
                        one.rule_in_turn.balance, matrix, kept, rows=one.matrix.rows, cols=one.matrix.cols
                    )
        if rule.orthogonalizes:
            orthogonalizer(batch, out=out, overwrite=not rule.sees_direction, graphs=self._ready.graphs)
        else:
            out.copy_(batch)
        if rule.changes_matrices():
            for number, direction, matrix in zip(matrices, batch.unbind(), out.unbind(), strict=True):
                one = self._ready.of(number)
                seen = direction if rule.sees_direction else None
                with self.companions.of(one) as kept:
                    parts.change_whole(
                        one.rule_in_turn.whole, matrix, kept, rows=one.matrix.rows, cols=one.matrix.cols, direction=seen
                    )

    def finalize(self, elements: Elements) -> None:
        """Decay and update the elements of a table, unless their matrix stays unchanged."""
        rows = elements.table.rows if self._by_kernel is None else self._by_kernel.apply(elements)
        self._by_parts.apply(elements, rows)
        if self._ready.codec is not None:
            self._ready.codec.have_written(elements.table)
