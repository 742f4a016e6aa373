"""Summary: what a run's metrics say: curves, speeds, and how many of AdamW's steps Muon needed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from muonmesh.cli.metrics_log import read_metrics
from muonmesh.cli.run_settings import Optimizer

WARM_UP_STEPS = 3  # left out of speeds and shares: allocations and first plans


@dataclass(frozen=True)
class Point:
    """A loss in nats per token, where and when it was measured."""

    step: int
    seconds: float
    loss: float


@dataclass(frozen=True)
class TrainingSummary:
    """One optimizer's training. Shares are of the time of a step on rank 0; seconds leave evaluation out."""

    name: Optimizer
    train: tuple[Point, ...]
    validation: tuple[Point, ...]
    tokens: int
    step_seconds: float
    tokens_per_second: float
    forward_backward: float
    optimizer: float

    @property
    def last_step(self) -> int:
        """The last finished step."""
        return self.train[-1].step

    @property
    def seconds(self) -> float:
        """Training time."""
        return self.train[-1].seconds

    @property
    def final_train_loss(self) -> float:
        """Mean over the last tenth of the steps: single batches are noisy."""
        return fmean(point.loss for point in self.train[-max(1, len(self.train) // 10) :])

    @property
    def final_validation_loss(self) -> float:
        """The last one measured."""
        return self.validation[-1].loss


@dataclass(frozen=True)
class Comparison:
    """How many steps, and how much time, ``faster`` needed for the final validation loss of ``slower``."""

    faster: Optimizer
    slower: Optimizer
    loss: float
    steps: float
    of_steps: int
    seconds: float
    of_seconds: float

    def __str__(self) -> str:
        share, time = self.steps / self.of_steps, self.seconds / self.of_seconds
        return (
            f"{LABELS[self.faster]} reached {LABELS[self.slower]}'s final validation loss of {self.loss:.3f} after "
            f"{self.steps:.0f} of {self.of_steps} steps ({share:.2f}×), in {time:.2f}× the training time"
        )


LABELS: dict[Optimizer, str] = {"muon": "Muon", "adamw": "AdamW"}


def summarise(run: Path) -> list[TrainingSummary]:
    """Every training of a run that has finished a step and been evaluated, in the order they ran.

    Raises:
        FileError: the metrics are damaged.
    """
    records = read_metrics(run)
    names = dict.fromkeys(record["run"] for record in records)
    summaries = [_summarise(name, [r for r in records if r["run"] == name]) for name in names]
    return [summary for summary in summaries if summary is not None]


def compare(summaries: Sequence[TrainingSummary]) -> Comparison | None:
    """Read off the better training's curve where it passed the other's final validation loss.

    The two points around it are joined by a straight line. Where the learning rate falls to zero at the end, this
    understates the better optimizer: it is read before its learning rate has come down, while the other's final loss
    is read after. None unless there are two finished trainings of equal length.
    """
    if len(summaries) != 2 or summaries[0].last_step != summaries[1].last_step:
        return None
    faster, slower = sorted(summaries, key=lambda summary: summary.final_validation_loss)
    loss = slower.final_validation_loss
    crossing = crossing_of(faster.validation, loss)
    if crossing is None:
        return None
    return Comparison(
        faster=faster.name,
        slower=slower.name,
        loss=loss,
        steps=crossing[0],
        of_steps=slower.last_step,
        seconds=crossing[1],
        of_seconds=slower.seconds,
    )


def crossing_of(curve: Sequence[Point], loss: float) -> tuple[float, float] | None:
    """First (step, seconds) at which a curve is at or below ``loss``, between two points by a straight line."""
    for before, point in itertools.pairwise([curve[0], *curve]):
        if point.loss <= loss:
            share = (before.loss - loss) / (before.loss - point.loss) if before.loss > loss else 1.0
            return (
                before.step + share * (point.step - before.step),
                before.seconds + share * (point.seconds - before.seconds),
            )
    return None


def _summarise(name: Optimizer, records: Sequence[dict[str, Any]]) -> TrainingSummary | None:
    steps = [record for record in records if "loss" in record]
    validations = [record for record in records if "validation_loss" in record]
    if not steps or not validations:
        return None
    timed = steps[WARM_UP_STEPS:] or steps
    total = sum(record["step_seconds"] for record in timed)
    tokens_per_step = steps[-1]["tokens"] / steps[-1]["step"]
    return TrainingSummary(
        name=name,
        train=tuple(Point(r["step"], r["seconds"], r["loss"]) for r in steps),
        validation=tuple(Point(r["step"], r["seconds"], r["validation_loss"]) for r in validations),
        tokens=steps[-1]["tokens"],
        step_seconds=median(record["step_seconds"] for record in timed),
        tokens_per_second=tokens_per_step * len(timed) / total,
        forward_backward=sum(record["forward_backward_seconds"] for record in timed) / total,
        optimizer=sum(record["optimizer_seconds"] for record in timed) / total,
    )
