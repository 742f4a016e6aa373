"""A CUDA device that is not there: torch lets fake tensors say that they are on it, and refuses nothing.

Fake tensors (`torch._subclasses.FakeTensorMode`) have a device, a shape and strides, but no elements. Even so a torch
without CUDA stops at them in two places: its C++ guards ask for the device, and `torch.cuda.Event` and `Stream` cannot
be made. Here the guard of the meta device, which does nothing, serves for CUDA too. Nothing runs on a stream, so all
that an event follows is over.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, cast

import torch

from muonmesh.numerics.kernels import memory

_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"  # c10::impl::device_guard_impl_registry
_KINDS = 22  # c10::COMPILE_TIME_MAX_DEVICE_TYPES
_CUDA, _META = 1, 14  # c10::DeviceType


class Event:
    """Stands for `torch.cuda.Event`."""

    def record(self, stream: Stream | None = None) -> None:
        """Mark nothing."""

    def synchronize(self) -> None:
        """Wait for nothing."""

    def query(self) -> bool:
        """Return whether it is over."""
        return True


class Stream:
    """Stands for `torch.cuda.Stream`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", 0)

    def wait_event(self, event: Event) -> None:
        """Wait for nothing."""

    def wait_stream(self, stream: Stream) -> None:
        """Wait for nothing."""

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event that is over."""
        return event or Event()


@contextmanager
def pretended_cuda(**replaced: Any) -> Iterator[None]:
    """Let fake tensors be on CUDA devices, whether or not this torch knows of CUDA.

    What is changed belongs to the process, so nothing else may use torch meanwhile; all is as before afterwards.

    Args:
        replaced: What else stands for it in `torch.cuda`.
    """
    library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
    guards = cast(Any, (ctypes.c_void_p * _KINDS).in_dll(library, _GUARDS))
    stands = {
        "Event": Event,
        "Stream": Stream,
        "stream": nullcontext,
        "device": nullcontext,
        "current_stream": Stream,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        **replaced,
    }
    with ExitStack() as stack:
        stack.callback(guards.__setitem__, _CUDA, guards[_CUDA])
        guards[_CUDA] = guards[_META]
        for name, other in stands.items():
            stack.callback(setattr, torch.cuda, name, getattr(torch.cuda, name))
            setattr(torch.cuda, name, other)
        memory.forget()  # streams of other devices
        stack.callback(memory.forget)
        yield
