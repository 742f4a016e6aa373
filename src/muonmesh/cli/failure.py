"""Failure: how a rank tells the launcher why it ended. One file a rank, written before the rank's sockets close."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
import traceback
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from muonmesh.errors import FileError

ROOM = 32 * 1024  # bytes taken for each rank's file when a run starts: a full disk is what it may have to tell of


class RunError(FileError):
    """What a user can mend: a file, a disk, an option. Its message is all there is to say; a traceback says nothing."""


@dataclass(frozen=True)
class Failure:
    """An error on one rank. ``time`` is in nanoseconds: the first one is the cause of the others.

    ``trace`` is empty for a :class:`RunError`.
    """

    rank: int
    time: int
    kind: str
    message: str
    trace: str

    def __str__(self) -> str:
        if not self.trace:
            return self.message
        return f"{self.trace.rstrip()}\n\nrank {self.rank}: {self.kind}: {self.message}"


def make_room(run: Path, ranks: int) -> None:
    """Forget what an earlier attempt wrote, and take the room that the ranks would need.

    Raises:
        OSError: there is none.
    """
    forget_failures(run)
    _folder(run).mkdir(parents=True)
    for rank in range(ranks):
        _file(run, rank).write_bytes(b" " * ROOM)


def record_failure(run: Path, rank: int, error: BaseException, *, tell: bool = False) -> None:
    """Write an error down; where even that cannot be done, or with ``tell``, say it on stderr."""
    failure = Failure(
        rank=rank,
        time=time.time_ns(),
        kind=type(error).__name__,
        message=str(error)[: ROOM // 16],  # JSON may make twelve bytes of a character
        trace="" if isinstance(error, FileError) else "".join(traceback.format_exception(error))[-ROOM // 4 :],
    )
    content = json.dumps(asdict(failure), indent=2, ensure_ascii=False).encode("utf-8", "replace")
    file = _file(run, rank)
    try:
        _folder(run).mkdir(parents=True, exist_ok=True)
        with file.open("r+b" if file.exists() else "wb") as stream:  # over the room that was taken, not beside it
            stream.write(content[:ROOM].ljust(ROOM))
    except OSError:
        tell = True
    if tell:
        with contextlib.suppress(OSError):
            print(f"muonmesh train: {failure}", file=sys.stderr)


def read_failures(run: Path) -> list[Failure]:
    """What the ranks wrote, the first error first. Rooms that nobody needed, and half a file, say nothing."""
    found = []
    for file in _folder(run).glob("rank-*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            content = json.loads(file.read_text(encoding="utf-8"))
            found.append(Failure(**{field.name: content[field.name] for field in fields(Failure)}))
    return sorted(found, key=lambda failure: failure.time)


def forget_failures(run: Path) -> None:
    """Remove what the ranks wrote, and the room for it."""
    shutil.rmtree(_folder(run), ignore_errors=True)


def room_for_logs(run: Path) -> Path:
    """Return a folder that is there once `make_room` was called, and goes when the next attempt starts."""
    return _folder(run)


def forget_rooms(run: Path) -> None:
    """Remove the rooms that nobody needed."""
    failed = {_file(run, failure.rank) for failure in read_failures(run)}
    with contextlib.suppress(OSError):
        for file in _folder(run).glob("rank-*.json"):
            if file not in failed:
                file.unlink()
        _folder(run).rmdir()  # where nothing failed, it is empty


def _file(run: Path, rank: int) -> Path:
    return _folder(run) / f"rank-{rank}.json"


def _folder(run: Path) -> Path:
    return run / "errors"
