"""Failure: passes a rank's error to the launcher, in one file for each rank, before the rank's sockets close."""

from __future__ import annotations

import contextlib
import json
import time
import traceback
from pathlib import Path

from muonmesh.errors import FileError
from muonmesh.tools.cli.terminal import complain

LAUNCHER = "MUONMESH_LAUNCHER"  # environment: the process that started the ranks
FOLDER = "errors"  # the folder in a run's directory, while its ranks run
ROOM = 32 * 1024  # bytes of each rank's file, reserved when a run starts, since the error may be a full disk


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
    found = []
    for file in (run / FOLDER).glob("*"):
        with contextlib.suppress(OSError, ValueError):  # unused reserved space is no JSON
            found.append(json.loads(file.read_text()))
    return min(found)[1] if found else None
