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
    *("fold", "apply", "multiply", "orthogonalize", "measure", "norms", "rescale"),
    *("copy_", "lerp", "mul"),
}
"""The operators that a recording may hold. Given tensors of one layout, each starts the same kernels every time. It
reads and writes only these tensors."""


def run_again(
    found: dict[Hashable, Any],
    call: Callable[..., object],
    given: Sequence[Tensor],
    key: Hashable,
    beside: Sequence[Tensor] = (),
) -> None:
    """Run ``call(*given)``; from the third time for a layout of tensors on, repeat its recorded launches instead.

    Args:
        found: The recordings of one function; an empty dict at first.
        call: A function that starts the same kernels in this thread whatever the values of the tensors are. It reads
            and writes only these tensors, and what the kernels find by addresses in them.
        given: Tensors on one device. They share no memory.
        key: Equal for calls that start the same kernels on tensors of one layout.
        beside: Further tensors, which are only read. They are kept, so they should be small, and written in place.
    """
    key = key, *map(Tensor.data_ptr, beside)
    layouts = [(tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % 64) for tensor in given]
    key = key, given[0].device, threading.get_ident(), *layouts
    known = found.get(key, 0)
    if known is None or triton_launch.is_watched(*given):
        call(*given)
    elif known == 0:
        call(*given)
        if len(found) >= _MOST:
            found.clear()
        found[key] = 1
    elif known == 1:
        with (recording := Recording(given, beside)):
            call(*given)
        recording.alive.clear()
        found[key] = recording if recording.whole else None
    else:
        known.start(given)


class _Place(NamedTuple):
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
        given, beside: See `run_again`.

    Attributes:
        whole: Whether every operation of the call can be started again.
        alive: All tensors that the call has used. While they live, no two of them can have the same address.
    """

    def __init__(self, given: Sequence[Tensor], beside: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.whole, self._size, self._device = True, 0, triton_launch.device_of(given[0])
        self._parts: list[tuple[Callable[..., Any], list[Any], dict[str, Any] | None]] = []
        self._moving: list[tuple[list[Any], int, int, int]] = []
        self._last: list[int] = []  # the stream, and the addresses of the bases, that the arguments have
        self._beside = {tensor.untyped_storage().data_ptr(): tensor for tensor in beside}
        self._own: dict[int, int] = {}  # where each storage of the call's own lies in its memory
        self.alive: list[object] = []
        ends = [sum((n - 1) * by for n, by in zip(t.shape, t.stride(), strict=True)) + 1 for t in given]
        self._given = [range(t.data_ptr(), t.data_ptr() + end * t.itemsize) for t, end in zip(given, ends, strict=True)]

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
        told = {parameter.name: value for parameter, value in zip(parameters, args, strict=False)} | kwargs
        writes = [told[parameter.name] for parameter in parameters if parameter.alias_info and parameter.name in told]
        self.whole = self.whole and name in _REPEATED
        for value in told.values():
            self._placed(value, writes=any(value is written for written in writes))
        for launch in launches:
            prepared = launch.prepare(self._device)
            run, before = prepared or (launch._replace(arguments=()).run_on, [self._device])
            arguments = [*map(self._placed, launch.arguments)]
            if prepared:
                arguments = [value.data_ptr() if isinstance(value, Tensor) else value for value in arguments]
            self._add(run, [*before, *arguments], None if prepared else {})
        if not launches:
            into = kwargs if writes else {**kwargs, "out": result}
            options = {name: self._placed(value, writes=True) for name, value in into.items()}
            self._add(getattr(torch, name, func), [*map(self._placed, args)], options)
        return result

    def _add(self, run: Callable[..., Any], arguments: list[Any], options: dict[str, Any] | None) -> None:
        self._parts.append((run, arguments, options))
        if options is None:
            places = [(number, value) for number, value in enumerate(arguments) if isinstance(value, _Place)]
            self._moving.append((arguments, STREAM, 0, 0))
            self._moving += [(arguments, number, place.base + 1, place.offset) for number, place in places]

    def _placed(self, value: Any, *, writes: bool = False) -> Any:
        """Return a `_Place` for a tensor, except for one of ``beside``; and any other value as it is.

        The call must write memory that it allocates before it reads this memory: if it does not, `whole` becomes False.
        """
        if not isinstance(value, Tensor):
            return value
        address, storage, kind = value.data_ptr(), value.untyped_storage(), (value.shape, value.stride(), value.dtype)
        for number, addresses in enumerate(self._given, 1):
            if address in addresses:
                return _Place(number, address - addresses.start, *kind)
        if storage.data_ptr() in self._beside:
            return value
        if storage.data_ptr() not in self._own:
            self.whole = self.whole and writes
            self._own[storage.data_ptr()] = self._size
            self._size += -(-storage.nbytes() // 256) * 256
        return _Place(0, self._own[storage.data_ptr()] + address - storage.data_ptr(), *kind)

    def start(self, given: Sequence[Tensor]) -> None:
        """Start what was recorded, on tensors of the same layout.

        Args:
            given: As many tensors as were given to the recorded call, in the same order.
        """
        bases = torch.empty(self._size, dtype=torch.uint8, device=given[0].device), *given
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
    return value.of(bases) if isinstance(value, _Place) else value
