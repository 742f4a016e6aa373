"""A simulated device: CUDA tensors with values on a machine without CUDA; its streams run late and in random order.

A tensor of the device is a fake tensor. Fake tensors keep shapes, strides, offsets and shared storages right, and a
table maps each of their storages to a block of real memory. So every operation runs twice: at once on the fake tensors,
for shapes on the CPU, and later on the blocks, in a random order that streams and events allow. Freed memory is reused
at once, as by torch's allocator.

Races are found by vector clocks when an operation is issued, whatever the seed. The values show their effect.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from muonmesh.numerics.kernels import toolchain
from tests.device.launches import arguments, waits
from tests.device.pretended import pretended_cuda
from tests.device.timeline import Event, Operation, Stream, Timeline

_ROOM = 512  # bytes: what torch's allocator rounds sizes up to


class Race(NamedTuple):
    """Two accesses to the same memory whose order no stream, event or wait of the CPU determines.

    Attributes:
        kind: The owner of the memory, and what the two accesses do.
        first: The operation, the line and the stream of the access that was issued first.
        second: The operation, the line and the stream of the other access.
    """

    kind: str
    first: str
    second: str


class RaceError(RuntimeError):
    """A simulated device found a race: two accesses to the same memory without an order."""


class _Part(NamedTuple):
    """A view of a block: the real memory of a fake tensor."""

    block: _Allocation
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def real(self) -> Tensor:
        storage = self.block.storage
        return torch.empty(0, dtype=self.dtype, device="cpu").set_(storage, self.offset, self.size, self.stride)

    def extent(self) -> tuple[int, int]:
        if 0 in self.size:
            return 0, 0
        last = self.offset + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        return self.offset * self.dtype.itemsize, (last + 1) * self.dtype.itemsize

    def bytes(self) -> set[int]:
        wide = self.dtype.itemsize
        elements = torch.arange(self.extent()[1] // wide, dtype=torch.int64, device="cpu").as_strided(
            self.size, self.stride, self.offset
        )
        return {index * wide + byte for index in elements.flatten().tolist() for byte in range(wide)}

    def overlaps(self, other: _Part) -> bool:
        (a, b), (c, d) = self.extent(), other.extent()
        return a < d and c < b and bool(self.bytes() & other.bytes())  # views with strides may interleave


class _Access(NamedTuple):
    writes: bool
    stream: Stream
    clock: int
    part: _Part
    line: str
    life: int


class _Allocation:
    """Memory that outlives the tensors in it, with its accesses; ``life`` counts how often it was allocated.

    Memory of a graph's pool is used for nothing else.
    """

    def __init__(self, kind: str, storage: Any, stream: Stream | None = None) -> None:
        self.kind, self.storage, self.stream = kind, storage, stream
        self.life = 0
        self.pool: object = None
        self.accesses: list[_Access] = []
        self.recorded: set[Stream] = set()


class SimulatedDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Simulated CUDA devices on a machine without CUDA: ``with SimulatedDevice(seed=0): ...``.

    Streams run late, in a random order. Within the context, ``torch.cuda`` reports these devices, and
    ``tensor.to("cuda:0")`` copies to one of them. torch's CPU code computes products and elementwise operations.
    Triton kernels run if Triton's interpreter is on (``TRITON_INTERPRET=1``). Nothing else may use torch meanwhile.

    Args:
        seed: Seed of the order.
        eager: Probability that a device continues after each issued operation. With 0, a device continues only when
            the CPU waits.
        devices: Number of devices.
        raises: Whether the end of the context raises an error if there were races.

    Attributes:
        races: The races that were found, and how often each occurred.
        waits: The lines where the CPU waited for a device without an event or a stream, and how often.

    Raises:
        RaceError: at the end of the context.
    """

    def __init__(self, seed: int = 0, *, eager: float = 0.3, devices: int = 1, raises: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.races: Counter[Race] = Counter()
        self.waits: Counter[str] = Counter()
        self._timeline = Timeline(seed, eager=eager, devices=devices)
        self._raises = raises
        self._fake = FakeTensorMode()
        self._blocks: dict[int, _Allocation] = {}  # by the storage of a fake tensor, or of pinned memory
        self._free: list[_Allocation] = []
        self._reserved = 0
        self._leaving: list[tuple[_Allocation, list[Event]]] = []
        self._of_groups: dict[str, Stream] = {}
        self._inside = ExitStack()

    def __enter__(self) -> SimulatedDevice:
        """Make torch use these devices."""
        installed = toolchain.is_installed()
        replaced = (
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "is_initialized", lambda: True),
            (torch.cuda, "_lazy_init", lambda: None),
            (torch.cuda, "device_count", lambda: self._timeline.devices),
            (torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
            (torch.cuda, "memory_reserved", lambda device=None: self._reserved),
            (Tensor, "tolist", self._reading(Tensor.tolist)),
            (Tensor, "numpy", self._reading(Tensor.numpy)),
            (Tensor, "record_stream", lambda tensor, stream: self._part(tensor).block.recorded.add(stream)),
            (toolchain, "is_installed", lambda: installed and toolchain.is_interpreted()),
        )
        with ExitStack() as stack:
            stack.enter_context(pretended_cuda(self._timeline))
            for owner, name, other in replaced:
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, other)
            toolchain.is_usable.cache_clear()
            stack.callback(toolchain.is_usable.cache_clear)
            if dist.is_available() and dist.is_initialized():  # a CPU that waits for another one must not block both
                stack.enter_context(self._going_on())
            super().__enter__()  # type: ignore[no-untyped-call]
            self._inside = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Let the devices finish, and restore torch's own devices."""
        with self._inside:
            super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
            if kind is None:
                self._timeline.synchronize()
        if kind is None and self._raises and self.races:
            races = "\n".join(f"{race.kind}:\n  {race.first}\n  {race.second}" for race in self.races)
            raise RaceError(f"{len(self.races)} races on the simulated device. {races}")

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        stop = threading.Event()

        def run() -> None:
            while not stop.is_set():
                time.sleep(0.0002 if self._timeline.go_on() else 0.001)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    # ------------------------------------------------------------------ memory

    def _part(self, tensor: Tensor) -> _Part:
        storage = tensor.untyped_storage()
        block = self._blocks.get(storage._cdata)
        if block is None:
            block = (
                self._allocation_of(tensor)
                if isinstance(tensor, FakeTensor)
                else _Allocation("pageable memory", storage)
            )
        return _Part(block, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))

    def _allocation_of(self, tensor: Tensor) -> _Allocation:
        """Give memory to a new fake tensor: memory that its stream has freed, or else new memory."""
        storage = tensor.untyped_storage()
        stream, size = self._timeline.current_stream(tensor.device), storage.nbytes()
        pool = None if stream.capturing is None else stream.capturing.pool
        sizes = range(size, 2 * size + _ROOM + 1)
        fits = [b for b in self._free if b.stream is stream and b.pool is pool and b.storage.nbytes() in sizes]
        if fits:
            block = self._timeline.random.choice(fits)
            self._free.remove(block)
            block.life += 1
        else:
            room = torch.full((-(-size // _ROOM) * _ROOM,), 255, dtype=torch.uint8, device="cpu")  # NaN
            block = _Allocation("device memory", room.untyped_storage(), stream)
            block.pool, self._reserved = pool, self._reserved + room.nbytes
        self._blocks[storage._cdata] = block
        weakref.finalize(storage, self._freed, storage._cdata, block)
        return block

    def _freed(self, key: int, block: _Allocation) -> None:
        self._blocks.pop(key, None)
        events = [stream.record_event() for stream in block.recorded]
        block.recorded = set()
        self._leaving.append((block, events))
        for entry in list(self._leaving):
            block, events = entry
            if all(event.query() for event in events):
                self._leaving.remove(entry)
                for event in events:  # the allocator has asked, so what comes next is after it
                    block.accesses = [a for a in block.accesses if event.clocks[a.stream] < a.clock]
                self._free.append(block)

    def _pin(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._blocks[storage._cdata] = _Allocation("pinned memory", storage)  # the CPU must not reuse it before
        return tensor

    def _is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._blocks

    # ------------------------------------------------------------------ races

    def _touch(self, stream: Stream | None, part: _Part, writes: bool, line: str) -> None:
        """Record an access by a stream, or by the CPU (None), and the accesses with which it races."""
        clocks, name = (self._timeline.host, "the host") if stream is None else (stream.clocks, stream.name)
        block, remaining = part.block, list[_Access]()
        for old in block.accesses:
            ordered = clocks[old.stream] >= old.clock
            if not ordered and (writes or old.writes) and part.overlaps(old.part):
                does = [("reads", "writes")[old.writes], ("reads", "writes")[writes]]
                life = "" if old.life == block.life else ", which was freed in between"
                kind = f"{block.kind}{life}: one {does[0]}, the other {does[1]}"
                self.races[Race(kind, f"{old.line}, on {old.stream.name}", f"{line}, on {name}")] += 1
            replaced = ordered and (writes or not old.writes) and part[1:] == old.part[1:]
            if not replaced:
                remaining.append(old)
        if stream is not None:  # an access of the CPU is over before it issues anything else
            remaining.append(_Access(writes, stream, clocks[stream], part, line, block.life))
        block.accesses = remaining

    def _queue(self, stream: Stream, run: Callable[[], Any], line: str, reads: Any, writes: Any) -> Operation:
        """Issue an operation on a stream: record its accesses now, and run it later."""
        if stream.capturing is not None:
            lives = [(part, part.block.life) for part in (*reads, *writes) if part.block.pool is None]

            def again(on: Stream) -> None:
                if any(part.block.life != life or part.block in self._free for part, life in lives):
                    race = Race(
                        "device memory of a graph, which was freed", line, f"{_call_site('replay')}, on {on.name}"
                    )
                    self.races[race] += 1
                self._queue(on, run, line, reads, writes)

            stream.capturing.issued.append(again)
            return Operation()
        stream.clocks |= self._timeline.host  # operations that are over for the CPU come before it
        stream.clocks[stream] += 1
        for part in reads:
            self._touch(stream, part, False, line)
        for part in writes:
            self._touch(stream, part, True, line)
        operation = Operation(run)
        self._timeline.push(stream, operation)
        return operation

    def _reading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if isinstance(tensor, FakeTensor):
                return original(self._read(tensor), *args, **kwargs)
            if tensor.device.type == "cpu" and self._is_pinned(tensor):
                self._touch(None, self._part(tensor), False, _call_site(original.__name__))
            return original(tensor, *args, **kwargs)

        return read

    def _read(self, tensor: Tensor) -> Tensor:
        """Make the CPU wait for a tensor of a device, and return its values."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        self._cross(tensor, host, non_blocking=False, name="a read by the host")
        return host

    # ------------------------------------------------------------------ operations

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on the CPU, or on fake tensors now and on real memory later."""
        if any(kind not in (Tensor, torch.nn.Parameter, FakeTensor) for kind in types):
            return NotImplemented  # a DTensor calls again with its local tensors
        kwargs = dict(kwargs or {})
        name = func._schema.name.split("::")[1]
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        on_device = [t for t in tensors if isinstance(t, FakeTensor)]
        fakes = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        if fakes or any(t.fake_mode is not self._fake for t in on_device):
            return func(*args, **kwargs)  # DTensor works out shapes on fake tensors of its own
        if func.namespace == "c10d":
            group = _group_of(args)
            if on_device:
                return self._collective(func, name, args, kwargs, group)
            if (before := self._of_groups.get(group)) and before.queue:
                # NCCL has an order of its own. Here gloo serves both, and all ranks must meet in one order.
                self._timeline.run_until(before.queue[-1])
        device = kwargs.get("device")
        device_type = None if device is None else torch.device(device).type
        if not on_device and device_type != "cuda":
            return self._on_host(func, name, args, kwargs)
        if name in ("copy_", "_to_copy"):
            crossed = self._copied(name, args, kwargs, device_type)
            if crossed is not None:
                return crossed
        elif device_type == "cpu":  # empty_like(a tensor there, device="cpu")
            like = tree_map_only(FakeTensor, _like, args)
            return self._on_host(func, name, like, kwargs)
        if name == "_local_scalar_dense":
            return self._read(tensors[0]).item()
        if name == "is_pinned":
            return False
        if waits(func, args):  # its shape is a number of the device's
            real = func(*tree_map_only(FakeTensor, self._read, args), **kwargs)
            with self._again():
                return tree_map_only(Tensor, lambda x: x.to(on_device[0].device), real)
        return self._issue(func, name, args, kwargs)

    @contextmanager
    def _again(self) -> Iterator[None]:
        """Activate this mode inside its own handler, where torch switches it off."""
        TorchDispatchMode.__enter__(self)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            TorchDispatchMode.__exit__(self, None, None, None)  # type: ignore[no-untyped-call]

    def _issue(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        with self._fake:
            shapes = tree_map_only(Tensor, lambda t: t if isinstance(t, FakeTensor) else _like(t), (args, kwargs))
            result = func(*shapes[0], **shapes[1])
        blocks_before = set(self._blocks)
        outputs = [t for t in tree_leaves(result) if isinstance(t, FakeTensor)]
        fresh = [(i, self._part(t)) for i, t in enumerate(outputs) if t.untyped_storage()._cdata not in blocks_before]
        reads, writes = self._uses(func, args, kwargs)
        if not (fresh or writes) or name.startswith(("empty", "new_empty")):
            return result  # a view, or memory
        leaves, spec = tree_flatten((args, kwargs))
        devices = {x.device for x in (*leaves, *outputs) if isinstance(x, FakeTensor)}
        streams = [self._timeline.current_stream(device) for device in sorted(devices, key=str)]
        for other in streams[1:]:  # a copy between devices: after both, and both after it
            streams[0].wait_stream(other)
        deferred = [self._deferred(leaf) for leaf in leaves]

        def run() -> None:
            a, k = tree_unflatten([x.real() if isinstance(x, _Part) else x for x in deferred], spec)
            results = _of_cpu(func)(*a, **k)
            if fresh:
                numbers = [t for t in tree_leaves(results) if isinstance(t, Tensor)]
                for i, part in fresh:
                    part.real().copy_(numbers[i])

        self._queue(streams[0], run, _call_site(name), reads, [*writes, *(part for _, part in fresh)])
        for other in streams[1:]:
            other.wait_stream(streams[0])
        return result

    def _deferred(self, value: Any) -> Any:
        """Return the form of an argument that an operation keeps until it runs."""
        if isinstance(value, FakeTensor):
            return self._part(value)
        if isinstance(value, Tensor):
            return value.clone()  # a number of the CPU, which a kernel gets by value
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def _uses(self, func: Any, args: Any, kwargs: Any) -> tuple[list[_Part], list[_Part]]:
        reads, writes = list[_Part](), list[_Part]()
        for _, value, written in arguments(func, args, kwargs):
            parts = [self._part(t) for t in tree_leaves(value) if isinstance(t, FakeTensor)]
            (writes if written else reads).extend(parts)  # a write races with all that a read does
        return reads, writes

    def _copied(self, name: str, args: Any, kwargs: Any, device_type: str | None) -> Tensor | None:
        """Copy between CPU and device; None if both tensors are on the same side."""
        source, target = (args[1], args[0]) if name == "copy_" else (args[0], None)
        down = isinstance(source, FakeTensor)
        goes_down = device_type == "cpu" if target is None else not isinstance(target, FakeTensor)
        if down != goes_down or (target is None and device_type is None):
            return None
        non_blocking = bool(kwargs.get("non_blocking", name == "copy_" and len(args) > 2 and args[2]))
        if target is None:
            dtype = kwargs.get("dtype") or source.dtype
            if down:
                target = torch.empty(source.shape, dtype=dtype, device="cpu")
                target = self._pin(target) if non_blocking else target  # as torch does
            else:
                with self._fake:
                    target = torch.empty(source.shape, dtype=dtype, device=kwargs["device"])
        self._cross(source, target, non_blocking=non_blocking, name=name)
        return target

    def _cross(self, source: Tensor, target: Tensor, *, non_blocking: bool, name: str) -> None:
        self._timeline.is_capturing(name)  # CPU memory may have moved when the graph is replayed
        on_host, on_device = (target, source) if isinstance(source, FakeTensor) else (source, target)
        non_blocking = non_blocking and self._is_pinned(on_host)
        line, stream = _call_site(name), self._timeline.current_stream(on_device.device)
        reads, writes = self._part(source), self._part(target)
        run = lambda: (writes.real().copy_(reads.real()), None)[1]  # noqa: E731
        operation = self._queue(stream, run, line, [reads], [writes])
        if not non_blocking:
            self.waits[line] += 1
            self._timeline.run_until(operation)
            self._timeline.host |= stream.clocks

    def _on_host(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        pin = kwargs.pop("pin_memory", None)
        if name == "is_pinned":
            return self._is_pinned(args[0])
        for _, value, written in arguments(func, args, kwargs):
            for t in tree_leaves(value):
                if isinstance(t, Tensor) and t.device.type == "cpu" and self._is_pinned(t):
                    self._touch(None, self._part(t), written, _call_site(name))
        result = args[0].clone() if name == "_pin_memory" else func(*args, **kwargs)
        return self._pin(result) if pin or name == "_pin_memory" else result

    def _collective(self, func: Any, name: str, args: Any, kwargs: Any, group: str) -> Any:
        """Run a collective late on a stream of the group, as NCCL does; ``wait`` makes the current stream wait."""
        leaves, spec = tree_flatten((args, kwargs))
        device = next(x.device for x in leaves if isinstance(x, FakeTensor))
        stream = self._of_groups.get(group) or self._of_groups.setdefault(group, Stream(device))
        stream.wait_stream(self._timeline.current_stream(device))
        reads, writes = list[_Part](), list[_Part]()
        for argument, value in zip(func._schema.arguments, args, strict=False):
            read = "input" in argument.name and name != "allreduce_"
            (reads if read else writes).extend(self._part(t) for t in tree_leaves(value) if isinstance(t, FakeTensor))
        deferred = [self._part(x) if isinstance(x, FakeTensor) else x for x in leaves]

        def run() -> Callable[[], bool]:
            a, k = tree_unflatten([x.real() if isinstance(x, _Part) else x for x in deferred], spec)
            result = func(*a, **k)
            work = dist.Work.unbox(result[-1] if isinstance(result, tuple) else result)
            return lambda: work.is_completed() and (work.wait() or True)

        self._queue(stream, run, _call_site(name), reads, writes)
        event, memory = stream.record_event(), [leaves]  # NCCL holds the memory until it is waited for

        def wait(_: Any) -> bool:
            self._timeline.current_stream(device).wait_event(event)
            memory.clear()
            return True

        from torch._C._distributed_c10d import PythonCallbackWork

        work = dist.Work.boxed(PythonCallbackWork(wait))
        return work if len(func._schema.returns) == 1 else (args[0], work)


def _of_cpu(func: Any) -> Any:
    """Return what computes an operation on a CPU, which has no products with results of another dtype."""
    if func is not torch.ops.aten.bmm.dtype:
        return func
    return lambda a, b, dtype: torch.bmm(a.to(dtype), b.to(dtype))


def _group_of(args: Sequence[Any]) -> str:
    boxed = next(a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()))
    return dist.ProcessGroup.unbox(boxed).group_name


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def _call_site(name: str) -> str:
    """Return an operation with the two innermost source lines outside torch and outside this module."""
    frame: FrameType | None = sys._getframe(1)
    lines = list[str]()
    while frame is not None and len(lines) < 2:
        file = frame.f_code.co_filename
        if "/torch/" not in file and file != __file__ and not file.endswith("contextlib.py"):
            lines.append(f"{'/'.join(file.rsplit('/', 2)[1:])}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return f"{name} at {' < '.join(lines)}"
