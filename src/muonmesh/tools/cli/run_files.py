"""Run files: what the launcher and the ranks of a run share in its directory: a lock, and one file for each error.

Only one run trains in a directory at a time. A rank's error reaches the launcher before the rank's sockets close.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from muonmesh.errors import FileError
from muonmesh.files import scratch_of, writing
from muonmesh.tools.cli.run_settings import CONFIG_FILE
from muonmesh.tools.cli.terminal import complain

LOCK_FILE = ".lock"
LAUNCHER = "MUONMESH_LAUNCHER"  # environment: the process that started the ranks
FOLDER = "errors"  # the folder in a run's directory, while its ranks run
ROOM = 32 * 1024  # bytes of each rank's file, reserved when a run starts, since the error may be a full disk


def check_new(run: Path) -> None:
    """Raise FileError if the directory of a new run exists and has any files, but for what a killed start leaves."""
    if os.path.lexists(run) and (not run.is_dir() or set(os.listdir(run)) - {LOCK_FILE, scratch_of(CONFIG_FILE)}):
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
            acquired = lock.acquire()
        except Timeout as error:
            raise FileError(
                f"{option} {run}: another process is training there; needed a directory of its own for each run. Wait "
                "for its end, or write another --out"
            ) from error
    with acquired:
        if option == "--out":
            check_new(run)
        yield


def make_room(run: Path, ranks: int) -> None:
    """Reserve the disk space for the errors of all ranks.

    Raises:
        OSError: the files cannot be written.
    """
    for rank in range(ranks):
        (run / FOLDER / str(rank)).write_bytes(b" " * ROOM)


def record_failure(run: Path, rank: int, error: BaseException) -> None:
    """Write an error to this rank's file for the launcher; without such a file, print it on stderr."""
    trace = "" if isinstance(error, FileError) else "".join(traceback.format_exception(error))[-ROOM // 8 :] + "\n"
    who = f"rank {rank}: {type(error).__name__}: " if trace else ""  # a FileError needs no traceback
    text = f"{trace}{who}{str(error)[: ROOM // 16]}"  # a character may take four bytes
    try:
        with (run / FOLDER / str(rank)).open("r+b") as stream:  # overwrites the reserved space
            stream.write(json.dumps([time.time_ns(), text], ensure_ascii=False).encode("utf-8", "replace"))
    except OSError:
        complain("train", *text.split("\n"), code=1)


def first_failure(run: Path) -> str | None:
    """Return the first error that a rank has written, which caused the others; None if there is no error."""
    failures = []
    for file in (run / FOLDER).glob("*"):
        with contextlib.suppress(OSError, ValueError):  # unused reserved space is no JSON
            failures.append(json.loads(file.read_text()))
    return min(failures)[1] if failures else None
