"""Checkpoints: saves a run's state with `muonmesh.checkpoint` in numbered folders, and loads the newest.

The order follows from the numbers in their names, never from clocks.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from pathlib import Path

import torch.distributed as dist
from torch import nn

from muonmesh.checkpoint import load, save
from muonmesh.checkpoint.folder import check_replaceable, folder_at, foreign_in, lock_folder, previous_at, remove_folder
from muonmesh.checkpoint.manifest import read_manifest
from muonmesh.checkpoint.save_load import checkpointed
from muonmesh.comm.gather_objects import on_every_rank, on_first_rank, results_of_all_ranks
from muonmesh.errors import FileError
from muonmesh.optimizer import Muon
from muonmesh.step.state_layout import wrong_numbers
from muonmesh.tools.cli.report import read_metrics
from muonmesh.tools.cli.run_settings import Optimizer
from muonmesh.tools.cli.terminal import note

STEP = "step-"  # and eight digits
NAMED = re.compile(rf"{STEP}(\d+)|\.({STEP}(\d+))\.before")


def numbered(directory: Path) -> list[tuple[int, Path]]:
    """Return step and path of all checkpoints in a folder, also interrupted ones, the last step first."""
    paths: dict[int, Path] = {}
    for name in os.listdir(directory) if directory.is_dir() else ():
        if match := NAMED.fullmatch(name):  # the second form: its replacement was interrupted
            paths[int(match[1] or match[3])] = directory / (match[2] or name)
    return sorted(paths.items(), reverse=True)


def is_complete(folder: Path) -> bool:
    """Return whether every file of the manifest exists with its full size; contents are not read."""
    try:
        entries = read_manifest(folder).files
        stats = {name: os.stat(folder / name, follow_symlinks=False) for name in entries}
    except (OSError, FileError):
        return False
    return all(stat.S_ISREG(status.st_mode) and status.st_size == entries[name][0] for name, status in stats.items())


def forget_others(path: Path) -> None:
    """Remove the checkpoints beside ``path``, which has just been written, and what interrupted saves left.

    Checkpoints with a higher number belong to an abandoned continuation of the run. Folders with other files in them
    stay, and folders that cannot be removed.
    """
    with contextlib.suppress(OSError):  # what could not be listed goes after the next save
        for _, other in numbered(path.parent):
            if other == path or folder_at(other).is_symlink():
                continue
            with contextlib.suppress(OSError, FileError):
                check_replaceable(other)
                for folder in (other, previous_at(other)):
                    remove_folder(folder)
        for scratch in path.parent.glob(f".{STEP}*.writing"):
            with contextlib.suppress(OSError):
                if not foreign_in(scratch) and (lock := lock_folder(scratch, make=False)) is not None:
                    shutil.rmtree(scratch, ignore_errors=True)
                    os.close(lock)


class Checkpoints:
    """The checkpoints of one training, in folders such as ``step-00000120``; the newest is kept.

    Every method is called on all ranks. A checkpoint has only the model and the optimizer, since the schedule, the
    order of the data and the random numbers are functions of the seed and the step. A checkpoint of four ranks under
    FSDP2 loads into two ranks under DDP.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.newest: int | None = None  # the step of the last checkpoint that this object knows

    def latest(self) -> int | None:
        """Return the step of the newest complete checkpoint, as rank 0 sees it, or None.

        Raises:
            FileError: on all ranks: there are checkpoints, and none is complete.
        """

        def look() -> int | None:
            if dist.get_rank() != 0:
                return None
            newest = latest_step(self.directory)
            broken = [path for step, path in numbered(self.directory) if step > (newest or 0)]
            if broken and newest is None:
                raise FileError(
                    f"{broken[0]}: found files missing or cut off, and no whole checkpoint beside it; needed one. "
                    "Bring an undamaged copy, or remove the folder to train from the start"
                )
            for path in broken:
                note(f"{path}: found files missing or cut off; goes on from step {newest}")
            return newest

        self.newest = results_of_all_ranks(look, kind=FileError)[0]
        return self.newest

    def save(self, step: int, model: nn.Module, optimizer: Muon) -> None:
        """Write a model and its optimizer, and then remove older checkpoints.

        A state that is not finite is not saved, since it would replace a good checkpoint.

        Raises:
            FileError: on every rank: the state is not finite, or the checkpoint could not be written. The last
                checkpoint is unchanged.
        """
        hint = "No checkpoint was there yet" if self.newest is None else f"The checkpoint of step {self.newest} is kept"
        on_every_rank(lambda: check_finite(optimizer, hint))
        try:
            save(self._folder(step), model, optimizer)
        except FileError as error:
            raise FileError(f"{error}. {hint}") from error
        on_first_rank(lambda: forget_others(self._folder(step)))
        self.newest = step

    def load(self, step: int, model: nn.Module, optimizer: Muon) -> None:
        """Load a model and its optimizer.

        Raises:
            FileError, StateError: on every rank: the checkpoint is damaged or does not fit; nothing has changed.
        """
        load(self._folder(step), model, optimizer)

    def _folder(self, step: int) -> Path:
        return self.directory / f"{STEP}{step:08d}"


def check_finite(optimizer: Muon, hint: str) -> None:
    """Check that all tensors that this rank would save are finite.

    Args:
        optimizer: The optimizer, whose parameters and state would be saved.
        hint: A sentence for the message: which checkpoint is kept.

    Raises:
        FileError: a tensor is not finite; the message names the first.
    """
    for record in checkpointed(optimizer).checkpoint_records():
        for name, share in record.shares():
            if any(wrong_numbers(name, box) for box in share.boxes.values()):
                raise FileError(
                    f"{name}: not finite, so it is not saved. {hint}. Start again with a lower --lr or --adamw-lr"
                )


def checkpoints_of(run: Path, optimizer: Optimizer) -> Path:
    """Return the folder with the checkpoints of one of a run's trainings."""
    return run / "checkpoints" / optimizer


def without_checkpoint(run: Path) -> list[str]:
    """Return a sentence for each training of a run that has metrics and no checkpoint.

    Raises:
        FileError: the metrics are damaged.
    """
    last = {record["run"]: record["step"] for record in read_metrics(run)}
    return [
        f"metrics of {name} reach step {step}, but {name} has no checkpoint. A resume trains it again from step 0 and "
        "replaces its metrics"
        for name, step in last.items()
        if not numbered(checkpoints_of(run, name))
    ]


def latest_step(directory: Path) -> int | None:
    """Return the step of the newest complete checkpoint in ``directory``, or None."""
    return next((step for step, path in numbered(directory) if is_complete(folder_at(path))), None)
