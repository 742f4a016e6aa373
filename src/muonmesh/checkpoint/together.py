"""Together: work that one rank may fail at, and then all do, with the same sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from muonmesh.errors import FileError


def together(work: Callable[[], None]) -> None:
    """Do something on this rank and return when all ranks have done theirs. Called on all ranks.

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
        message, unexpected = f"rank {dist.get_rank()}: {type(error).__name__}: {error}", error
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, message)
    if unexpected is not None:
        raise unexpected
    for found in everyone:
        if found is not None:
            raise FileError(found)


def on_first_rank(work: Callable[[], None]) -> None:
    """Do something on rank 0 only, and return or fail together."""
    together(work if dist.get_rank() == 0 else _nothing)


def insist_on_the_same(run: Path, given: Mapping[str, Any]) -> None:
    """Make sure that all ranks were given the same values.

    Raises:
        FileError: on every rank, with the first that differs.
    """
    everyone: list[Mapping[str, Any]] = [given] * dist.get_world_size()
    dist.all_gather_object(everyone, given)
    for name in sorted({name for other in everyone for name in other}):
        found = [other.get(name) for other in everyone]
        if any(value != found[0] for value in found):
            values = ", ".join(map(repr, found))
            raise FileError(f"{run}: the ranks were given different {name}: {values}; needed the same on each of them")


def _nothing() -> None:
    pass
