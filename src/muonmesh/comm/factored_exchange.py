"""FactoredExchange: sends state by row, column or matrix to the owners of the matrices, and back after a step.

This state is small compared with the matrices, so all of it travels at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from muonmesh.comm.communicator import Communicator
from muonmesh.comm.packed_all_to_all import PackedAllToAll
from muonmesh.comm.step_callbacks import FactoredCallbacks
from muonmesh.comm.views import in_buffer
from muonmesh.layout import Piece, Plan
from muonmesh.layout.factored_plan import FactoredPlan
from muonmesh.layout.piece_table import NOWHERE


def directions_of(plan: Plan, rank: int, peers: Sequence[int]) -> dict[str, tuple[PackedAllToAll, bool]]:
    """Return the all-to-alls "gather" (to the owners) and "scatter" (back), and for each whether any rank sends."""
    moves = {"gather": plan.gathers(0), "scatter": plan.scatters(0)}
    routes = {name: plan.routes(0, rank, gather=name == "gather") for name in moves}
    return {name: (PackedAllToAll(name, routes[name], rank, peers), moves[name]) for name in moves}


@dataclass
class FactoredExchange:
    """Gathers the factored states of each matrix to its owner, and scatters them to all ranks that store them.

    They travel by one all-to-all with unequal splits in each direction, unless nothing has to leave its rank. In every
    step, all ranks call `gather` before the first matrix is computed, and `scatter` after the last.

    Attributes:
        carried: The plan for the factored states.
        communicator: Sends to the other ranks.
        dtype: Dtype of the factored states on the wire.
        device: The device of the factored states.
    """

    carried: FactoredPlan
    communicator: Communicator
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def _directions(self) -> dict[str, tuple[PackedAllToAll, bool]]:
        return directions_of(self.carried.plan, self.communicator.rank, self.communicator.peers)

    @cached_property
    def _owned(self) -> dict[int, Tensor]:
        """The factored states of matrices that this rank owns, by assignment in ``carried.plan``; zeros at first."""
        assignments = self.carried.plan.assignments
        return {
            number: torch.zeros(assignment.matrix.numel, dtype=self.dtype, device=self.device)
            for number, assignment in enumerate(assignments)
            if assignment.owner == self.communicator.rank
        }

    def gather(self, state: FactoredCallbacks) -> None:
        """Send all factored states to their owners, and pass them to ``state`` there. All ranks call this."""
        self._move("gather", state.read)
        states_by_assignment: dict[int, dict[str, Tensor]] = {}
        for number, numbers in self._owned.items():
            assignment, factored = self.carried.of[number]
            states_by_assignment.setdefault(assignment, {})[factored.key] = numbers
        state.take(states_by_assignment)

    def scatter(self, state: FactoredCallbacks) -> None:
        """Send the factored states that the owners have changed to all ranks that store them. All ranks call this."""
        self._move("scatter", state.write)

    def _move(self, name: str, stored: Callable[[int, str, Piece, Tensor], None]) -> None:
        """Move the factored states in one direction; ``stored`` reads or writes the pieces that this rank stores."""
        (packed, moves), gathers = self._directions[name], name == "gather"
        rows = [row.in_matrix(row.assignment, 0) for row in packed.stored.get(self.communicator.rank, ())]
        send, receive = (torch.empty(n, dtype=self.dtype, device=self.device) for n in (packed.sends, packed.receives))
        all_to_all = packed.all_to_all(f"the {name} of what rules keep", send, receive)
        copies = packed.copies(self._owned, receive if gathers else send)
        if moves and not gathers:
            for numbers, view in copies:
                view.copy_(numbers)
            self.communicator.finish(self.communicator.start(all_to_all))
        buffers = {**self._owned, NOWHERE: send if gathers else receive}
        for row in rows + packed.on_wire(NOWHERE):
            assignment, factored = self.carried.of[row.assignment]
            stored(assignment, factored.key, row.piece, in_buffer(buffers[row.buffer], row))
        if moves and gathers:
            self.communicator.finish(self.communicator.start(all_to_all))
            for numbers, view in copies:
                numbers.copy_(view)
