"""Memory that a thread keeps between steps, instead of allocating it from the system in every step."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")

ALIGNMENT = 64
"""Alignment of matrices in bytes: that of torch's memory on a CPU. The bits of a product depend on it."""

_VIEWS = 512
"""Number of shapes whose views are kept for each role."""

_own = threading.local()


def keep(key: Hashable, make: Callable[[], T]) -> T:
    """Return the object that ``make`` returned for this key in this thread; ``make`` runs at the first call only."""
    kept: dict[Hashable, object] = _own.__dict__.setdefault("kept", {})
    if key not in kept:
        kept[key] = make()
    return cast(T, kept[key])


def upload(values: Sequence[object], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers as a tensor on a device, copied from pinned memory, so that the CPU does not wait."""
    return pinned(torch.tensor(values, dtype=dtype, device="cpu"), device)


def pinned(host: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device from pinned memory without waiting; torch keeps the memory until it is read."""
    return host if device.type == "cpu" else _pinned(host).to(device, non_blocking=True)


def rewrite(tensor: Tensor, values: Tensor) -> None:
    """Copy values into a tensor; from a CPU to a device in the same way."""
    arriving = tensor.device.type != "cpu" and values.device.type == "cpu"
    tensor.copy_(_pinned(values) if arriving else values, non_blocking=True)


def _pinned(host: Tensor) -> Tensor:
    return torch.empty_like(host, pin_memory=torch.cuda.is_available()).copy_(host)


def download(tensor: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Return a copy in CPU memory, without waiting, and the event after which it can be read; None: it can be now."""
    if not tensor.is_cuda:
        return tensor, None
    host = torch.empty_like(tensor, device="cpu", pin_memory=torch.cuda.is_available())
    host.copy_(tensor, non_blocking=True)
    return host, torch.cuda.current_stream(tensor.device).record_event()  # whichever device is the current one


def scratch(role: str, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uninitialized memory of this thread, which the thread's next call for the same role reuses.

    On a CPU, memory that is given back and taken again at every step costs a page fault per 4 KiB, 5 to 8 % of a step
    (measured). What is kept is the largest that each role has needed. Elsewhere torch's allocator does this.
    """
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    shape = shape if isinstance(shape, tuple) else tuple(shape)
    kept: dict[tuple[str, torch.dtype], dict[Sequence[int] | None, Tensor]] = _own.__dict__.setdefault("scratch", {})
    views = kept.get((role, dtype))
    if views is not None and (view := views.get(shape)) is not None:
        return view
    numel = math.prod(shape)
    memory = None if views is None else views[None]
    if memory is None or memory.numel() < numel or views is None or len(views) > _VIEWS:
        kept.pop((role, dtype), None)
        if memory is None or memory.numel() < numel:
            del memory, views  # first, so that both are never there at once
            memory = torch.empty(numel, dtype=dtype, device=device)
        views = kept[role, dtype] = {None: memory}
    view = views[shape] = memory[:numel].view(shape)
    return view
