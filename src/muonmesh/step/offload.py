"""Offload: keeps state on the host, and brings it to the device only while a bucket of the step needs it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from muonmesh.comm.storage import local_of
from muonmesh.numerics.kernels.memory import keep
from muonmesh.step.precision import Precision


def fresh_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device, precision: Precision) -> Tensor:
    """Return zeros for a number of each element of a parameter that is on ``device``: there, or pinned on the host."""
    if not precision.leaves(device):
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.zeros(shape, dtype=dtype, device="cpu", pin_memory=torch.cuda.is_available())


def fresh_copy(local: Tensor, dtype: torch.dtype, precision: Precision, *, wait: bool = False) -> Tensor:
    """Return a contiguous copy in another dtype, where `fresh_zeros` would lie; with ``wait`` the host may read it."""
    if not precision.leaves(local.device):
        return local.detach().to(dtype).contiguous()
    return fresh_zeros(local.shape, dtype, local.device, precision).copy_(local.detach(), non_blocking=not wait)


@dataclass
class DeviceCopy:
    """The copies on the device of the state of one parameter.

    Attributes:
        hosts: Local tensors on the host, by key.
        values: What they are on the device, in the same shapes; a key is gone once it has been given back.
        arrived: After it the values can be read; None: they can be now.
    """

    hosts: Mapping[str, Tensor]
    values: dict[str, Tensor] = field(default_factory=dict)
    arrived: torch.cuda.Event | None = None


class Offload:
    """Brings state to a device and back, on two streams beside the one that computes; the host waits for nothing.

    Memory on the device is taken and given back in the order of the computing stream: what is brought waits for all
    that was computed before, and memory is free again when that stream has waited for the copy back. So what is there
    at once is what the step asks for at once, however far the host runs ahead.

    Args:
        device: Where the parameters are. A CPU serves in tests: all is done, in one stream.
        elements: Of each tensor that AdamW's half has on the device at a time, as of the matrices of one bucket.

    Attributes:
        last: After it the host may read what has been given back; None: it may now.
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
        """Begin to copy local tensors of one parameter to the device."""
        copy = DeviceCopy(hosts, {key: torch.empty_like(host, device=self._device) for key, host in hosts.items()})
        copy.arrived = self._beside(0, [(copy.values[key], host) for key, host in hosts.items()])
        return copy

    def _beside(self, which: int, copies: Sequence[tuple[Tensor, Tensor]]) -> torch.cuda.Event | None:
        """Copy (to, from) on one of the streams, after all that was computed before; return the event after it."""
        if self._streams is None:
            for into, value in copies:
                into.copy_(value)
            return None
        stream = self._streams[which]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for into, value in copies:
                into.copy_(value, non_blocking=True)
        after: torch.cuda.Event = stream.record_event()
        return after

    def arrive(self, copy: DeviceCopy) -> None:
        """Let what is computed from now on wait for a copy."""
        if copy.arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(copy.arrived)
            copy.arrived = None

    def give_back(self, copy: DeviceCopy, keys: Collection[str]) -> None:
        """Copy to the host what has been computed, which nobody on the device reads any more."""
        gone = {key: copy.values.pop(key) for key in keys if key in copy.values}
        if not gone:
            return
        self.arrive(copy)
        self.last = self._beside(1, [(copy.hosts[key], value) for key, value in gone.items()])
        if self.last is not None:
            self._leaving.append((self.last, list(gone.values())))

    def turn(self) -> None:
        """Free the memory of what was given back before the last turn; called once for each bucket."""
        for left, _ in self._left_before:
            torch.cuda.current_stream(self._device).wait_event(left)
        self._left_before, self._leaving = self._leaving, []

    def end(self) -> None:
        """Free all memory of what was given back, in the order of the computing stream."""
        self.turn()
        self.turn()

    def portions(self, states: Sequence[Mapping[str, Any]], keys: Collection[str]) -> Iterator[tuple[slice, list[Any]]]:
        """Take the state of many parameters through the device, some at a time, the next ones on their way meanwhile.

        Args:
            states: Of each parameter.
            keys: Which of it lies on the host.

        Yields:
            Which parameters, and their states with local tensors on the device under these keys, which may be written.
        """
        hosts = [{key: local_of(state[key]) for key in keys if key in state} for state in states]
        cuts = _cuts([max((host.numel() for host in some.values()), default=0) for some in hosts], self.elements)
        copies = [self.bring(some) for some in hosts[cuts[0]]] if cuts else []
        for number, cut in enumerate(cuts):
            self.turn()
            after = [self.bring(some) for some in hosts[cuts[number + 1]]] if number + 1 < len(cuts) else []
            for copy in copies:
                self.arrive(copy)
            yield cut, [{**state, **copy.values} for state, copy in zip(states[cut], copies, strict=True)]
            for copy in copies:
                self.give_back(copy, keys)
            copies = after


def _cuts(numels: Sequence[int], most: int) -> list[slice]:
    """Return slices of a list of sizes, each of one entry or of as many as have at most ``most`` together."""
    found, start, total = list[slice](), 0, 0
    for number, numel in enumerate(numels):
        if number > start and total + numel > most:
            found.append(slice(start, number))
            start, total = number, 0
        total += numel
    return [*found, slice(start, len(numels))] if numels else found


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
