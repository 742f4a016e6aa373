"""Finished trainings in a JSON file: a comparison that takes hours may be cut short, and goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch


class Trainings:
    """What each training of a comparison found, kept in a file after each one.

    Args:
        path: The file; None keeps nothing.
        options: What all trainings of the file have in common.

    Raises:
        SystemExit: the file was made with other options or another torch, with which no comparison is possible.
    """

    def __init__(self, path: Path | None, options: dict[str, Any]) -> None:
        self.path, self.options, self.runs = path, options, []
        if path is not None and path.is_file():
            earlier = json.loads(path.read_text())
            description = {"torch": earlier["torch"], **earlier["options"]}
            if description != {"torch": torch.__version__, **options}:
                raise SystemExit(f"{path} was made with {description}; give another --json")
            self.runs = earlier["runs"]

    runs: list[dict[str, Any]]

    def get(self, train: Callable[[], dict[str, Any]], **key: Any) -> dict[str, Any]:
        """Return the training of this key: from the file, or made now and kept.

        Args:
            train: Makes what is kept beside the key, such as ``{"validation": [...]}``.
            key: Names the training, such as ``rule="muon", seed=0``.
        """
        for run in self.runs:
            if all(run[name] == value for name, value in key.items()):
                return run
        self.runs.append({**key, **train()})
        if self.path is not None:
            about = {"date": datetime.now(UTC).date().isoformat(), "torch": torch.__version__, "options": self.options}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            beside = self.path.with_suffix(".tmp")  # a program that is ended while it writes leaves the file as it was
            beside.write_text(json.dumps({**about, "runs": self.runs}, indent=1) + "\n")
            os.replace(beside, self.path)
        return self.runs[-1]
