"""Sinks: where a run's lines of metrics go beside ``metrics.jsonl``: TensorBoard, and wandb without a network."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from muonmesh.cli.failure import RunError
from muonmesh.cli.settings import Logger, Optimizer, Settings
from muonmesh.files import writing

NEEDED = {"tensorboard": "tensorboard", "wandb": "wandb"}  # what each needs installed; metrics.jsonl needs nothing


class Sink(Protocol):
    """Takes the lines of one training."""

    def append(self, record: Mapping[str, Any]) -> None:
        """Take one line, as `MetricsLog` writes it."""

    def close(self) -> None:
        """Write what is left."""


def check_sinks(names: tuple[Logger, ...]) -> None:
    """Make sure that what they need is installed.

    Raises:
        RunError: it is not.
    """
    for name in names:
        if name in NEEDED and importlib.util.find_spec(NEEDED[name]) is None:
            raise RunError(f"--log {name}: found no {NEEDED[name]}. Write: pip install 'muonmesh[{name}]'")


def open_sinks(run: Path, optimizer: Optimizer, settings: Settings, *, start: int) -> list[Sink]:
    """Return the sinks of one training that goes on after step ``start``."""
    sinks: list[Sink] = []
    for name in settings.log:
        with writing(run / name):
            if name == "tensorboard":
                sinks.append(TensorBoardSink(run / name / optimizer, start=start))
            elif name == "wandb":
                sinks.append(WandbSink(run, optimizer, settings, start=start))
    return sinks


def numbers(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a line under flat names: those of ``optimizer`` as ``optimizer/NAME``."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}/{inner}", number) for inner, number in numbers(value))
        elif name not in ("run", "step") and isinstance(value, int | float):
            yield name, float(value)


class TensorBoardSink:
    """Event files in ``tensorboard/OPTIMIZER``."""

    def __init__(self, folder: Path, *, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        make: Any = SummaryWriter
        self._writer = make(str(folder), purge_step=start + 1 if start else None)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write each number as a scalar of its own."""
        for name, value in numbers(record):
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class WandbSink:
    """An offline run of wandb below ``wandb``; ``wandb sync`` sends it, whenever there is a network."""

    def __init__(self, run: Path, optimizer: Optimizer, settings: Settings, *, start: int) -> None:
        import wandb

        after = f"-after-{start}" if start else ""
        with _quiet():
            self._run: Any = wandb.init(
                mode="offline",
                dir=str(run),
                project="muonmesh",
                group=run.name,
                name=f"{run.name}-{optimizer}{after}",
                config={"optimizer": optimizer, "lr": settings.lr_of(optimizer), "seed": settings.seed},
                reinit=True,
            )

    def append(self, record: Mapping[str, Any]) -> None:
        """Log all numbers of a line under its step."""
        self._run.log(dict(numbers(record)) | {"step": record["step"]})

    def close(self) -> None:
        """Finish the run."""
        with _quiet():
            self._run.finish()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Let wandb say nothing: the terminal has a line of progress."""
    before = os.environ.get("WANDB_SILENT")
    os.environ["WANDB_SILENT"] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ["WANDB_SILENT"]
        else:
            os.environ["WANDB_SILENT"] = before
