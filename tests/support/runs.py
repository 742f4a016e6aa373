"""Runs of `muonmesh train`: the text that they learn from, and the losses that they leave behind."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from muonmesh.tools.cli.corpus import Corpus, save_corpus_of, standard_library
from muonmesh.tools.cli.report import read_metrics
from muonmesh.tools.cli.run_settings import Settings

COMMAND = (sys.executable, "-c", "from muonmesh.tools.cli import main; main()", "train")
Losses = dict[tuple[str, int, str], float]  # by optimizer, step and kind


def copy_texts(folder: Path, count: int) -> Path:
    """Copy so many files of the standard library into a folder, which is made; return it."""
    folder.mkdir(exist_ok=True)
    for file in sorted(standard_library(), key=lambda path: path.name)[: 2 * count : 2]:
        shutil.copy(file, folder / f"{file.parent.name}-{file.name}")
    return folder


def train_command(*options: object, **changes: Any) -> subprocess.CompletedProcess[str]:
    """Run the command with these options; ``changes`` are of `subprocess.run`."""
    values: dict[str, Any] = {"capture_output": True, "text": True, "check": False, "timeout": 300, **changes}
    return subprocess.run([*COMMAND, *map(str, options)], **values)


def prepare_run(directory: Path, corpus: Corpus, **values: Any) -> Path:
    """Make the directory of a run, ready for its ranks, with these settings and this text; return it."""
    settings = Settings(out=str(directory), **values)
    settings.directory.mkdir(exist_ok=True)
    settings.save({})
    save_corpus_of(settings.directory, corpus)
    return settings.directory


def losses_of(run: Path) -> Losses:
    """Return every loss and validation loss of a run; the same step is never told twice."""
    records = [(record, key) for record in read_metrics(run) for key in ("loss", "validation_loss") if key in record]
    losses = {(record["run"], record["step"], key): record[key] for record, key in records}
    assert len(losses) == len(records)
    return losses


def wait_for(condition: Callable[[], Any], seconds: float = 600.0) -> None:
    """Wait until a condition holds, and fail after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
