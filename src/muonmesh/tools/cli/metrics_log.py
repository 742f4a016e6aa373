"""Metrics: ``metrics.jsonl``, with one JSON object in each line; the report reads no other source.

A line has ``run`` ("muon" or "adamw"), ``step``, ``tokens`` and ``seconds`` (training time without evaluation and
checkpoints), and then either a step's ``loss``, ``lr`` and times, or a ``validation_loss``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

from muonmesh.checkpoint.form import FINITE, POSITIVE, SIZE, Kind, check_form, one_of
from muonmesh.errors import FileError
from muonmesh.files import read_text, write_text, writing
from muonmesh.tools.cli.run_settings import Optimizer

METRICS_FILE = "metrics.jsonl"
TIMES = ("step_seconds", "forward_backward_seconds", "optimizer_seconds")
OF_BOTH = {"run": one_of(get_args(Optimizer)), "step": SIZE, "seconds": FINITE}
OF_A_STEP = {**OF_BOTH, "tokens": SIZE, "loss": FINITE, **dict.fromkeys(TIMES, FINITE)}
OF_A_STEP |= {"step": Kind("a whole number of at least 1", lambda step: SIZE.holds(step) and step > 0)}
OF_A_STEP |= {"step_seconds": POSITIVE}  # the report divides by both
OF_A_VALIDATION = {**OF_BOTH, "validation_loss": FINITE}


def append_metrics(directory: Path, **record: Any) -> None:
    """Append one line. If a run is killed, at most the last line is incomplete.

    Raises:
        FileError: the line cannot be written.
    """
    path = directory / METRICS_FILE
    with writing(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def cut_metrics(directory: Path, run: str, step: int) -> float:
    """Remove the lines of a training after a step, which a resumed run writes again; return its seconds until then.

    Args:
        directory: The run's directory.
        run: The training, "muon" or "adamw".
        step: The last step to keep.

    Raises:
        FileError: the file is damaged, or cannot be written; the file is unchanged.
    """
    kept = [r for r in read_metrics(directory) if r["run"] != run or r["step"] <= step]
    write_text(directory / METRICS_FILE, "".join(json.dumps(record) + "\n" for record in kept))
    return max((float(record["seconds"]) for record in kept if record["run"] == run), default=0.0)


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """Return every complete line of a run's metrics, in the order of writing; empty if there is no file.

    Raises:
        FileError: a line has another form than a training writes; the message has its number.
    """
    path = directory / METRICS_FILE
    if not path.exists():
        return []
    lines = read_text(path, needed="the metrics that a training wrote there").split("\n")
    # After a kill, the last line is incomplete.
    return [_read(path, number, line) for number, line in enumerate(lines[:-1], start=1)]


def _read(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    form = OF_A_STEP if isinstance(record, dict) and "loss" in record else OF_A_VALIDATION
    write = "Remove the line, or bring an undamaged copy"
    found: dict[str, Any] = check_form(f"{path}: line {number}", record, form, write, kind=FileError)
    return found
