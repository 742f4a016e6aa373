"""CompanionExchange: brings the numbers that rules keep by row, column or matrix to the owners, and back after a step.

These numbers are few beside the elements of the matrices, so all of them travel at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from muonmesh.comm.passage import Passage
from muonmesh.comm.views import memory_of, view_in_matrix
from muonmesh.comm.wire import Swap, Wire
from muonmesh.comm.work import CompanionState
from muonmesh.layout.companion_plan import CompanionPlan
from muonmesh.layout.routes import Leg


@dataclass
class CompanionExchange:
    """Gathers the numbers of each matrix to its owner, and scatters them to all ranks that store them.

    One `Wire.swap` each way with unequal splits, unless nothing leaves its rank.

    Attributes:
        carried: The plan by which these numbers travel.
        wire: To the other ranks.
        dtype: Dtype of all that travels.
        device: Where it is.
    """

    carried: CompanionPlan
    wire: Wire
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def _ways(self) -> list[tuple[Passage, bool]]:
        """What travels to the owners, and back, each with whether any rank sends some of it."""
        plan, found = self.carried.plan, []
        for name, moves in (("gather", plan.gathers(0)), ("scatter", plan.scatters(0))):
            routes = plan.routes(0, self.wire.rank, gather=name == "gather")
            found.append((Passage(name, routes.stored, routes.assembled, self.wire.rank, self.wire.peers), moves))
        return found

    @cached_property
    def _owned(self) -> dict[int, Tensor]:
        """The numbers of each matrix that this rank owns, by their assignment; zeros until something arrives."""
        assignments = self.carried.plan.assignments
        return {
            number: torch.zeros(assignment.matrix.numel, dtype=self.dtype, device=self.device)
            for number, assignment in enumerate(assignments)
            if assignment.owner == self.wire.rank
        }

    def gather(self, state: CompanionState) -> None:
        """Bring what is kept to the owners, and give it to their state; all ranks call it."""
        passage, moves = self._ways[0]
        for leg in passage.stored.get(self.wire.rank, ()):
            self._read(state, leg, view_in_matrix(leg.piece, self._owned[leg.assignment]))
        if moves:
            swap = self._swap(passage, "the gather of what rules keep")
            for leg, view in passage.on_wire(swap.send):
                self._read(state, leg, view)
            self.wire.finish(self.wire.swap(swap))
            for numbers, view in passage.copies(self._owned, swap.receive):
                numbers.copy_(view)
        kept: dict[int, dict[str, Tensor]] = {}
        for number, numbers in self._owned.items():
            assignment, companion = self.carried.of[number]
            kept.setdefault(assignment, {})[companion.key] = numbers
        state.take(kept)

    def scatter(self, state: CompanionState) -> None:
        """Bring what the owners have made of it to all ranks that store it; all ranks call it."""
        passage, moves = self._ways[1]
        for leg in passage.stored.get(self.wire.rank, ()):
            self._write(state, leg, view_in_matrix(leg.piece, self._owned[leg.assignment]))
        if moves:
            swap = self._swap(passage, "the scatter of what rules keep")
            for numbers, view in passage.copies(self._owned, swap.send):
                view.copy_(numbers)
            self.wire.finish(self.wire.swap(swap))
            for leg, view in passage.on_wire(swap.receive):
                self._write(state, leg, view)

    def _swap(self, passage: Passage, what: str) -> Swap:
        send, receive = (memory_of(n, self.dtype, self.device) for n in (passage.sends, passage.receives))
        return passage.swap(what, send, receive)

    def _read(self, state: CompanionState, leg: Leg, into: Tensor) -> None:
        assignment, companion = self.carried.of[leg.assignment]
        state.read(assignment, companion.key, leg.piece, into)

    def _write(self, state: CompanionState, leg: Leg, numbers: Tensor) -> None:
        assignment, companion = self.carried.of[leg.assignment]
        state.write(assignment, companion.key, leg.piece, numbers)
