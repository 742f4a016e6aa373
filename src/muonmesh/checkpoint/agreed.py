"""Agreed: what each rank works out for itself, and every rank then knows of all; where one fails, all do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from muonmesh.comm.storage import world_size
from muonmesh.errors import StateError, about

T = TypeVar("T")


def agreed(work: Callable[[], T]) -> list[T]:
    """Return what the work gives on each rank, in their order. Called on all ranks; what is returned is pickled.

    Raises:
        Exception: on a rank whose work failed what it raised.
        StateError: on the other ranks then, with the message of the first that failed.
    """
    mine: T | None = None
    failure: Exception | None = None
    try:
        mine = work()
    except Exception as error:
        failure = error
    everyone: list[Any] = [(mine, None if failure is None else str(failure))] * world_size()
    if len(everyone) > 1:
        dist.all_gather_object(everyone, everyone[0])
    if failure is not None:
        raise failure
    for rank, (_, message) in enumerate(everyone):
        if message is not None:
            raise StateError(about(f"rank {rank}", message))
    return [value for value, _ in everyone]
