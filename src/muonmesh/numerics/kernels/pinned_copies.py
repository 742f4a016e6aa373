"""Copies of small tensors between a CPU and a device, for which the CPU does not wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(values: Sequence[object], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers as a tensor on a device, copied from pinned memory, so that the CPU does not wait."""
    return pinned(torch.tensor(values, dtype=dtype, device="cpu"), device)


def pinned(host: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device from pinned memory without waiting; torch keeps the memory until it is read."""
    return host if device.type == "cpu" else _pinned(host).to(device, non_blocking=True)


def rewrite(tensor: Tensor, values: Tensor) -> None:
    """Copy values into a tensor, from a CPU to a device from pinned memory, so that the CPU does not wait."""
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
