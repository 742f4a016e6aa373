"""Ranks: work that every rank does, and that fails on all ranks if it fails on one.

`together` is for work on files, where every rank raises the same FileError; `agreed` is for what each rank works out of
its own model and optimizer, and gives every rank the results of all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from muonmesh.comm.telling import tell_all
from muonmesh.errors import FileError, StateError

T = TypeVar("T")


def rank_in(group: dist.ProcessGroup | None = None) -> int:
    """The number of this rank in a group, None for the default one; 0 where there is one process alone."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def ranks_in(group: dist.ProcessGroup | None = None) -> int:
    """How many ranks a group has, None for the default one; 1 where there is one process alone."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def together(work: Callable[[], None], group: dist.ProcessGroup | None = None) -> None:
    """Do something on this rank and return when all ranks have done theirs. Called on all ranks of the group.

    Raises:
        FileError: on every rank, with the message of the first rank that failed.
        Exception: on a rank that met something else, what it met; the others raise a FileError that tells of it.
    """
    message: str | None = None
    unexpected: Exception | None = None
    try:
        work()
    except FileError as error:
        message = str(error)
    except Exception as error:
        unexpected = error
    for found in tell_all(message, unexpected, group=group, kind=FileError):
        if found is not None:
            raise FileError(found)


def agreed(work: Callable[[], T]) -> list[T]:
    """Return what the work gives on each rank, in their order. Called on all ranks; what is returned is pickled.

    Raises:
        Exception: on a rank whose work failed, what it raised.
        StateError: on the other ranks then, with the message of the first that failed.
    """
    mine: Any = None
    failure: Exception | None = None
    try:
        mine = work()
    except Exception as error:
        failure = error
    found: list[T] = tell_all(mine, failure, kind=StateError)
    return found


def on_first_rank(work: Callable[[], None], group: dist.ProcessGroup | None = None) -> None:
    """Do something on the group's rank 0 only, and return or fail together."""
    together(work if rank_in(group) == 0 else _nothing, group)


def insist_on_the_same(run: Path, given: Mapping[str, Any]) -> None:
    """Make sure that all ranks were given the same values.

    Raises:
        FileError: on every rank, with the first that differs.
    """
    everyone = tell_all(given)
    for name in sorted({name for other in everyone for name in other}):
        found = [other.get(name) for other in everyone]
        if any(value != found[0] for value in found):
            values = ", ".join(map(repr, found))
            raise FileError(f"{run}: the ranks were given different {name}: {values}; needed the same on each of them")


def _nothing() -> None:
    pass
