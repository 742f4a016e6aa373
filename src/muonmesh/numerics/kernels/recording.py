"""Recording: repeats the kernel launches of a call without the Python code that prepared them.

Preparing many small kernels takes the CPU longer than the device needs to run them. The launches depend on shapes,
strides, dtypes and numbers of the CPU, which are the same in every step; only addresses change. So a recording keeps
the compiled kernels with their arguments, and replaces changed addresses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from muonmesh.numerics.kernels import triton_launch
from muonmesh.numerics.kernels.triton_launch import STREAM, Launch, on, stream_of, watching

_MOST = 1024
"""The largest number of layouts that are remembered for one function. Beyond it all of them are forgotten."""
_REPEATED = {
    *("mark_nonzero", "fold", "apply", "multiply", "orthogonalize", "measure", "norms", "rescale"),
    *("addmm", "copy_", "lerp", "mul"),
}
"""The operators that a recording may hold. Given tensors of one layout, each starts the same kernels every time. It
reads and writes only these tensors."""


def run_again(
    recordings: dict[Hashable, Any],
    call: Callable[..., object],
    tensors: Sequence[Tensor],
    key: Hashable,
    inputs: Sequence[Tensor] = (),
) -> None:
    """Run ``call(*tensors)``; from the third time for a layout of tensors on, repeat its recorded launches instead.

    Args:
        recordings: The recordings of one function; an empty dict at first.
        call: A function that starts the same kernels in this thread whatever the values of the tensors are. It reads
            and writes only these tensors, and what the kernels find by addresses in them.
        tensors: Tensors on one device. They share no memory.
        key: Equal for calls that start the same kernels on tensors of one layout.
        inputs: Further tensors, which the call only reads. The recording keeps these tensors, so they should be small.
            To change a value, write the tensor in place.
    """
    key = key, *map(Tensor.data_ptr, inputs)
    layouts = [(tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % 64) for tensor in tensors]
    key = key, tensors[0].device, threading.get_ident(), *layouts
    recording = recordings.get(key, 0)
    if recording is None or triton_launch.is_watched(*tensors):
        call(*tensors)
    elif recording == 0:
        call(*tensors)
        if len(recordings) >= _MOST:
            recordings.clear()
        recordings[key] = 1
    elif recording == 1:
        with (fresh := Recording(tensors, inputs)):
            call(*tensors)
        fresh.alive.clear()
        recordings[key] = fresh if fresh.whole else None
    else:
        recording.start(tensors)


class _Location(NamedTuple):
    """The location of a tensor, relative to memory that may be elsewhere in the next step.

    Attributes:
        base: 0 for memory that the recorded call allocates itself, n for the n-th of the tensors that it was given.
        offset: Bytes from the start of this memory.
        shape, strides, dtype: Those of the tensor.
    """

    base: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def of(self, bases: Sequence[Tensor]) -> Tensor:
        base = bases[self.base].view(self.dtype)
        return base.as_strided(self.shape, self.strides, base.storage_offset() + self.offset // self.dtype.itemsize)


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The launches of one call on a device, which can be started again on other tensors of the same layout.

    The calls, all of them in the thread that started the call, on each rank by itself:

    1. ``with recording: call(...)`` runs the call, and records each operator and kernel that it starts.
    2. `whole` says whether the recording can replace the call. If not, drop it.
    3. ``alive.clear()`` frees the tensors of the recorded call.
    4. `start` does the work of the call on new tensors, as often as you like.

    Args:
        tensors, inputs: See `run_again`.

    Attributes:
        whole: Whether every operation of the call can be started again.
        alive: All tensors that the call has used. While they live, no two of them can have the same address.
    """

    def __init__(self, tensors: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.whole, self._size, self._device = True, 0, triton_launch.device_of(tensors[0])
        self._parts: list[tuple[Callable[..., Any], list[Any], dict[str, Any] | None]] = []
        self._moving: list[tuple[list[Any], int, int, int]] = []
        self._last: list[int] = []  # the stream, and the addresses of the bases, that the arguments have
        self._inputs = {tensor.untyped_storage().data_ptr(): tensor for tensor in inputs}
        self._allocated_offsets: dict[int, int] = {}  # where each storage of the call's own lies in its memory
        self.alive: list[object] = []
        ends = [sum((n - 1) * by for n, by in zip(t.shape, t.stride(), strict=True)) + 1 for t in tensors]
        self._ranges = [range(t.data_ptr(), t.data_ptr() + n * t.itemsize) for t, n in zip(tensors, ends, strict=True)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        watching.launches = launches = list[Launch]()
        try:
            result = func(*args, **kwargs)
        finally:
            watching.launches = None
        self.alive.append((args, kwargs, result))
        if func.is_view or name.startswith("empty") or name == "promote_types":
            return result
        parameters = func._schema.arguments
        named = {parameter.name: value for parameter, value in zip(parameters, args, strict=False)} | kwargs
        writes = [named[parameter.name] for parameter in parameters if parameter.alias_info and parameter.name in named]
        self.whole = self.whole and name in _REPEATED
        for value in named.values():
            self._placed(value, writes=any(value is written for written in writes))
        for launch in launches:
            prepared = launch.prepare(self._device)
            run, before = prepared or (launch._replace(arguments=()).run_on, [self._device])
            values = [*map(self._placed, launch.arguments)]
            if prepared:
                values = [value.data_ptr() if isinstance(value, Tensor) else value for value in values]
            self._add(run, [*before, *values], None if prepared else {})
        if not launches:
            into = kwargs if writes else {**kwargs, "out": result}
            options = {name: self._placed(value, writes=True) for name, value in into.items()}
            self._add(getattr(torch, name, func), [*map(self._placed, args)], options)
        return result

    def _add(self, run: Callable[..., Any], arguments: list[Any], options: dict[str, Any] | None) -> None:
        self._parts.append((run, arguments, options))
        if options is None:
            locations = [(number, value) for number, value in enumerate(arguments) if isinstance(value, _Location)]
            self._moving.append((arguments, STREAM, 0, 0))
            self._moving += [(arguments, number, location.base + 1, location.offset) for number, location in locations]

    def _placed(self, value: Any, *, writes: bool = False) -> Any:
        """Return a `_Location` for a tensor, except for one of ``inputs``; and any other value as it is.

        The call must write memory that it allocates before it reads this memory: if it does not, `whole` becomes False.
        """
        if not isinstance(value, Tensor):
            return value
        address, storage, kind = value.data_ptr(), value.untyped_storage(), (value.shape, value.stride(), value.dtype)
        for number, addresses in enumerate(self._ranges, 1):
            if address in addresses:
                return _Location(number, address - addresses.start, *kind)
        if storage.data_ptr() in self._inputs:
            return value
        if storage.data_ptr() not in self._allocated_offsets:
            self.whole = self.whole and writes
            self._allocated_offsets[storage.data_ptr()] = self._size
            self._size += -(-storage.nbytes() // 256) * 256
        return _Location(0, self._allocated_offsets[storage.data_ptr()] + address - storage.data_ptr(), *kind)

    def start(self, tensors: Sequence[Tensor]) -> None:
        """Start what was recorded, on tensors of the same layout.

        Args:
            tensors: As many as were given to the recorded call, in the same order.
        """
        bases = torch.empty(self._size, dtype=torch.uint8, device=tensors[0].device), *tensors
        with on(self._device):
            last = [stream_of(self._device), *map(Tensor.data_ptr, bases)]
            if last != self._last:
                for arguments, number, base, offset in self._moving:
                    arguments[number] = last[base] + offset
                self._last = last
            for run, arguments, options in self._parts:
                if options is None:
                    run(*arguments)
                else:
                    named = {name: _tensor(value, bases) for name, value in options.items()}
                    run(*[_tensor(value, bases) for value in arguments], **named)


def _tensor(value: Any, bases: Sequence[Tensor]) -> Any:
    return value.of(bases) if isinstance(value, _Location) else value
