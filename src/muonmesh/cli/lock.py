"""Lock: one run in a directory at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
from pathlib import Path
from types import TracebackType

from muonmesh.cli.failure import RunError
from muonmesh.errors import FileError
from muonmesh.files import make_folders, reason, remove_empty

LOCK_FILE = ".lock"
CANNOT_LOCK = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


class RunLock:
    """Holds a run's directory, which it makes, until the ``with`` block ends or the process does.

    The system gives the lock to one process and takes it back when that process is gone, however it went, so a lock
    left behind never has to be removed by hand. A directory in which nothing has been written goes again.

    Raises:
        RunError: on entering: another process holds it, a new run would write over something, or the directory cannot
            be made.
    """

    def __init__(self, run: Path, *, option: str) -> None:
        self.run, self.option = run, option
        self._new = option == "--out"
        self._file: int | None = None
        self._made: list[Path] = []

    def __enter__(self) -> RunLock:
        try:
            if self._new:
                self._made = make_folders(self.run)
            self._take()
        except (OSError, ValueError) as error:
            self._release()
            if isinstance(error, FileError):
                raise
            raise RunError(
                f"{self.option} {self.run}: cannot be written: {reason(error)}; needed a folder that can be made and "
                "written"
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def _take(self) -> None:
        path = self.run / LOCK_FILE
        while True:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(self._file, 20).decode("ascii", "replace").strip()
                self._made = []  # they are the other's
                os.close(self._file)
                self._file = None
                raise RunError(
                    f"{self.option} {self.run}: process {holder or 'unknown'} is training there; needed a directory "
                    "of its own for each run. Wait for its end, or write another --out"
                ) from None
            except OSError as error:
                if error.errno not in CANNOT_LOCK:
                    raise
                print(
                    f"muonmesh train: {self.run} cannot be locked ({reason(error)}): start no second run there",
                    file=sys.stderr,
                )
            if self._is_still_there(path):
                break
            os.close(self._file)  # its last holder removed it between our opening and our locking
            self._file = None
        if self._new and (found := sorted(os.listdir(self.run))) != [LOCK_FILE]:
            others = [name for name in found if name != LOCK_FILE]
            raise RunError(
                f"--out {self.run}: already there, with {others[0]}. Write: --resume {self.run}, or another --out"
            )
        os.ftruncate(self._file, 0)
        os.write(self._file, f"{os.getpid()}\n".encode())

    def _is_still_there(self, path: Path) -> bool:
        assert self._file is not None
        try:
            return os.path.samestat(os.fstat(self._file), path.lstat())
        except FileNotFoundError:
            return False

    def _release(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                if self._new and os.listdir(self.run) == [LOCK_FILE]:
                    (self.run / LOCK_FILE).unlink()  # still locked: whoever opened it will find it gone
            os.close(self._file)
            self._file = None
        remove_empty(self._made)


def holder_of(path: Path) -> str | None:
    """The process that holds a lock, as it wrote itself down; None where nobody does. Nothing is changed."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.read(file, 20).decode("ascii", "replace").strip() or "unknown"
    except OSError:
        return None
    finally:
        os.close(file)
    return None
