"""Lock: one run in a directory at a time."""

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
    """Make sure that a new run would write over nothing; a FileError otherwise."""
    if os.path.lexists(run) and (not run.is_dir() or set(os.listdir(run)) - {LOCK_FILE}):
        raise FileError(f"--out {run}: already there. Write: --resume {run}, or another --out")


@contextlib.contextmanager
def locked(run: Path, *, option: str) -> Iterator[None]:
    """Hold a run's directory, which is made for ``--out``, until the ``with`` block ends or the process does.

    The system takes the lock back when the process is gone, so a lock left behind never has to be removed by hand.

    Raises:
        FileError: another process holds it, a new run would write over something, or the directory cannot be made.
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
