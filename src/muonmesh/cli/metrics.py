"""Metrics: ``metrics.jsonl``, one JSON object a line, the only source of the report.

A line has ``run`` ("muon" or "adamw"), ``step``, ``tokens`` and ``seconds`` (training time: evaluation and
checkpoints are left out), and then either a step's ``loss``, ``lr`` and times, or a ``validation_loss``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"


class MetricsLog:
    """Appends lines; each is flushed, so a killed run leaves all but the last of them."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / METRICS_FILE
        self._file = self._path.open("a")

    def append(self, **record: Any) -> None:
        """Write one line."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def cut(self, run: str, step: int) -> None:
        """Forget what ``run`` wrote after ``step``: a resumed run writes it again."""
        kept = [r for r in read_metrics(self._path.parent) if r["run"] != run or r["step"] <= step]
        self._file.close()
        self._path.write_text("".join(json.dumps(record) + "\n" for record in kept))
        self._file = self._path.open("a")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """Every whole line of a run's metrics, in the order written; empty where there are none."""
    path = directory / METRICS_FILE
    if not path.is_file():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]  # what follows the last newline was cut off by a kill
