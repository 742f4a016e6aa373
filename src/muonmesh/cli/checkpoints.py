"""Checkpoints: a run's state in folders of :mod:`muonmesh.checkpoint.folder`, the newest of which it goes on from."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from muonmesh.checkpoint.entries import check_finite, flat, wrong_numbers
from muonmesh.checkpoint.folder import look, write
from muonmesh.checkpoint.manifest import REMEDY, is_whole
from muonmesh.checkpoint.place import found_at, numbered
from muonmesh.checkpoint.ranks import together
from muonmesh.cli.failure import RunError
from muonmesh.cli.settings import Optimizer
from muonmesh.files import AGAIN, check_fields

PROGRESS_FILE = "progress.json"
STEP = "step-"  # and eight digits


class Checkpoints:
    """The checkpoints of one training, in folders ``step-00000120``, of which the latest ``keep`` stay.

    Every method is called on all ranks. The schedule, the order of the data and the random numbers are functions of
    the seed and the step, so model, optimizer and ``progress`` are all there is to save. Layouts do not show: what was
    saved by four ranks under FSDP2 loads into two under DDP.
    """

    def __init__(self, directory: Path, *, keep: int = 1) -> None:
        self.directory, self.keep = directory, keep
        self.kept: int | None = None  # step of the one that is there, as far as this object knows

    def latest(self) -> int | None:
        """Step of the newest whole checkpoint, as rank 0 sees it, or None.

        Raises:
            RunError: on all ranks: there are checkpoints, and none is whole.
        """
        found: list[int | str | None] = [None]
        if dist.get_rank() == 0:
            found = [latest_step(self.directory) or _none_is_whole(self.directory)]
            if isinstance(found[0], int):
                _tell_of_broken(self.directory, found[0])
        dist.broadcast_object_list(found, src=0)
        if isinstance(found[0], str):
            raise RunError(found[0])
        self.kept = found[0]
        return self.kept

    def save(self, step: int, state: Mapping[str, Any], progress: dict[str, Any]) -> None:
        """Write beside its final place, then rename; older ones go once the new one is there.

        A state that is not finite is not saved: the one before it would be thrown away for it.

        Raises:
            FileError: on every rank; the last checkpoint is as it was.
        """
        kept = "No checkpoint was there yet. " if self.kept is None else f"The checkpoint of step {self.kept} is kept. "
        together(lambda: check_finite(state, kept))
        write(
            self._folder(step),
            state,
            {"step": step, **progress},
            keep=self.keep,
            settings_file=PROGRESS_FILE,
            beside=kept,
            again=AGAIN,
        )
        self.kept = step

    def load(self, step: int, state: dict[str, Any]) -> dict[str, Any]:
        """Read into ``state``, as the engine returns it, and return the ``progress`` that was saved with it.

        Nothing is written into ``state`` before all files have been read and looked at: their hashes, where they have
        a manifest, and of each tensor its name, shape, dtype and that it is finite. The ranks share that work.

        Raises:
            FileError: on every rank, naming the file and what is wrong with it.
        """
        contents = look(self._folder(step), settings_file=PROGRESS_FILE)
        together(lambda: _check_progress(contents.path, contents.settings, step))
        contents.read(flat(state), wrong=wrong_numbers)
        return contents.settings

    def _folder(self, step: int) -> Path:
        return self.directory / f"{STEP}{step:08d}"


def _check_progress(folder: Path, content: dict[str, Any], step: int) -> None:
    path = folder / PROGRESS_FILE
    content.setdefault("step", step)  # checkpoints older than manifests know it by their name alone
    kinds = {"step": "a whole number of at least 0", "seconds": "a finite number of at least 0"}
    check_fields(path, content, kinds)
    if content["step"] != step:
        raise RunError(f"{path}: found step {content['step']}; needed {step}, as its folder is called. {REMEDY}")


def _tell_of_broken(directory: Path, latest: int) -> None:
    for step, path in numbered(directory, STEP):
        if step > latest:
            print(f"{path}: found files missing or cut off; goes on from step {latest}", file=sys.stderr)


def _none_is_whole(directory: Path) -> str | None:
    found = numbered(directory, STEP)
    if not found:
        return None
    return f"{found[0][1]}: found files missing or cut off, and no whole checkpoint beside it; needed one. {REMEDY}"


def checkpoints_of(run: Path, optimizer: Optimizer) -> Path:
    """Where a run keeps the checkpoints of one of its trainings."""
    return run / "checkpoints" / optimizer


def latest_step(directory: Path) -> int | None:
    """Step of the newest whole checkpoint below ``directory``, or None."""
    return next((step for step, path in numbered(directory, STEP) if is_whole(found_at(path))), None)
