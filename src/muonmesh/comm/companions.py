"""CompanionExchange: brings the numbers that rules keep by row, column or matrix to the owners, and back after a step.

These numbers are few beside the elements of the matrices, so all of them travel at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from muonmesh.comm.passage import Passage, in_matrices
from muonmesh.comm.views import memory_of
from muonmesh.comm.wire import Wire
from muonmesh.comm.work import CompanionState
from muonmesh.layout import Piece
from muonmesh.layout.companion_plan import CompanionPlan


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
    def _ways(self) -> dict[str, tuple[Passage, bool]]:
        """What travels to the owners, and back, each with whether any rank sends some of it."""
        plan, found = self.carried.plan, {}
        for name, moves in (("gather", plan.gathers(0)), ("scatter", plan.scatters(0))):
            routes = plan.routes(0, self.wire.rank, gather=name == "gather")
            found[name] = Passage(name, routes.stored, routes.assembled, self.wire.rank, self.wire.peers), moves
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
        self._move("gather", state.read)
        kept: dict[int, dict[str, Tensor]] = {}
        for number, numbers in self._owned.items():
            assignment, companion = self.carried.of[number]
            kept.setdefault(assignment, {})[companion.key] = numbers
        state.take(kept)

    def scatter(self, state: CompanionState) -> None:
        """Bring what the owners have made of it to all ranks that store it; all ranks call it."""
        self._move("scatter", state.write)

    def _move(self, name: str, stored: Callable[[int, str, Piece, Tensor], None]) -> None:
        """Move what is kept; ``stored`` reads what this rank stores of it, or writes that."""
        (passage, moves), gathers = self._ways[name], name == "gather"
        ends = in_matrices(passage.stored.get(self.wire.rank, ()), self._owned)
        send, receive = (memory_of(n, self.dtype, self.device) for n in (passage.sends, passage.receives))
        swap = passage.swap(f"the {name} of what rules keep", send, receive)
        copies = passage.copies(self._owned, receive if gathers else send)
        if moves and not gathers:
            for numbers, view in copies:
                view.copy_(numbers)
            self.wire.finish(self.wire.swap(swap))
        for leg, view in ends + passage.on_wire(send if gathers else receive):
            assignment, companion = self.carried.of[leg.assignment]
            stored(assignment, companion.key, leg.piece, view)
        if moves and gathers:
            self.wire.finish(self.wire.swap(swap))
            for numbers, view in copies:
                numbers.copy_(view)
