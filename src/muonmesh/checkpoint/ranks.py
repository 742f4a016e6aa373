"""Ranks: runs work on every rank, and raises on all ranks if the work fails on one.

Every rank raises the same FileError. `muonmesh.comm.telling.agreed` is for what a rank works out from its own model and
optimizer: every rank gets the results of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from muonmesh.comm.storage import this_rank
from muonmesh.comm.telling import agreed, tell_all
from muonmesh.errors import FileError, MuonMeshError, StateError

T = TypeVar("T")


def settled(work: Callable[[], T], *, kind: type[MuonMeshError] = StateError) -> T:
    """Return what the work gives on this rank, once it has succeeded on all. Called on all ranks.

    Raises:
        Exception: on a rank whose work failed, what it raised.
        MuonMeshError: of that kind on the others, which tells of it.
    """
    found: list[T] = []
    agreed(lambda: found.append(work()), kind=kind)
    return found[0]


def together(work: Callable[[], T]) -> T:
    """Return what the work gives on this rank, once it has succeeded on all. Called on all ranks.

    Raises:
        FileError: on every rank, with the message of the first rank that failed.
        Exception: on a rank that met something else, what it met; the others raise a FileError that tells of it.
    """
    found: list[T] = []

    def told() -> str | None:
        try:
            found.append(work())
        except FileError as error:
            return str(error)
        return None

    for message in agreed(told, kind=FileError):
        if message is not None:
            raise FileError(message)
    return found[0]


def on_first_rank(work: Callable[[], None]) -> None:
    """Do something on rank 0 only, and return or fail together."""
    together(work if this_rank() == 0 else lambda: None)


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
