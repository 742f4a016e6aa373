"""Clock: where the time of a step goes, without making the host wait for the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

Moment = float | torch.cuda.Event


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step on this rank. ``communication`` is what compute did not hide; None where nobody can tell."""

    total: float
    forward_backward: float
    optimizer: float
    communication: float | None


def moment(device: torch.device) -> Moment:
    """Now: the host's clock for a CPU, an event in the current stream for a GPU."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def seconds_between(first: Moment, last: Moment) -> float:
    """Seconds from one moment to another; on a GPU both must have passed."""
    if isinstance(first, torch.cuda.Event) and isinstance(last, torch.cuda.Event):
        return float(first.elapsed_time(last)) / 1e3
    if isinstance(first, torch.cuda.Event) or isinstance(last, torch.cuda.Event):
        raise TypeError("two moments of different devices")
    return last - first


class CollectiveClock:
    """Host seconds spent waiting for collectives inside ``with`` blocks, summed until :meth:`take`.

    With gloo every wait of FSDP2 ends in ``Work.wait``, and every wait of a DTensor (tensor parallelism, clipping) in
    ``wait_tensor``. Torch gives no hook for either; so they are wrapped for the duration of the block. DDP waits in
    C++, at the end of backward: what it does after its last bucket is ready is waiting. With NCCL a wait returns at
    once and orders streams instead: there is nothing for the host to measure, and nothing is counted.
    """

    def __init__(self, model: nn.Module) -> None:
        self._seconds = 0.0
        self._originals: tuple[Any, Any] | None = None
        self._last_bucket: float | None = None
        if isinstance(model, DistributedDataParallel) and model.device_type == "cpu":
            model.register_comm_hook(None, lambda _, bucket: self._reduce(bucket))

    def __enter__(self) -> CollectiveClock:
        self._originals = dist.Work.wait, functional.wait_tensor
        dist.Work.wait = self._timed(dist.Work.wait)  # type: ignore[method-assign]
        functional.wait_tensor = self._timed(functional.wait_tensor)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._originals is not None
        dist.Work.wait, functional.wait_tensor = self._originals  # type: ignore[method-assign]
        if self._last_bucket is not None:
            self._seconds += time.perf_counter() - self._last_bucket
            self._last_bucket = None

    def take(self) -> float:
        """The seconds so far; counting starts again from zero."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _timed(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return wait(*args, **kwargs)
            finally:
                self._seconds += time.perf_counter() - start

        return timed

    def _reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """DDP's own reduction of a bucket, with the time at which it was asked for."""
        self._last_bucket = time.perf_counter()
        return allreduce_hook(None, bucket)  # type: ignore[arg-type]
