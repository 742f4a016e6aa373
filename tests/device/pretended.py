"""A pretended CUDA device for fake tensors, on machines without CUDA.

Fake tensors (`torch._subclasses.FakeTensorMode`) have a device, a shape and strides, but no elements. A torch without
CUDA still fails on CUDA fake tensors in two places: its C++ guards need the device, and `torch.cuda.Event` and `Stream`
cannot be made. So this module uses the guard of the meta device, which does nothing, for CUDA too. It replaces streams
and events by the classes below, which do nothing either: a fake operation is over when it has been called.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch

from muonmesh.numerics.kernels import threads

_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"  # c10::impl::device_guard_impl_registry
_KINDS = 22  # c10::COMPILE_TIME_MAX_DEVICE_TYPES
_CUDA, _META = 1, 14  # c10::DeviceType


class Stream:
    """Stands for `torch.cuda.Stream`."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cuda", devices().index(device))

    def wait_event(self, event: Event) -> None:
        """Do nothing: the event is over."""

    def wait_stream(self, stream: Stream) -> None:
        """Continue after all operations that another stream has so far."""
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event that is over when all operations that this stream has so far are over."""
        event = event or devices().event_type()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()


class Event:
    """Stands for `torch.cuda.Event`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.stream: Any = None

    def record(self, stream: Stream | None = None) -> None:
        """Mark the operations that a stream has so far; default: the current stream."""
        self.stream = stream or devices().current_stream()

    def synchronize(self) -> None:
        """Do nothing: the event is over."""

    def query(self) -> bool:
        """Return whether the event is over."""
        return True


class Graph:
    """Stands for `torch.cuda.CUDAGraph`."""

    def capture_begin(self, *_: Any, **__: Any) -> None:
        """Do nothing: what is captured also runs."""

    capture_end = replay = capture_begin


class Devices:
    """The pretended devices: which is the current one, and the current stream of each."""

    stream_type, event_type, graph_type = Stream, Event, Graph

    def __init__(self) -> None:
        self.current = 0
        self._current: dict[int, Any] = {}

    def index(self, device: Any = None) -> int:
        """Return the number of a device; default: the current device."""
        index = device if device is None or isinstance(device, int) else torch.device(device).index
        return self.current if index is None else index

    def current_stream(self, device: Any = None) -> Any:
        index = self.index(device)
        if index not in self._current:
            self._current[index] = self.stream_type(index)
        return self._current[index]

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        index = self.index(stream.device)
        before = self.current_stream(index)
        with Current(index):
            self._current[index] = stream
            try:
                yield
            finally:
                self._current[index] = before

    def set_device(self, device: Any) -> None:
        self.current = self.index(device)

    def is_capturing(self) -> bool:
        return False

    def synchronize(self, device: Any = None) -> None:
        """Do nothing: everything is over."""


class Current:
    """Stands for `torch.cuda.device`. It is a class, because torch uses it in `isinstance`."""

    def __init__(self, device: Any) -> None:
        self._index = devices().index(device)

    def __enter__(self) -> None:
        self._before, devices().current = devices().current, self._index

    def __exit__(self, *error: object) -> None:
        devices().current = self._before


_active: list[Devices] = []


def devices() -> Devices:
    return _active[-1]


@contextmanager
def pretended_cuda(used: Devices | None = None) -> Iterator[Devices]:
    """Allow fake tensors on CUDA devices, even if this torch was built without CUDA.

    This changes global state of the process, so nothing else may use torch meanwhile. The state is restored afterwards.

    Args:
        own: The devices, with their streams and events.
    """
    used = used or Devices()
    library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
    guards = cast(Any, (ctypes.c_void_p * _KINDS).in_dll(library, _GUARDS))
    stands = {
        "Event": used.event_type,
        "Stream": used.stream_type,
        "CUDAGraph": used.graph_type,
        "graph_pool_handle": object,
        "is_current_stream_capturing": used.is_capturing,
        "memory_reserved": lambda device=None: 0,
        "empty_cache": lambda: None,
        "stream": used.using,
        "device": Current,
        "current_stream": used.current_stream,
        "current_device": used.index,
        "set_device": used.set_device,
        "synchronize": used.synchronize,
    }
    with ExitStack() as stack:
        stack.callback(guards.__setitem__, _CUDA, guards[_CUDA])
        guards[_CUDA] = guards[_META]
        workspaces = torch._C, "_cuda_clearCublasWorkspaces", lambda: None
        for owner, name, other in (*((torch.cuda, *replacement) for replacement in stands.items()), workspaces):
            back = (setattr, owner, name, getattr(owner, name)) if hasattr(owner, name) else (delattr, owner, name)
            stack.callback(*back)
            setattr(owner, name, other)
        threads.forget()  # streams of other devices
        stack.callback(threads.forget)
        _active.append(used)
        stack.callback(_active.pop)
        yield used
