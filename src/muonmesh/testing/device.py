"""A CUDA device that is not there: torch lets fake tensors say that they are on it, and refuses nothing.

Fake tensors (`torch._subclasses.FakeTensorMode`) have a device, a shape and strides, but no elements. Even so a torch
without CUDA stops at them in two places: its C++ guards ask for the device, and `torch.cuda.Event` and `Stream` cannot
be made. Here the guard of the meta device, which does nothing, serves for CUDA too, and streams and events are those
below: nothing runs on them, so whatever they were given is over.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch

from muonmesh.numerics.kernels import memory

_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"  # c10::impl::device_guard_impl_registry
_KINDS = 22  # c10::COMPILE_TIME_MAX_DEVICE_TYPES
_CUDA, _META = 1, 14  # c10::DeviceType


class Stream:
    """Stands for `torch.cuda.Stream`."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device or "cuda").index
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)

    def wait_event(self, event: Event) -> None:
        """Go on after an event."""

    def wait_stream(self, stream: Stream) -> None:
        """Go on after all that another stream has been given."""

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event that is over when all is that this stream has been given."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait."""


class Event:
    """Stands for `torch.cuda.Event`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.stream: Any = None

    def record(self, stream: Any = None) -> None:
        """Mark what a stream has been given, by default the current one."""
        self.stream = stream or torch.cuda.current_stream()

    def synchronize(self) -> None:
        """Let the host wait."""

    def query(self) -> bool:
        """Return whether it is over."""
        return True


class Devices:
    """The pretended devices: which of them is the current one, and the current stream of each."""

    def __init__(self) -> None:
        self.current = 0
        self._current: dict[int, Any] = {}

    def index(self, device: Any = None) -> int:
        """Return the number of a device; without one, of the current one."""
        found = device if isinstance(device, int) else torch.device(device or "cuda").index
        return self.current if found is None else found

    def current_stream(self, device: Any = None) -> Any:
        """Stands for `torch.cuda.current_stream`."""
        index = self.index(device)
        if index not in self._current:
            self._current[index] = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
        return self._current[index]

    @contextmanager
    def using(self, stream: Any) -> Iterator[None]:
        """Stand for `torch.cuda.stream`."""
        index = self.index(stream.device)
        before = self.current_stream(index)
        with self.on_device(index):
            self._current[index] = stream
            try:
                yield
            finally:
                self._current[index] = before

    @contextmanager
    def on_device(self, device: Any) -> Iterator[None]:
        """Stand for `torch.cuda.device`."""
        before, self.current = self.current, self.index(device)
        try:
            yield
        finally:
            self.current = before

    def set_device(self, device: Any) -> None:
        """Stands for `torch.cuda.set_device`."""
        self.current = self.index(device)

    def synchronize(self, device: Any = None) -> None:
        """Stands for `torch.cuda.synchronize`."""


@contextmanager
def pretended_cuda(own: Devices | None = None, *replaced: tuple[Any, str, Any]) -> Iterator[None]:
    """Let fake tensors be on CUDA devices, whether or not this torch knows of CUDA.

    What is changed belongs to the process, so nothing else may use torch meanwhile; all is as before afterwards.

    Args:
        own: The devices.
        replaced: What else is replaced meanwhile: an object, the name of its attribute, and what stands for it.
    """
    own = own or Devices()
    library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
    guards = cast(Any, (ctypes.c_void_p * _KINDS).in_dll(library, _GUARDS))
    stands = {
        "Event": Event,
        "Stream": Stream,
        "stream": own.using,
        "device": own.on_device,
        "current_stream": own.current_stream,
        "current_device": own.index,
        "set_device": own.set_device,
        "synchronize": own.synchronize,
    }
    with ExitStack() as stack:
        stack.callback(guards.__setitem__, _CUDA, guards[_CUDA])
        guards[_CUDA] = guards[_META]
        for owner, name, other in (*((torch.cuda, *each) for each in stands.items()), *replaced):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, other)
        memory.forget()  # streams of other devices
        stack.callback(memory.forget)
        yield
