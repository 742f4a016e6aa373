"""Lock: allows only one run in a directory at a time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from muonmesh.errors import FileError
from muonmesh.files import writing

LOCK_FILE = ".lock"


def check_new(run: Path) -> None:
    """Raise FileError if the directory of a new run exists and has any files."""
    if os.path.lexists(run) and (not run.is_dir() or set(os.listdir(run)) - {LOCK_FILE}):
        raise FileError(f"--out {run}: already there. Write: --resume {run}, or another --out")


@contextlib.contextmanager
def locked(run: Path, *, option: str) -> Iterator[None]:
    """Return a context that holds the lock of a run's directory, which is created if it does not exist.

    The operating system frees the lock when the process ends, so a lock never has to be removed by hand.

    Args:
        run: The run's directory.
        option: The option that gave the directory. With "--out", the directory must have no files of a run yet.

    Raises:
        FileError: another process holds the lock, the directory of a new run has files, or it cannot be created.
    """
    lock = FileLock(run / LOCK_FILE, timeout=0)
    with writing(run):
        run.mkdir(parents=True, exist_ok=True)
        try:
            held = lock.acquire()
        except Timeout as error:
            raise FileError(
                f"{option} {run}: another process is training there; needed a directory of its own for each run. Wait "
                "for its end, or write another --out"
            ) from error
    with held:
        if option == "--out":
            check_new(run)
        yield
