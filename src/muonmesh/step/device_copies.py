"""DeviceCopies: device copies of state in CPU memory, kept as long as the step of Muon's parameters needs them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from threading import Lock

from torch import Tensor

from muonmesh.comm.storage import local_of, this_rank
from muonmesh.layout import Plan
from muonmesh.layout.piece_table import PieceTable
from muonmesh.step.offload import DeviceCopy, Offload
from muonmesh.step.parameter_steps import ParameterStep
from muonmesh.step.planning import Holdings
from muonmesh.step.ready import StateCodec


class DeviceCopies(StateCodec):
    """Copies the state of parameters to the device for one step, and back to the CPU as early as possible.

    Momentum is needed until all matrices of its tensor have been read. Other state is needed until all of these
    matrices have been written. The state of a whole tensor is copied at once, even of a stack of experts or a flat
    buffer.

    Args:
        offload: Makes the copies.
        plan: The plan with the owner of each matrix.
        holdings: For each Matrix the pieces whose momentum this rank stores.
        entries: The parameters in the order of the plan; None for a parameter that only other ranks hold.
    """

    def __init__(
        self, offload: Offload, plan: Plan, holdings: Holdings, entries: Sequence[ParameterStep | None]
    ) -> None:
        self._lock = Lock()  # a CPU that is told to work in copies has threads
        self._offload, self._plan, self._entries = offload, plan, entries
        self._copies: dict[Tensor, DeviceCopy] = {}
        self._unread: dict[Tensor, set[int]] = {}  # assignments
        self._unwritten: dict[Tensor, int] = {}  # elements
        self._sharing: dict[Tensor, list[ParameterStep]] = {}
        rank = this_rank()
        for entry in entries:
            if entry is not None and entry.member.storage.layout is not None:
                stored = sum(math.prod(block.region.shape) for block in entry.member.storage.layout.blocks(rank))
                self._unwritten[entry.member.tensor] = self._unwritten.get(entry.member.tensor, 0) + stored
                self._sharing.setdefault(entry.member.tensor, []).append(entry)
        for number, assignment in enumerate(plan.assignments):
            held = entries[assignment.parameter]
            if held is not None and holdings[number]:
                self._unread.setdefault(held.member.tensor, set()).add(number)

    def _take(self, numbers: Iterable[int]) -> None:
        """Begin to copy the state of the parameters of matrices to the device, unless this step has copied it."""
        entries = dict.fromkeys(self._plan.assignments[number].parameter for number in numbers)
        some = [entry for n in entries if (entry := self._entries[n]) is not None]
        wanted = {entry.member.tensor: entry for entry in some if entry.member.tensor not in self._copies}
        if wanted:
            self._offload.turn()
        for tensor, entry in wanted.items():
            shaped = [key for key, state_layout in entry.member.state_layouts.items() if state_layout.companion is None]
            keys = [key for key in (*shaped, "master") if key in entry.state]
            self._copies[tensor] = self._offload.bring({key: local_of(entry.state[key]) for key in keys})
            for each in self._sharing[tensor]:
                each.bind(self._copies[tensor].values)

    def arrive(self, numbers: Sequence[int], ahead: Sequence[int]) -> None:
        """Let later computations wait until the state of matrices is copied, and begin to copy that of the next."""
        with self._lock:
            self._take(numbers)
            self._take(ahead)
            for entry in (self._entries[self._plan.assignments[number].parameter] for number in numbers):
                if entry is not None:
                    self._offload.arrive(self._copies[entry.member.tensor])

    def have_read(self, numbers: Iterable[int]) -> None:
        """Note that the gradients of these matrices are folded in; copy momentum back to the CPU where all are."""
        with self._lock:
            for number in numbers:
                entry = self._entries[self._plan.assignments[number].parameter]
                if entry is None or entry.member.tensor not in self._unread:
                    continue
                unread = self._unread[entry.member.tensor]
                unread.discard(number)
                if not unread:
                    self._offload.give_back(self._copies[entry.member.tensor], _momentum(entry))
                    for each in self._sharing[entry.member.tensor]:
                        each.momenta = {}

    def have_written(self, table: PieceTable) -> None:
        """Note that these rows are written; copy other state of completely written tensors back to the CPU."""
        with self._lock:
            for row in table.rows:
                entry = self._entries[row.parameter]
                assert entry is not None
                self._unwritten[entry.member.tensor] -= row.piece.numel
                if self._unwritten[entry.member.tensor] == 0:
                    copy = self._copies[entry.member.tensor]
                    self._offload.give_back(copy, [key for key in copy.values if key not in _momentum(entry)])
                    for each in self._sharing[entry.member.tensor]:
                        each.beside, each.master = {}, None

    def finish(self) -> None:
        """Copy all remaining state back to the CPU."""
        for copy in self._copies.values():
            self._offload.give_back(copy, tuple(copy.values))
        self._offload.end()


def _momentum(entry: ParameterStep) -> list[str]:
    return [key for key, state_layout in entry.member.state_layouts.items() if state_layout.kept_as == "momentum"]
