"""CompanionExchange: sends state by row, column or matrix to the owners of the matrices, and back after a step.

This state is small compared with the matrices, so all of it travels at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from muonmesh.comm.passage import Passage
from muonmesh.comm.views import in_buffer
from muonmesh.comm.wire import Wire
from muonmesh.comm.work import CompanionState
from muonmesh.layout import Piece, Plan
from muonmesh.layout.companion_plan import CompanionPlan
from muonmesh.layout.piece_table import NOWHERE


def ways_of(plan: Plan, rank: int, peers: Sequence[int]) -> dict[str, tuple[Passage, bool]]:
    """Return the passages "gather" (to the owners) and "scatter" (back), each with whether any rank sends anything."""
    moves = {"gather": plan.gathers(0), "scatter": plan.scatters(0)}
    routes = {name: plan.routes(0, rank, gather=name == "gather") for name in moves}
    return {name: (Passage(name, routes[name], rank, peers), moves[name]) for name in moves}


@dataclass
class CompanionExchange:
    """Gathers the companions of each matrix to its owner, and scatters them to all ranks that store them.

    A companion is state of a rule by row, column or matrix. It travels by one `Wire.swap` with unequal splits in each
    direction, unless nothing has to leave its rank.

    Attributes:
        carried: The plan for the companions.
        wire: Sends to the other ranks.
        dtype: Dtype of the companions on the wire.
        device: The device of the companions.
    """

    carried: CompanionPlan
    wire: Wire
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def _ways(self) -> dict[str, tuple[Passage, bool]]:
        return ways_of(self.carried.plan, self.wire.rank, self.wire.peers)

    @cached_property
    def _owned(self) -> dict[int, Tensor]:
        """The companions of matrices that this rank owns, by assignment in the companion plan; zeros at first."""
        assignments = self.carried.plan.assignments
        return {
            number: torch.zeros(assignment.matrix.numel, dtype=self.dtype, device=self.device)
            for number, assignment in enumerate(assignments)
            if assignment.owner == self.wire.rank
        }

    def gather(self, state: CompanionState) -> None:
        """Send all companions to their owners, and pass them to ``state`` there. All ranks call this."""
        self._move("gather", state.read)
        kept: dict[int, dict[str, Tensor]] = {}
        for number, numbers in self._owned.items():
            assignment, companion = self.carried.of[number]
            kept.setdefault(assignment, {})[companion.key] = numbers
        state.take(kept)

    def scatter(self, state: CompanionState) -> None:
        """Send the companions that the owners have changed to all ranks that store them. All ranks call this."""
        self._move("scatter", state.write)

    def _move(self, name: str, stored: Callable[[int, str, Piece, Tensor], None]) -> None:
        """Move the companions in one direction; ``stored`` reads or writes the pieces that this rank stores."""
        (passage, moves), gathers = self._ways[name], name == "gather"
        rows = [row.in_matrix(row.assignment, 0) for row in passage.stored.get(self.wire.rank, ())]
        send, receive = (
            torch.empty(n, dtype=self.dtype, device=self.device) for n in (passage.sends, passage.receives)
        )
        swap = passage.swap(f"the {name} of what rules keep", send, receive)
        copies = passage.copies(self._owned, receive if gathers else send)
        if moves and not gathers:
            for numbers, view in copies:
                view.copy_(numbers)
            self.wire.finish(self.wire.swap(swap))
        buffers = {**self._owned, NOWHERE: send if gathers else receive}
        for row in rows + passage.on_wire(NOWHERE):
            assignment, companion = self.carried.of[row.assignment]
            stored(assignment, companion.key, row.piece, in_buffer(buffers[row.buffer], row))
        if moves and gathers:
            self.wire.finish(self.wire.swap(swap))
            for numbers, view in copies:
                numbers.copy_(view)
