"""Checkpoints: a run's state as `muonmesh.checkpoint` writes it, in numbered folders, to go on from the newest."""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist

from muonmesh.checkpoint import load, save
from muonmesh.checkpoint.entries import wrong_numbers
from muonmesh.checkpoint.manifest import REMEDY, is_whole
from muonmesh.checkpoint.place import forget_older, found_at, numbered
from muonmesh.checkpoint.ranks import on_first_rank, together
from muonmesh.checkpoint.save_load import recorded
from muonmesh.cli.engine import Engine
from muonmesh.cli.run_settings import Optimizer
from muonmesh.comm.telling import agreed
from muonmesh.errors import FileError

STEP = "step-"  # and eight digits


class Checkpoints:
    """The checkpoints of one training, in folders ``step-00000120``, of which the latest ``keep`` stay.

    Every method is called on all ranks. The schedule, the order of the data and the random numbers are functions of
    the seed and the step, so model and optimizer are all there is to save. Layouts do not show: what was saved by four
    ranks under FSDP2 loads into two under DDP.
    """

    def __init__(self, directory: Path, *, keep: int = 1) -> None:
        self.directory, self.keep = directory, keep
        self.kept: int | None = None  # step of the one that is there, as far as this object knows

    def latest(self) -> int | None:
        """Step of the newest whole checkpoint, as rank 0 sees it, or None.

        Raises:
            FileError: on all ranks: there are checkpoints, and none is whole.
        """

        def look() -> int | None:
            if dist.get_rank() != 0:
                return None
            found = latest_step(self.directory)
            broken = [path for step, path in numbered(self.directory, STEP) if step > (found or 0)]
            if broken and found is None:
                raise FileError(
                    f"{broken[0]}: found files missing or cut off, and no whole checkpoint beside it; needed one. "
                    f"{REMEDY}"
                )
            for path in broken:
                print(f"{path}: found files missing or cut off; goes on from step {found}", file=sys.stderr)

            return found

        self.kept = agreed(look, kind=FileError)[0]
        return self.kept

    def save(self, step: int, engine: Engine) -> None:
        """Write a model and its optimizer; older checkpoints go once the new one is there.

        A state that is not finite is not saved: the one before it would be thrown away for it.

        Raises:
            FileError: on every rank; the last checkpoint is as it was.
        """
        kept = "No checkpoint was there yet" if self.kept is None else f"The checkpoint of step {self.kept} is kept"
        together(lambda: check_finite(engine, kept))
        try:
            save(self._folder(step), engine.model, engine.saved)
        except FileError as error:
            raise FileError(f"{error}. {kept}") from error
        on_first_rank(lambda: forget_older(self._folder(step), self.keep))
        self.kept = step

    def load(self, step: int, engine: Engine) -> None:
        """Read a model and its optimizer.

        Raises:
            FileError, StateError: on every rank, naming the file and what is wrong with it; nothing has changed.
        """
        load(self._folder(step), engine.model, engine.saved)

    def _folder(self, step: int) -> Path:
        return self.directory / f"{STEP}{step:08d}"


def check_finite(engine: Engine, kept: str) -> None:
    """Make sure that all that this rank would save is finite.

    Raises:
        FileError: naming the first tensor that is not; ``kept`` is said too.
    """
    for record in recorded(engine.saved).checkpoint_records():
        for name, share in record.shares():
            if any(wrong_numbers(name, box) for box in share.boxes.values()):
                raise FileError(
                    f"{name}: not finite, so it is not saved. {kept}. Start again with a lower --lr or --adamw-lr"
                )


def checkpoints_of(run: Path, optimizer: Optimizer) -> Path:
    """Where a run keeps the checkpoints of one of its trainings."""
    return run / "checkpoints" / optimizer


def latest_step(directory: Path) -> int | None:
    """Step of the newest whole checkpoint below ``directory``, or None."""
    return next((step for step, path in numbered(directory, STEP) if is_whole(found_at(path))), None)
