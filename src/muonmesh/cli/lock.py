"""Lock: one run in a directory at a time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from muonmesh.errors import FileError
from muonmesh.files import make_folders, reason, remove_empty

LOCK_FILE = ".lock"


@contextlib.contextmanager
def locked(run: Path, *, option: str) -> Iterator[None]:
    """Hold a run's directory, which is made for ``--out``, until the ``with`` block ends or the process does.

    The system takes the lock back when the process is gone, so a lock left behind never has to be removed by hand. A
    directory in which nothing has been written goes again.

    Raises:
        FileError: another process holds it, a new run would write over something, or the directory cannot be made.
    """
    new, made = option == "--out", list[Path]()
    lock = FileLock(run / LOCK_FILE, timeout=0)
    try:
        try:
            if new:
                made = make_folders(run)
            lock.acquire()
            others = sorted(set(os.listdir(run)) - {LOCK_FILE})
        except Timeout as error:
            raise FileError(
                f"{option} {run}: another process is training there; needed a directory of its own for each run. Wait "
                "for its end, or write another --out"
            ) from error
        except (OSError, ValueError) as error:
            needed = "needed a folder that can be made and written"
            raise FileError(f"{option} {run}: cannot be written: {reason(error)}; {needed}") from error
        if new and others:
            raise FileError(f"--out {run}: already there, with {others[0]}. Write: --resume {run}, or another --out")
        yield
    finally:
        if new and lock.is_locked and os.listdir(run) == [LOCK_FILE]:
            (run / LOCK_FILE).unlink()  # still locked: whoever opened it will find it gone
        lock.release()
        remove_empty(made)
