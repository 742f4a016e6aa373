"""DeviceCopies: state that lies on the host, on the device for as long as a step of Muon's half needs it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from muonmesh.comm.storage import local_of, this_rank
from muonmesh.comm.work import Ends
from muonmesh.layout import Plan
from muonmesh.step.offload import DeviceCopy, Offload
from muonmesh.step.planning import Holdings
from muonmesh.step.slots import Slot


class DeviceCopies:
    """Momentum is needed until all matrices of its tensor have been read, other state until all have been written.

    What comes and goes is the state of a tensor as this rank stores it: a stack of experts or a flat buffer at once.

    Args:
        offload: Moves it.
        plan: Who orthogonalises what.
        holdings: For each Matrix the pieces whose momentum is stored here.
        slots: The parameters of the plan, as it numbers them.
    """

    def __init__(self, offload: Offload, plan: Plan, holdings: Holdings, slots: Sequence[Slot | None]) -> None:
        self._offload, self._plan, self._slots = offload, plan, slots
        self._copies: dict[Tensor, DeviceCopy] = {}
        self._unread: dict[Tensor, set[int]] = {}  # assignments
        self._unwritten: dict[Tensor, int] = {}  # elements
        self._numbers: dict[Tensor, list[int]] = {}  # parameters
        rank = this_rank()
        for parameter, slot in enumerate(slots):
            if slot is not None and slot.storage.layout is not None:
                stored = sum(math.prod(block.region.shape) for block in slot.storage.layout.blocks(rank))
                self._unwritten[slot.tensor] = self._unwritten.get(slot.tensor, 0) + stored
                self._numbers.setdefault(slot.tensor, []).append(parameter)
        for number, assignment in enumerate(plan.assignments):
            held = slots[assignment.parameter]
            if held is not None and holdings[number]:
                self._unread.setdefault(held.tensor, set()).add(number)

    def at_once(self, numel: int) -> int:
        """Return how many matrices of so many elements have their state on the device at once."""
        return max(1, self._offload.elements // numel)

    def take(self, slots: Iterable[Slot]) -> None:
        """Begin to bring the state of parameters that have not been brought in this step, which has been created."""
        wanted = {slot.tensor: slot for slot in slots if slot.tensor not in self._copies}
        if wanted:
            self._offload.turn()
        for tensor, slot in wanted.items():
            shaped = [key for key, home in slot.state_layouts.items() if home.companion is None]
            keys = [key for key in (*shaped, "master") if key in slot.state]
            self._copies[tensor] = self._offload.bring({key: local_of(slot.state[key]) for key in keys})

    def values(self, slot: Slot) -> Mapping[str, Tensor]:
        """Return what was brought of a parameter's state, by key; it may not have arrived."""
        return self._copies[slot.tensor].values

    def arrive(self, slots: Iterable[Slot]) -> None:
        """Let what is computed from now on wait for the state of parameters that has been taken."""
        for slot in slots:
            self._offload.arrive(self._copies[slot.tensor])

    def have_read(self, assignments: Iterable[int]) -> Iterator[int]:
        """Give the momentum back of what nobody reads any more: the gradients of these matrices have been folded in.

        Yields:
            Parameters whose momentum is gone from the device.
        """
        for number in assignments:
            slot = self._slots[self._plan.assignments[number].parameter]
            if slot is None or slot.tensor not in self._unread:
                continue
            unread = self._unread[slot.tensor]
            unread.discard(number)
            if not unread:
                self._offload.give_back(self._copies[slot.tensor], _momentum(slot))
                yield from self._numbers[slot.tensor]

    def have_written(self, ends: Ends) -> Iterator[int]:
        """Give the rest back of what nobody writes any more; yields the parameters whose state is gone."""
        for leg, _ in ends:
            slot = self._slots[leg.parameter]
            assert slot is not None
            self._unwritten[slot.tensor] -= leg.piece.numel
            if self._unwritten[slot.tensor] == 0:
                copy = self._copies[slot.tensor]
                self._offload.give_back(copy, [key for key in copy.values if key not in _momentum(slot)])
                yield from self._numbers[slot.tensor]

    def finish(self) -> None:
        """Give back what is left."""
        for copy in self._copies.values():
            self._offload.give_back(copy, tuple(copy.values))
        self._offload.end()


def _momentum(slot: Slot) -> list[str]:
    return [key for key, home in slot.state_layouts.items() if home.kept_as == "momentum"]
