"""StoredFactored: state of rules by row, column or matrix. RuleSums: sums of rules over whole matrices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from muonmesh.comm.step_callbacks import FactoredCallbacks, SumCallbacks
from muonmesh.comm.storage import local_of
from muonmesh.comm.views import view_in_storage
from muonmesh.layout import Piece
from muonmesh.layout.factored_state import size_of
from muonmesh.layout.piece_table import Row
from muonmesh.numerics.exact import largest_exponent, limbs_of
from muonmesh.numerics.rules import parts
from muonmesh.step.parameter_steps import ROUNDED, WEIGHTS, MatrixStep
from muonmesh.step.parameters import ReadyParameters


@dataclass
class StoredFactored(FactoredCallbacks):
    """The factored states of one step (numbers by row, column or matrix), which `FactoredExchange` reads and writes.

    Attributes:
        ready: The parameters of the step.
        owned: The factored states of the matrices that this rank owns, by assignment and key.
    """

    ready: ReadyParameters
    owned: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)

    def read(self, assignment: int, key: str, piece: Piece, into: Tensor) -> None:
        """Write a matrix's factored state (this rank's piece) into ``into``; zeros if there is no state here."""
        entry = self.ready.of(assignment).entry
        if entry.created:
            into.copy_(view_in_storage(local_of(entry.state[key]), piece))
        else:
            into.zero_()

    def take(self, received: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Keep the received factored states of the matrices that this rank owns, by assignment and key."""
        self.owned = received

    @contextmanager
    def of(self, matrix_step: MatrixStep) -> Iterator[dict[str, Tensor]]:
        """Yield the factored states of a matrix that this rank owns, by key; a part of its rule writes them in place.

        If the gradient is zero, the state must not change. This method then restores state that lives at the owner, and
        `write` skips state that travels.
        """
        matrix, flag, entry = matrix_step.matrix, matrix_step.nonzero, matrix_step.entry
        factored_states, at_owner = {}, dict[str, Tensor]()
        for key, state_layout in entry.member.state_layouts.items():
            if state_layout.factored is None:
                continue
            size = (1, *size_of(state_layout.kept_as, matrix.rows, matrix.cols))
            if not state_layout.factored.at_owner:
                factored_states[key] = self.owned[matrix_step.number][key].view(size)
            elif entry.created:
                start = state_layout.factored.starts[matrix.index]
                view = entry.state[key][start : start + math.prod(size)].view(size)
                # The bits of products depend on the address modulo 64 bytes, which depends on other owned matrices.
                if flag is True and view.data_ptr() % 64 == 0:
                    factored_states[key] = view
                else:
                    at_owner[key], factored_states[key] = view, view.clone()
            else:
                factored_states[key] = torch.zeros(size, dtype=self.ready.precision.carried, device=self.ready.device)
        yield factored_states
        for key, stored in at_owner.items():
            if isinstance(flag, Tensor):
                stored.copy_(torch.where(flag, factored_states[key], stored))
            elif flag:
                stored.copy_(factored_states[key])

    def write(self, assignment: int, key: str, piece: Piece, numbers: Tensor) -> None:
        """Write back a piece of the factored state that its rule has changed, unless the matrix stays unchanged."""
        matrix_step = self.ready.of(assignment)
        if not matrix_step.changes:
            return
        stored, mask = view_in_storage(local_of(matrix_step.entry.state[key]), piece), matrix_step.mask
        stored.copy_(numbers if mask is None else torch.where(mask, numbers, stored))


@dataclass
class RuleSums(SumCallbacks):
    """The sums over whole matrices in one step, for the rules that need them.

    Attributes:
        ready: The parameters of the step.
        factored_states: State of rules by row, column or matrix.
        unsuited: By assignment, whether a matrix does not suit its rule, 0-d bool tensor.
        sums: By assignment its sums, and the state that its rule keeps as one number for the matrix.
    """

    ready: ReadyParameters
    factored_states: StoredFactored
    unsuited: dict[int, Tensor] = field(default_factory=dict)
    sums: dict[int, tuple[tuple[Tensor, ...], Mapping[str, Tensor]]] = field(default_factory=dict)

    def sums_of(self, assignment: int) -> tuple[tuple[Tensor, ...], Mapping[str, Tensor]]:
        """Return the sums over a matrix, and the state that its rule keeps as one number; empty if it takes none."""
        return self.sums.get(assignment, ((), {}))

    def exponents(self, row: Row, update: Tensor, into: Tensor) -> None:
        """Write the largest exponent of a row's summands, for each sum of its rule."""
        largest = [torch.stack([*map(largest_exponent, summands)]) for summands in self._summands(row, update)]
        if largest:
            into.copy_(torch.stack(largest).amax(0))

    def limbs(self, row: Row, update: Tensor, exponents: Tensor, into: Tensor) -> None:
        """Write the contribution of a row's elements to each sum of its rule."""
        limbs = partial(limbs_of, count=self.ready.of(row.assignment).matrix.numel)
        totals = [torch.stack([*map(limbs, summands, exponents)]) for summands in self._summands(row, update)]
        if totals:
            into.copy_(torch.stack(totals).sum(0))

    def _summands(self, row: Row, update: Tensor) -> Iterator[list[Tensor]]:
        """Yield the summands of a row, of some elements at a time; none if its matrix stays unchanged."""
        matrix_step = self.ready.of(row.assignment)
        if matrix_step.changes:
            state = dict(matrix_step.weights(row.piece).tensors)
            weights, rounded = state.pop(WEIGHTS), state.pop(ROUNDED, None)
            if rounded is not None:
                parts.follow(weights, rounded)
            yield from parts.summands(matrix_step.kind.rule, weights, update, state, scale=matrix_step.kind.scale)

    def tell(self, assignment: int, into: Tensor) -> None:
        """Write the state that a rule keeps as one number for a matrix, if this rank owns the matrix."""
        factored_states = self.factored_states.owned.get(assignment, {})
        for key, number in zip(self.ready.plan.keys_with_sums(assignment), into.unbind(), strict=True):
            if key in factored_states:
                number.copy_(factored_states[key].view(()))

    def take(self, assignment: int, sums: Tensor, numbers: Tensor) -> None:
        """Store the sums and the one-number state of a matrix for `sums_of`, and let the rule update its state."""
        keys, values = self.ready.plan.keys_with_sums(assignment), sums.unbind()
        self.sums[assignment] = values, dict(zip(keys, numbers.unbind(), strict=True))
        if (matrix_step := self.ready.find(assignment)) is None:
            return
        rule, factored_states = matrix_step.kind.rule, self.factored_states.owned.get(assignment, {})
        if all(key in factored_states for key in keys):
            rule.keep(MappingProxyType({key: factored_states[key].view(()) for key in keys}), values)
        unsuited, flag = rule.unsuited(values), matrix_step.nonzero
        if unsuited is not None and flag is not False:  # an unchanged matrix has no sums
            self.unsuited[assignment] = unsuited if flag is True else unsuited & flag
