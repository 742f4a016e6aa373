"""Failure: how a rank tells the launcher why it ended. One file a rank, written before the rank's sockets close."""

from __future__ import annotations

import json
import shutil
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Failure:
    """An error on one rank. ``time`` is in nanoseconds: the first one is the cause of the others."""

    rank: int
    time: int
    kind: str
    message: str
    trace: str


def record_failure(run: Path, rank: int, error: BaseException) -> None:
    """Write an error down."""
    failure = Failure(
        rank=rank,
        time=time.time_ns(),
        kind=type(error).__name__,
        message=str(error),
        trace="".join(traceback.format_exception(error)),
    )
    folder = _folder(run)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank-{rank}.json").write_text(json.dumps(asdict(failure), indent=2))


def read_failures(run: Path) -> list[Failure]:
    """What the ranks wrote, the first error first."""
    files = _folder(run).glob("rank-*.json")
    return sorted((Failure(**json.loads(file.read_text())) for file in files), key=lambda failure: failure.time)


def forget_failures(run: Path) -> None:
    """Remove what an earlier attempt wrote."""
    shutil.rmtree(_folder(run), ignore_errors=True)


def _folder(run: Path) -> Path:
    return run / "errors"
