"""Failure: how a rank tells the launcher why it ended. One file a rank, written before the rank's sockets close."""

from __future__ import annotations

import contextlib
import json
import sys
import time
import traceback
from pathlib import Path

from muonmesh.errors import FileError

LAUNCHER = "MUONMESH_LAUNCHER"  # environment: the process that started the ranks
FOLDER = "errors"  # of a run, while its ranks are there
ROOM = 32 * 1024  # bytes taken for each rank's file when a run starts: a full disk is what it may have to tell of


def make_room(run: Path, ranks: int) -> None:
    """Take the room that the errors of the ranks would need; an OSError where there is none."""
    for rank in range(ranks):
        (run / FOLDER / str(rank)).write_bytes(b" " * ROOM)


def record_failure(run: Path, rank: int, error: BaseException) -> None:
    """Write an error down for the launcher; say it on stderr where no launcher has made room for it."""
    trace = "" if isinstance(error, FileError) else "".join(traceback.format_exception(error))[-ROOM // 8 :] + "\n"
    who = f"rank {rank}: {type(error).__name__}: " if trace else ""  # a user can mend a FileError by its message alone
    text = f"{trace}{who}{str(error)[: ROOM // 16]}"  # a character may take four bytes
    try:
        with (run / FOLDER / str(rank)).open("r+b") as stream:  # over the room that was taken, not beside it
            stream.write(json.dumps([time.time_ns(), text], ensure_ascii=False).encode("utf-8", "replace"))
    except OSError:
        with contextlib.suppress(OSError):
            print(f"muonmesh train: {text}", file=sys.stderr)


def first_failure(run: Path) -> str | None:
    """Return the first error that a rank has written, which is the cause of the others; None where there is none."""
    found = []
    for file in (run / FOLDER).glob("*"):
        with contextlib.suppress(OSError, ValueError):  # room that was not needed is no JSON
            found.append(json.loads(file.read_text()))
    return min(found)[1] if found else None
