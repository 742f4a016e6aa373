"""A pretended CUDA device for fake tensors, on machines without CUDA.

Fake tensors (`torch._subclasses.FakeTensorMode`) have a device, a shape and strides, but no elements. A torch without
CUDA still fails on CUDA fake tensors in two places: its C++ guards need the device, and `torch.cuda.Event` and `Stream`
cannot be made. So this module uses the guard of the meta device, which does nothing, for CUDA too. It replaces streams
and events by the classes below: queues of operations that run when their order allows. A dry run queues only events.
"""

from __future__ import annotations

import ctypes
import os
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch.utils._python_dispatch import _disable_current_modes

from muonmesh.numerics.kernels import memory

_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"  # c10::impl::device_guard_impl_registry
_KINDS = 22  # c10::COMPILE_TIME_MAX_DEVICE_TYPES
_CUDA, _META = 1, 14  # c10::DeviceType

Clocks = Counter[object]
"""A vector clock: for each stream, how many of its operations are known to be over. Clocks order accesses to memory;
``|=`` takes the maximum of two clocks."""


class Operation:
    """An entry of a stream's queue: something to run, a wait for an operation of another stream, or only a mark.

    Attributes:
        run: Runs the operation. If it returns a function, this is polled until the collective is over; None: it is
            over.
        needs: The operation that must be over before the stream continues.
        done: Whether the operation is over.
    """

    def __init__(self, run: Callable[[], Any] | None = None, needs: Operation | None = None) -> None:
        self.run, self.needs, self.done = run, needs, False
        self.is_over: Callable[[], bool] | None = None


class Stream:
    """Stands for `torch.cuda.Stream`."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.timeline = timeline()
        self.device = torch.device("cuda", self.timeline.index(device))
        self.queue = deque[Operation]()
        self.clocks = Clocks()
        self.capturing: Graph | None = None
        self.is_default = False
        self.timeline.streams.append(self)
        self.name = f"stream {len(self.timeline.streams) - 1} of {self.device}"

    def wait_event(self, event: Event) -> None:
        """Continue after an event; at once if the event was never recorded, as in CUDA."""
        if event.mark is not None:
            self.timeline.push(self, Operation(needs=event.mark))
            self.clocks |= event.clocks

    def wait_stream(self, stream: Stream) -> None:
        """Continue after all operations that another stream has so far."""
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event that is over when all operations that this stream has so far are over."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Make the CPU wait for all operations of this stream."""
        self.record_event().synchronize()


