"""Summary: summarizes a run's metrics: curves, speeds, and how many steps one optimizer needed for the other's loss."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from muonmesh.tools.cli.metrics_log import read_metrics
from muonmesh.tools.cli.run_settings import Optimizer

WARM_UP_STEPS = 3  # speeds and shares leave these out, since they allocate memory and make plans


@dataclass(frozen=True)
class Point:
    """A loss in nats per token, with the step and the training time at which it was measured."""

    step: int
    seconds: float
    loss: float


@dataclass(frozen=True)
class TrainingSummary:
    """The summary of one optimizer's training.

    ``forward_backward`` and ``optimizer`` are shares of the time of a step on rank 0. ``seconds`` do not include
    evaluation.
    """

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
        """The training time in seconds, without evaluation and checkpoints."""
        return self.train[-1].seconds

    @property
    def final_train_loss(self) -> float:
        """The mean training loss over the last tenth of the steps, since single batches are noisy."""
        return fmean(point.loss for point in self.train[-max(1, len(self.train) // 10) :])

    @property
    def final_validation_loss(self) -> float:
        """The last measured validation loss."""
        return self.validation[-1].loss


@dataclass(frozen=True)
class Comparison:
    """The steps and the seconds that ``faster`` needed to reach the final validation loss of ``slower``.

    ``of_steps`` and ``of_seconds`` are the steps and the seconds of ``slower``.
    """

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
    """Return the summary of each training of a run that has a finished step and an evaluation, in the order they ran.

    Raises:
        FileError: the metrics are damaged.
    """
    records = read_metrics(run)
    names = dict.fromkeys(record["run"] for record in records)
    summaries = [_summarise(name, [r for r in records if r["run"] == name]) for name in names]
    return [summary for summary in summaries if summary is not None]


def compare(summaries: Sequence[TrainingSummary]) -> Comparison | None:
    """Return when the better training passed the other training's final validation loss.

    The curve is interpolated linearly between two validations. If the learning rate falls to zero at the end, the
    comparison understates the better optimizer: its loss is read before its learning rate has fallen, the other's final
    loss after.

    Returns:
        The comparison; None unless there are two trainings of equal length.
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
    """Return the first (step, seconds) at which a curve is at or below ``loss``, by linear interpolation, or None."""
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
