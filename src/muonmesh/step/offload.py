"""Offload: keeps state in CPU memory, and copies it to the device only while a bucket of the step needs it.

`DeviceCopies` says when the step of Muon's parameters needs which state, and `Offload.portions` does for AdamW's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from muonmesh.comm.storage import local_of
from muonmesh.layout.piece_table import PieceTable
from muonmesh.numerics.kernels.threads import keep
from muonmesh.step.parameter_steps import ParameterStep, StateCodec
from muonmesh.step.planning import StepPlan


@dataclass
class DeviceCopy:
    """Device copies of the state of one parameter.

    Attributes:
        hosts: Local tensors in CPU memory, by key.
        values: Their copies on the device, in the same shapes; a key is removed once its copy is written back.
        arrived: The event after which the values can be read; None: they can be read now.
    """

    hosts: Mapping[str, Tensor]
    values: dict[str, Tensor] = field(default_factory=dict)
    arrived: torch.cuda.Event | None = None


class Offload:
    """Copies state to a device and back, on two streams beside the computing stream. The CPU never waits.

    Device memory is allocated and freed in the order of the computing stream. A copy to the device waits for all
    computations before it. The memory is free again when the computing stream has waited for the copy back. So the
    device holds only the state that the step needs at one time, however far the CPU runs ahead.

    Args:
        device: The device of the parameters. With a CPU, as in tests, all copies are made in order.
        elements: The number of elements whose state is on the device at a time, both for AdamW's parameters and for
            the matrices of one bucket.

    Attributes:
        last: The event after which the CPU may read the state that was copied back; None: it may read it now.
    """

    def __init__(self, device: torch.device, *, elements: int) -> None:
        self._device = device
        self.elements = elements
        self.last: torch.cuda.Event | None = None
        self._leaving: list[tuple[torch.cuda.Event, list[Tensor]]] = []
        self._left_before: list[tuple[torch.cuda.Event, list[Tensor]]] = []
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        if device.type == "cuda":
            self._streams = keep(("offload", device), lambda: (_stream(device), _stream(device)))

    def bring(self, hosts: Mapping[str, Tensor]) -> DeviceCopy:
        """Begin to copy local tensors of one parameter to the device; `arrive` waits for them."""
        copy = DeviceCopy(hosts, {key: torch.empty_like(host, device=self._device) for key, host in hosts.items()})
        copy.arrived = self._beside(0, [(copy.values[key], host) for key, host in hosts.items()])
        return copy

    def _beside(self, stream_number: int, copies: Sequence[tuple[Tensor, Tensor]]) -> torch.cuda.Event | None:
        """Copy pairs (to, from) on one of the streams, after all earlier computations; return the event after it."""
        if self._streams is None:
            for into, value in copies:
                into.copy_(value)
            return None
        stream = self._streams[stream_number]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for into, value in copies:
                into.copy_(value, non_blocking=True)
        after: torch.cuda.Event = stream.record_event()
        return after

    def arrive(self, copy: DeviceCopy) -> None:
        """Make later computations wait until a copy to the device has arrived."""
        if copy.arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(copy.arrived)
            copy.arrived = None

    def give_back(self, copy: DeviceCopy, keys: Collection[str]) -> None:
        """Copy the values of these keys back to CPU memory. Nothing on the device reads these values afterwards."""
        leaving = {key: copy.values.pop(key) for key in keys if key in copy.values}
        if not leaving:
            return
        self.arrive(copy)
        self.last = self._beside(1, [(copy.hosts[key], value) for key, value in leaving.items()])
        if self.last is not None:
            self._leaving.append((self.last, list(leaving.values())))

    def end_bucket(self) -> None:
        """Free the device memory of state that was copied back before the last call; called once for each bucket."""
        for event, _ in self._left_before:
            torch.cuda.current_stream(self._device).wait_event(event)
        self._left_before, self._leaving = self._leaving, []

    def end(self) -> None:
        """Free the device memory of all state that was copied back, in the order of the computing stream."""
        self.end_bucket()
        self.end_bucket()

    def portions(self, states: Sequence[Mapping[str, Any]], keys: Collection[str]) -> Iterator[tuple[slice, list[Any]]]:
        """Copy the state of many parameters to the device and back, some parameters at a time.

        The state of the next parameters is copied while the caller works on the current parameters.

        Args:
            states: The state of each parameter.
            keys: The keys whose tensors are in CPU memory.

        Yields:
            A slice of the parameters, and their states with local tensors on the device under these keys, which the
            caller may write.
        """
        hosts = [{key: local_of(state[key]) for key in keys if key in state} for state in states]
        cuts = _cuts([max((host.numel() for host in tensors.values()), default=0) for tensors in hosts], self.elements)
        copies = [self.bring(tensors) for tensors in hosts[cuts[0]]] if cuts else []
        for number, cut in enumerate(cuts):
            self.end_bucket()
            after = [self.bring(tensors) for tensors in hosts[cuts[number + 1]]] if number + 1 < len(cuts) else []
            for copy in copies:
                self.arrive(copy)
            yield cut, [{**state, **copy.values} for state, copy in zip(states[cut], copies, strict=True)]
            for copy in copies:
                self.give_back(copy, keys)
            copies = after


def _cuts(numels: Sequence[int], most: int) -> list[slice]:
    """Cut a list of sizes into slices; the sizes of a slice add up to at most ``most``, unless it has one entry."""
    slices, start, total = list[slice](), 0, 0
    for number, numel in enumerate(numels):
        if number > start and total + numel > most:
            slices.append(slice(start, number))
            start, total = number, 0
        total += numel
    return [*slices, slice(start, len(numels))] if numels else slices


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class DeviceCopies(StateCodec):
    """Copies the state of parameters to the device for one step, and back to the CPU as early as possible.

    Momentum is needed until all matrices of its tensor have been read. Other state is needed until all of these
    matrices have been written. The state of a whole tensor is copied at once, even of a stack of experts or a flat
    buffer.

    Args:
        offload: Makes the copies.
        planned: The plan.
        entries: The parameters in the order of the plan; None for a parameter that only other ranks hold.
    """

    def __init__(self, offload: Offload, planned: StepPlan, entries: Sequence[ParameterStep | None]) -> None:
        self._lock = Lock()  # a CPU that is told to work in copies has threads
        self._offload, self._plan, self._entries = offload, planned.plan, entries
        self._copies: dict[Tensor, DeviceCopy] = {}
        self._unread, self._unwritten = Counter[Tensor](), Counter[Tensor]()  # elements that this rank stores
        self._sharing: dict[Tensor, list[ParameterStep]] = {}
        for member, entry in zip(planned.muon, entries, strict=True):
            if member is not None and entry is not None:
                for elements, storage in ((self._unread, member.momentum_storage), (self._unwritten, member.storage)):
                    blocks = () if storage.layout is None else storage.layout.blocks(planned.rank)
                    elements[member.tensor] += sum(block.region.numel for block in blocks)
                self._sharing.setdefault(member.tensor, []).append(entry)

    def _take(self, numbers: Iterable[int]) -> None:
        """Begin to copy the state of the parameters of matrices to the device, unless this step has copied it."""
        entries = dict.fromkeys(self._plan.assignments[number].parameter for number in numbers)
        stored_here = [entry for n in entries if (entry := self._entries[n]) is not None]
        missing = {entry.member.tensor: entry for entry in stored_here if entry.member.tensor not in self._copies}
        if missing:
            self._offload.end_bucket()
        for tensor, entry in missing.items():
            shaped = [key for key, state_layout in entry.member.state_layouts.items() if state_layout.factored is None]
            keys = [key for key in (*shaped, "master") if key in entry.state]
            self._copies[tensor] = self._offload.bring({key: local_of(entry.state[key]) for key in keys})
            for sharing in self._sharing[tensor]:
                sharing.bind(self._copies[tensor].values)

    def arrive(self, numbers: Sequence[int], ahead: Sequence[int]) -> None:
        """Let later computations wait until the state of matrices is copied, and begin to copy that of the next."""
        with self._lock:
            self._take(numbers)
            self._take(ahead)
            for entry in (self._entries[self._plan.assignments[number].parameter] for number in numbers):
                if entry is not None:
                    self._offload.arrive(self._copies[entry.member.tensor])

    def have_read(self, table: PieceTable) -> None:
        """Note that the gradients of these rows are folded in; copy momentum of whole tensors back to the CPU."""
        for tensor, keys in self._through(self._unread, table):
            self._offload.give_back(self._copies[tensor], keys)
            for sharing in self._sharing[tensor]:
                sharing.momenta = {}

    def have_written(self, table: PieceTable) -> None:
        """Note that these rows are written; copy other state of whole tensors back to the CPU."""
        for tensor, keys in self._through(self._unwritten, table):
            copy = self._copies[tensor]
            self._offload.give_back(copy, copy.values.keys() - keys)
            for sharing in self._sharing[tensor]:
                sharing.beside, sharing.master = {}, None

    def _through(self, remaining: Counter[Tensor], table: PieceTable) -> Iterator[tuple[Tensor, set[str]]]:
        """Take rows from the elements that are left; yield the tensors of which none is, with the keys of momentum."""
        with self._lock:
            for row in table.rows:
                entry = self._entries[row.parameter]
                assert entry is not None
                remaining[entry.member.tensor] -= row.piece.numel
                if remaining[entry.member.tensor] == 0:
                    layouts = entry.member.state_layouts.items()
                    yield entry.member.tensor, {key for key, layout in layouts if layout.kept_as == "momentum"}

    def finish(self) -> None:
        """Copy all remaining state back to the CPU."""
        for copy in self._copies.values():
            self._offload.give_back(copy, tuple(copy.values))
        self._offload.end()
