"""Checkpoints: a run's state through `torch.distributed.checkpoint`, whole or not there at all."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from muonmesh.cli.settings import Optimizer

PROGRESS_FILE = "progress.json"
STEP_FOLDER = re.compile(r"step-(\d{8})")


class Checkpoints:
    """The checkpoints of one training, in folders ``step-00000120``; only the latest is kept.

    Every method is called on all ranks. The schedule, the order of the data and the random numbers are functions of
    the seed and the step, so model, optimizer and ``progress`` are all there is to save. Layouts do not show: what was
    saved by four ranks under FSDP2 loads into two under DDP.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def latest(self) -> int | None:
        """Step of the newest whole checkpoint, as rank 0 sees it, or None."""
        found: list[int | None] = [None]
        if dist.get_rank() == 0:
            found = [latest_step(self.directory)]
        dist.broadcast_object_list(found, src=0)
        return found[0]

    def save(self, step: int, state: dict[str, Any], progress: dict[str, Any]) -> None:
        """Write beside its final place, then rename; older ones go once the new one is there."""
        place = self._folder(step)
        scratch = place.with_suffix(".writing")
        if dist.get_rank() == 0:
            shutil.rmtree(scratch, ignore_errors=True)
            self.directory.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        save(state, checkpoint_id=scratch)
        if dist.get_rank() == 0:
            (scratch / PROGRESS_FILE).write_text(json.dumps(progress))
            older = [folder for folder in self.directory.iterdir() if folder != scratch]
            shutil.rmtree(place, ignore_errors=True)
            scratch.rename(place)
            for folder in older:
                shutil.rmtree(folder, ignore_errors=True)
        dist.barrier()

    def load(self, step: int, state: dict[str, Any]) -> dict[str, Any]:
        """Read into ``state``, as the engine returns it, and return the ``progress`` that was saved with it."""
        load(state, checkpoint_id=self._folder(step))
        progress: dict[str, Any] = json.loads((self._folder(step) / PROGRESS_FILE).read_text())
        return progress

    def _folder(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"


def checkpoints_of(run: Path, optimizer: Optimizer) -> Path:
    """Where a run keeps the checkpoints of one of its trainings."""
    return run / "checkpoints" / optimizer


def latest_step(directory: Path) -> int | None:
    """Step of the newest whole checkpoint below ``directory``, or None."""
    if not directory.is_dir():
        return None
    matches = [STEP_FOLDER.fullmatch(folder.name) for folder in directory.iterdir()]
    return max((int(match[1]) for match in matches if match), default=None)
