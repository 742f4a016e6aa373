"""gather_objects: ranks exchange Python objects, and an error on one rank is raised on all of them.

Work that may fail on one rank is run by `results_of_all_ranks`, which also gives every rank the results of all ranks;
by `settled`, whose result stays on its rank; or by `on_every_rank`, which raises the same FileError on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from muonmesh.comm.storage import this_rank
from muonmesh.errors import FileError, MuonMeshError, PlanError, StateError, about

K = TypeVar("K")
T = TypeVar("T")

_device = torch.device("cpu")
"""The device of the parameters. Torch sends objects by the current device, which several ranks may have in common."""


def send_objects_by(device: torch.device) -> None:
    """Let the messages of this process travel by a device from now on: that of its parameters."""
    global _device
    _device = device


def gather_objects(
    item: T,
    error: Exception | None = None,
    *,
    group: dist.ProcessGroup | Literal["world"] | None = "world",
    kind: type[MuonMeshError] = PlanError,
) -> list[T]:
    """Gather a Python object from every rank of a group, in their order; all ranks call it.

    Args:
        item: The object of this rank; it is pickled.
        error: The error that this rank found, if any.
        group: The ranks; None: this rank alone.
        kind: The class of the error that the other ranks raise.

    Raises:
        Exception: ``error`` on the ranks that have one.
        MuonMeshError: an error of class ``kind`` on the other ranks, with the number and message of the first rank that
            has an error.
    """
    group = dist.group.WORLD if group == "world" else group
    if group is None or dist.get_world_size(group) == 1:
        if error is not None:
            raise error
        return [item]
    message = None if error is None else str(error)
    if not isinstance(error, MuonMeshError | ValueError | TypeError | None):
        message = f"{type(error).__name__}: {message}"
    everyone: list[tuple[T, str | None]] = [(item, message)] * dist.get_world_size(group)
    by_host = "cpu:" in dist.get_backend_config(group)
    with torch.accelerator.device_index(None if by_host else _device.index):
        dist.all_gather_object(everyone, (item, message), group=group)
    if error is not None:
        raise error
    for rank, (_, text) in zip(dist.get_process_group_ranks(group), everyone, strict=True):
        if text is not None:
            raise kind(about(f"rank {rank}", text))
    return [value for value, _ in everyone]


def gather_objects_by_rank(item: T, error: Exception | None = None, *, group: dist.ProcessGroup | None) -> dict[int, T]:
    """Gather an object from every rank of a group as `gather_objects` does; return the objects by rank."""
    ranks = [this_rank()] if group is None else dist.get_process_group_ranks(group)
    return dict(zip(ranks, gather_objects(item, error, group=group), strict=True))


def results_of_all_ranks(work: Callable[[], T], *, kind: type[MuonMeshError] = PlanError) -> list[T]:
    """Call ``work`` on each rank, and return the results of all ranks in order. All ranks call this.

    The results are pickled.

    Raises:
        Exception: the error of ``work``, on each rank where it failed.
        MuonMeshError: an error of class ``kind`` on the other ranks, with the message of the first rank that failed.
    """
    result: Any = None
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:
        failure = error
    return gather_objects(result, failure, kind=kind)


def settled(work: Callable[[], T], *, kind: type[MuonMeshError] = StateError) -> T:
    """Run work on all ranks, and return this rank's result when the work has succeeded on all. Called on all ranks.

    Raises:
        Exception: on a rank whose work failed: the error of the work.
        MuonMeshError: on the other ranks: an error of the class ``kind`` that reports the failure.
    """
    results: list[T] = []
    results_of_all_ranks(lambda: results.append(work()), kind=kind)
    return results[0]


def on_every_rank(work: Callable[[], T]) -> T:
    """Run work on all ranks, and return this rank's result when the work has succeeded on all. Called on all ranks.

    Raises:
        FileError: on every rank, if the work raised a FileError: the message of the first rank that failed.
        Exception: on a rank whose work raised another error: this error. The other ranks raise a FileError that reports
            it.
    """
    results: list[T] = []

    def report() -> str | None:
        try:
            results.append(work())
        except FileError as error:
            return str(error)
        return None

    for message in results_of_all_ranks(report, kind=FileError):
        if message is not None:
            raise FileError(message)
    return results[0]


def first_difference(of_ranks: Iterable[Mapping[K, object]]) -> tuple[K, int, int] | None:
    """Return the first key whose values differ between ranks that have it, and the first two such ranks; else None."""
    first: dict[K, tuple[int, object]] = {}
    for rank, values in enumerate(of_ranks):
        for key, value in values.items():
            before, expected = first.setdefault(key, (rank, value))
            if value != expected:
                return key, before, rank
    return None


def on_first_rank(work: Callable[[], None]) -> None:
    """Run work on rank 0 only; if it fails, raise on all ranks. Called on all ranks."""
    on_every_rank(work if this_rank() == 0 else lambda: None)
