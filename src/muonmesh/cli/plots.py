"""Plots: loss curves against steps and against time, as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from muonmesh.cli.summary import LABELS, Comparison, Point, TrainingSummary

Axis = Literal["steps", "seconds"]
COLOURS = {"muon": "#d1495b", "adamw": "#30638e"}  # apart in brightness too, for print and for the colour-blind
FILES: dict[Axis, str] = {"steps": "loss-steps.png", "seconds": "loss-time.png"}
AXIS_LABELS: dict[Axis, str] = {"steps": "step", "seconds": "training time [s], evaluation left out"}
SHOWN_FROM = 0.08  # share of the training after which the curves decide the vertical range


def plot_losses(run: Path, summaries: Sequence[TrainingSummary], comparison: Comparison | None) -> list[Path]:
    """Write one picture for each axis into the run's directory; returns their paths."""
    import matplotlib

    matplotlib.use("Agg")  # a machine that trains has no display
    from matplotlib import pyplot

    paths = []
    for axis in ("steps", "seconds"):
        figure, axes = pyplot.subplots(figsize=(7.2, 4.4), dpi=150, layout="constrained")
        for summary in summaries:
            _draw(axes, summary, axis)
        if comparison is not None:
            _mark(axes, comparison, axis)
        axes.set_ylim(*_range(summaries))
        axes.set_xlim(left=0)
        axes.set_xlabel(AXIS_LABELS[axis])
        axes.set_ylabel("loss [nats per token]")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.legend(frameon=False)
        paths.append(run / FILES[axis])
        figure.savefig(paths[-1])
        pyplot.close(figure)
    return paths


def _draw(axes: Any, summary: TrainingSummary, axis: Axis) -> None:
    colour = COLOURS[summary.name]
    train, validation = _running_mean(summary.train), summary.validation
    axes.plot(_along(train, axis), [p.loss for p in train], color=colour, alpha=0.4, linewidth=0.8)
    axes.plot(
        _along(validation, axis),
        [p.loss for p in validation],
        color=colour,
        linewidth=1.8,
        marker="o",
        markersize=3,
        label=f"{LABELS[summary.name]}: validation {summary.final_validation_loss:.3f} (thin: training, running mean)",
    )


def _mark(axes: Any, comparison: Comparison, axis: Axis) -> None:
    """The loss that both reached, and the stretch between the moments at which they did."""
    if axis == "steps":
        first, last = comparison.steps, float(comparison.of_steps)
        text = f"{comparison.steps / comparison.of_steps:.2f}× the steps"
    else:
        first, last = comparison.seconds, comparison.of_seconds
        text = f"{comparison.seconds / comparison.of_seconds:.2f}× the time"
    axes.annotate(
        "",
        xy=(first, comparison.loss),
        xytext=(last, comparison.loss),
        arrowprops={"arrowstyle": "->", "color": "#444444", "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0},
    )
    axes.annotate(
        text,
        xy=(first, comparison.loss),
        xytext=(-8, -4),
        textcoords="offset points",
        ha="right",
        va="top",
        color="#222222",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5},
    )


def _running_mean(points: Sequence[Point]) -> list[Point]:
    """The mean of each point and those just before it: single batches are noisy."""
    width = max(1, len(points) // 40)
    means = []
    for end, point in enumerate(points, start=1):
        window = points[max(0, end - width) : end]
        means.append(replace(point, loss=fmean(p.loss for p in window)))
    return means


def _along(points: Sequence[Point], axis: Axis) -> list[float]:
    return [float(point.step) if axis == "steps" else point.seconds for point in points]


def _range(summaries: Sequence[TrainingSummary]) -> tuple[float, float]:
    """From the lowest loss to about where the curves are after their first plunge, which would flatten the rest."""
    curves = [(summary, (*_running_mean(summary.train), *summary.validation)) for summary in summaries]
    losses = [p.loss for summary, points in curves for p in points if p.step >= SHOWN_FROM * summary.last_step]
    low, high = min(losses), max(losses)
    margin = 0.05 * (high - low) or 0.1
    return low - margin, high + margin
