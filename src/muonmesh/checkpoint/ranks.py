"""Ranks: runs work on every rank, and raises on all ranks if the work fails on one rank.

`on_every_rank` raises the same FileError on every rank. `results_of_all_ranks` also gives every rank the
results of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from muonmesh.comm.gather_objects import results_of_all_ranks
from muonmesh.comm.storage import this_rank
from muonmesh.errors import FileError, MuonMeshError, StateError

K = TypeVar("K")
T = TypeVar("T")


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