class Event:
    """Stands for `torch.cuda.Event`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.mark: Operation | None = None
        self.stream: Stream | None = None
        self.clocks = Clocks()

    def record(self, stream: Stream | None = None) -> None:
        """Mark the operations that a stream has so far; default: the current stream."""
        self.stream = stream or timeline().current_stream()
        self.mark, self.clocks = Operation(), self.stream.clocks.copy()
        self.stream.timeline.push(self.stream, self.mark)

    def synchronize(self) -> None:
        """Make the CPU wait for this event."""
        if self.mark is not None and self.stream is not None:
            self.stream.timeline.run_until(self.mark)
            self.stream.timeline.host |= self.clocks

    def query(self) -> bool:
        """Return whether the event is over, so that the CPU may read results of the operations before it."""
        if self.mark is not None and self.mark.done and self.stream is not None:
            self.stream.timeline.host |= self.clocks
        return self.mark is None or self.mark.done


class Graph:
    """Stands for `torch.cuda.CUDAGraph`.

    Attributes:
        issued: The operations issued during the capture, as functions that issue them again on a stream.
        pool: The memory pool of the capture; its memory is used for nothing else.
    """

    def __init__(self) -> None:
        self.issued: list[Callable[[Stream], Any]] = []
        self.pool: object = self

    def capture_begin(self, pool: object = None, **_: Any) -> None:
        """Record the operations of the current stream instead of running them."""
        self.pool = pool or self
        self._stream = timeline().current_stream()
        if self._stream.is_default:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        self._stream.capturing = self

    def capture_end(self) -> None:
        """End the recording, so that the current stream runs its operations again."""
        self._stream.capturing = None

    def replay(self) -> None:
        """Issue all recorded operations on the current stream, in the same order."""
        for issue in self.issued:
            issue(timeline().current_stream(self._stream.device))


class Timeline:
    """The queues of the streams of all pretended devices, and the order in which their operations run.

    Args:
        seed: Seed of the order; it is one of the orders that streams and events allow.
        eager: Probability that a device continues whenever an operation is queued. Otherwise it continues when the CPU
            waits.
        devices: Number of devices.

    Attributes:
        streams: All streams, in the order in which they were made.
        host: The vector clock of the CPU.
    """

    def __init__(self, seed: int = 0, *, eager: float = 0.3, devices: int = 1) -> None:
        self.random, self.eager, self.devices = random.Random(seed), eager, devices
        self.streams: list[Stream] = []
        self.host = Clocks()
        self.lock = threading.RLock()
        self.current = 0
        self._current: dict[int, Stream] = {}

    def index(self, device: Any = None) -> int:
        """Return the number of a device; default: the current device."""
        found = device if device is None or isinstance(device, int) else torch.device(device).index
        return self.current if found is None else found

    def current_stream(self, device: Any = None) -> Stream:
        """Stands for `torch.cuda.current_stream`."""
        index = self.index(device)
        if index not in self._current:
            self._current[index] = Stream(index)
            self._current[index].is_default = True
        return self._current[index]

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        """Stand for `torch.cuda.stream`."""
        index = self.index(stream.device)
        before = self.current_stream(index)
        with Current(index):
            self._current[index] = stream
            try:
                yield
            finally:
                self._current[index] = before

    def set_device(self, device: Any) -> None:
        """Stands for `torch.cuda.set_device`."""
        self.current = self.index(device)

    def is_capturing(self, *which: str) -> bool:
        """Stand for `torch.cuda.is_current_stream_capturing`; with ``which``, refuse an operation during a capture."""
        if (capturing := self.current_stream().capturing is not None) and which:
            raise RuntimeError(f"operation not permitted when stream is capturing: {which[0]}")
        return capturing

    def push(self, stream: Stream, operation: Operation) -> None:
        """Queue an operation."""
        self.is_capturing("an event")
        with self.lock:
            stream.queue.append(operation)
        while self.random.random() < self.eager and self.go_on():
            pass

    def go_on(self) -> bool:
        """Run the next operation of a stream that need not wait; return whether there was one."""
        with self.lock:
            ready = [s for s in self.streams if s.queue and (s.queue[0].needs is None or s.queue[0].needs.done)]
            if not ready:
                return False
            stream = self.random.choice(ready)
            operation = stream.queue[0]
            if operation.run is not None:
                run, operation.run = operation.run, None
                with _disable_current_modes(), torch.no_grad():
                    operation.is_over = run()
            if operation.is_over is not None and not operation.is_over():
                time.sleep(0.0005)
                return True
            operation.done = True
            stream.queue.popleft()
            return True

    def run_until(self, operation: Operation) -> None:
        """Run operations until this operation is over."""
        self.is_capturing("the host waits")
        while not operation.done:
            if not self.go_on() and not operation.done:
                raise RuntimeError("no stream can go on: each waits for another")

    def synchronize(self, device: Any = None) -> None:
        """Make the CPU wait for all devices."""
        for stream in list(self.streams):
            stream.synchronize()


class Current:
    """Stands for `torch.cuda.device`. It is a class, because torch uses it in `isinstance`."""

    def __init__(self, device: Any) -> None:
        self._index = timeline().index(device)

    def __enter__(self) -> None:
        self._before, timeline().current = timeline().current, self._index

    def __exit__(self, *error: object) -> None:
        timeline().current = self._before


_active: list[Timeline] = []


def timeline() -> Timeline:
    """Return the timeline of the pretended devices."""
    return _active[-1]


@contextmanager
def pretended_cuda(own: Timeline | None = None, *replaced: tuple[Any, str, Any]) -> Iterator[Timeline]:
    """Allow fake tensors on CUDA devices, even if this torch was built without CUDA.

    This changes global state of the process, so nothing else may use torch meanwhile. The state is restored afterwards.

    Args:
        own: The timeline, which decides when streams continue.
        replaced: Further replacements meanwhile: an object, the name of its attribute, and the replacement.
    """
    own = own or Timeline()
    library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
    guards = cast(Any, (ctypes.c_void_p * _KINDS).in_dll(library, _GUARDS))
    stands = {
        "Event": Event,
        "Stream": Stream,
        "CUDAGraph": Graph,
        "graph_pool_handle": object,
        "is_current_stream_capturing": own.is_capturing,
        "memory_reserved": lambda device=None: 0,
        "empty_cache": lambda: None,
        "stream": own.using,
        "device": Current,
        "current_stream": own.current_stream,
        "current_device": own.index,
        "set_device": own.set_device,
        "synchronize": own.synchronize,
    }
    with ExitStack() as stack:
        stack.callback(guards.__setitem__, _CUDA, guards[_CUDA])
        guards[_CUDA] = guards[_META]
        workspaces = torch._C, "_cuda_clearCublasWorkspaces", lambda: None
        for owner, name, other in (*((torch.cuda, *each) for each in stands.items()), workspaces, *replaced):
            back = (setattr, owner, name, getattr(owner, name)) if hasattr(owner, name) else (delattr, owner, name)
            stack.callback(*back)
            setattr(owner, name, other)
        memory.forget()  # streams of other devices
        stack.callback(memory.forget)
        _active.append(own)
        stack.callback(_active.pop)
        yield own
