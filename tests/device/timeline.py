"""Streams, events and graphs of a simulated device: queues of operations that run when their order allows."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.device import pretended as nothing
from tests.device.pretended import devices

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
        self.run, self.needs, self.is_done = run, needs, False
        self.is_over: Callable[[], bool] | None = None


class Stream(nothing.Stream):
    """A queue of operations."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        super().__init__(device)
        self.timeline = timeline()
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


class Event(nothing.Event):
    """Stands for `torch.cuda.Event`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self.mark: Operation | None = None
        self.clocks = Clocks()

    def record(self, stream: Stream | None = None) -> None:
        """Mark the operations that a stream has so far; default: the current stream."""
        self.stream = stream or timeline().current_stream()
        self.mark, self.clocks = Operation(), self.stream.clocks.copy()
        self.stream.timeline.push(self.stream, self.mark)

    def synchronize(self) -> None:
        if self.mark is not None and self.stream is not None:
            self.stream.timeline.run_until(self.mark)
            self.stream.timeline.host |= self.clocks

    def query(self) -> bool:
        """Return whether the event is over, so that the CPU may read results of the operations before it."""
        if self.mark is not None and self.mark.is_done and self.stream is not None:
            self.stream.timeline.host |= self.clocks
        return self.mark is None or self.mark.is_done


class Graph(nothing.Graph):
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


class Timeline(nothing.Devices):
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

    stream_type, event_type, graph_type = Stream, Event, Graph

    def __init__(self, seed: int = 0, *, eager: float = 0.3, devices: int = 1) -> None:
        super().__init__()
        self.random, self.eager, self.devices = random.Random(seed), eager, devices
        self.streams: list[Stream] = []
        self.host = Clocks()
        self.lock = threading.RLock()

    def current_stream(self, device: Any = None) -> Stream:
        is_new = self.index(device) not in self._current
        stream: Stream = super().current_stream(device)
        stream.is_default |= is_new
        return stream

    def is_capturing(self, *names: str) -> bool:
        """Stand for `torch.cuda.is_current_stream_capturing`; with ``names``, refuse an operation during a capture."""
        if (capturing := self.current_stream().capturing is not None) and names:
            raise RuntimeError(f"operation not permitted when stream is capturing: {names[0]}")
        return capturing

    def push(self, stream: Stream, operation: Operation) -> None:
        self.is_capturing("an event")
        with self.lock:
            stream.queue.append(operation)
        while self.random.random() < self.eager and self.go_on():
            pass

    def go_on(self) -> bool:
        """Run the next operation of a stream that need not wait; return whether there was one."""
        with self.lock:
            ready = [s for s in self.streams if s.queue and (s.queue[0].needs is None or s.queue[0].needs.is_done)]
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
            operation.is_done = True
            stream.queue.popleft()
            return True

    def run_until(self, operation: Operation) -> None:
        """Run operations until this operation is over."""
        self.is_capturing("the host waits")
        while not operation.is_done:
            if not self.go_on() and not operation.is_done:
                raise RuntimeError("no stream can go on: each waits for another")

    def synchronize(self, device: Any = None) -> None:
        for stream in list(self.streams):
            stream.synchronize()


def timeline() -> Timeline:
    current_devices = devices()
    assert isinstance(current_devices, Timeline)
    return current_devices
