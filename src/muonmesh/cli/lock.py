"""Lock: one run in a directory at a time."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

from filelock import FileLock, Timeout

from muonmesh.errors import FileError
from muonmesh.files import make_folders, reason, remove_empty

LOCK_FILE = ".lock"


class RunLock:
    """Holds a run's directory, which it makes, until the ``with`` block ends or the process does.

    The system takes the lock back when the process is gone, so a lock left behind never has to be removed by hand. A
    directory in which nothing has been written goes again.

    Raises:
        FileError: on entering: another process holds it, a new run would write over something, or the directory cannot
            be made.
    """

    def __init__(self, run: Path, *, option: str) -> None:
        self.run, self.option, self._new = run, option, option == "--out"
        self._lock = FileLock(run / LOCK_FILE, timeout=0)
        self._made: list[Path] = []

    def __enter__(self) -> RunLock:
        self.take()
        return self

    def take(self) -> None:
        """Do what entering does."""
        try:
            if self._new:
                self._made = make_folders(self.run)
            self._lock.acquire()
            others = sorted(set(os.listdir(self.run)) - {LOCK_FILE})
            if self._new and others:
                write = f"Write: --resume {self.run}, or another --out"
                raise FileError(f"--out {self.run}: already there, with {others[0]}. {write}")
        except Timeout as error:
            raise FileError(
                f"{self.option} {self.run}: another process is training there; needed a directory of its own for each "
                "run. Wait for its end, or write another --out"
            ) from error
        except (OSError, ValueError) as error:
            self.release()
            if isinstance(error, FileError):
                raise
            needed = "needed a folder that can be made and written"
            raise FileError(f"{self.option} {self.run}: cannot be written: {reason(error)}; {needed}") from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Do what leaving does."""
        if self._new and self._lock.is_locked and os.listdir(self.run) == [LOCK_FILE]:
            (self.run / LOCK_FILE).unlink()  # still locked: whoever opened it will find it gone
        self._lock.release()
        remove_empty(self._made)
