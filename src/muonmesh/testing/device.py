"""A CUDA device that is not there: torch lets fake tensors say that they are on it, and refuses nothing.

Fake tensors (`torch._subclasses.FakeTensorMode`) have a device, a shape and strides, but no elements. Even so a torch
without CUDA stops at them in two places: its C++ guards ask for the device, and `torch.cuda.Event` and `Stream` cannot
be made. Here the guard of the meta device, which does nothing, serves for CUDA too, an event records nothing, and all
streams are the same.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"  # c10::impl::device_guard_impl_registry
_KINDS = 22  # c10::COMPILE_TIME_MAX_DEVICE_TYPES
_CUDA, _META = 1, 14  # c10::DeviceType


class NoEvent:
    """An event on no device: always over."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what `torch.cuda.Event` takes."""

    def record(self, stream: Any = None) -> None:
        """Nothing."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Return that it is over."""
        return True


class NoStream:
    """A stream on no device: always done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what `torch.cuda.Stream` takes."""

    def record_event(self, event: Any = None) -> NoEvent:
        """Return an event that is over."""
        return NoEvent()

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""


_REPLACED: dict[str, Any] = {
    "Event": NoEvent,
    "Stream": NoStream,
    "stream": nullcontext,
    "current_stream": NoStream,
}
"""What stands for it in `torch.cuda`."""


@contextmanager
def pretended_cuda() -> Iterator[None]:
    """Let fake tensors be on CUDA devices, whether or not this torch knows of CUDA.

    What is changed belongs to the process, so nothing else may use torch meanwhile; all is as before afterwards.
    """
    library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
    guards = (ctypes.c_void_p * _KINDS).in_dll(library, _GUARDS)
    guard, real = guards[_CUDA], {name: getattr(torch.cuda, name) for name in _REPLACED}
    guards[_CUDA] = guards[_META]
    for name, other in _REPLACED.items():
        setattr(torch.cuda, name, other)
    try:
        yield
    finally:
        guards[_CUDA] = guard
        for name, own in real.items():
            setattr(torch.cuda, name, own)
