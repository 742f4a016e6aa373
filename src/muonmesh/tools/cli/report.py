"""Report: the report of a run: a table on the terminal, a picture, both in ``report.html``, and the figures as JSON."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from muonmesh.files import write_text, writing
from muonmesh.table import aligned
from muonmesh.tools.cli.run_settings import Settings
from muonmesh.tools.cli.summary import LABELS, TrainingSummary, compare, summarise
from muonmesh.tools.cli.terminal import make_console, say

REPORT_FILE, FIGURES_FILE, PICTURE = "report.html", "report.json", "loss.png"
COLOURS = {"muon": "#d1495b", "adamw": "#30638e"}  # of different brightness, for print and for color-blind readers
ALONG = {"step": "step", "seconds": "training time [s], evaluation left out"}


def write_report(run: Path, settings: Settings) -> Path | None:
    """Write the report of a run: a picture, ``report.html`` and ``report.json`` in its directory; print a table.

    The report of a stopped run has the finished steps.

    Returns:
        The path of ``report.html``; None if no step was finished.

    Raises:
        FileError: the run's metrics are damaged, or the report cannot be written.
    """
    summaries = summarise(run)
    if not summaries:
        return None
    comparison = compare(summaries)
    with writing(run):
        _plot(run / PICTURE, summaries)
    console = make_console(record=True)
    table = [["", *(LABELS[summary.name] for summary in summaries)], *_rows(settings, summaries)]
    say(*aligned(table, right=(1, 2), ruled=True), console=console)
    if comparison is not None:
        say(str(comparison), style="bold", console=console)
    picture = base64.b64encode((run / PICTURE).read_bytes()).decode("ascii")
    tag = f'<body><img alt="losses" src="data:image/png;base64,{picture}">'
    write_text(run / REPORT_FILE, console.export_html().replace("<body>", tag))
    figures = {
        "trainings": [asdict(summary) for summary in summaries],
        "comparison": comparison and asdict(comparison),
    }
    write_text(run / FIGURES_FILE, json.dumps(figures, indent=1) + "\n")
    return run / REPORT_FILE


def _rows(settings: Settings, summaries: Sequence[TrainingSummary]) -> list[list[str]]:
    """Return a row for each figure, with a cell for each training."""
    figures: dict[str, Callable[[TrainingSummary], str]] = {
        "validation loss, last": lambda s: f"{s.final_validation_loss:.3f}",
        "training loss, last tenth of the steps": lambda s: f"{s.final_train_loss:.3f}",
        "steps": lambda s: f"{s.last_step}",
        "tokens": lambda s: f"{s.tokens:,}",
        "training time": lambda s: f"{s.seconds:.0f} s",
        "time per step, median": lambda s: f"{s.step_seconds * 1e3:.0f} ms",
        "tokens per second": lambda s: f"{s.tokens_per_second:,.0f}",
        "share of forward + backward": lambda s: f"{s.forward_backward:.1%}",
        "share of the optimizer": lambda s: f"{s.optimizer:.1%}",
        "peak learning rate": lambda s: f"{settings.lr_of(s.name):g}",
    }
    return [[name, *(figure(summary) for summary in summaries)] for name, figure in figures.items()]


def _plot(picture: Path, summaries: Sequence[TrainingSummary]) -> None:
    """Write a PNG with the loss curves over steps and over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.4), dpi=150, layout="constrained")
    for axes, (along, label) in zip(figure.subplots(1, 2, sharey=True), ALONG.items(), strict=True):
        for summary in summaries:
            colour, width = COLOURS[summary.name], max(1, len(summary.train) // 40)
            # Losses of single batches are noisy, so each point is a mean with the losses just before it.
            losses = np.convolve([point.loss for point in summary.train], np.full(width, 1 / width), mode="valid")
            places = [getattr(point, along) for point in summary.train[width - 1 :]]
            axes.plot(places, losses, color=colour, alpha=0.4, linewidth=0.8)
            places = [getattr(point, along) for point in summary.validation]
            told = f"{LABELS[summary.name]}: validation {summary.final_validation_loss:.3f} (thin: training)"
            validated = [point.loss for point in summary.validation]
            axes.plot(places, validated, color=colour, marker="o", markersize=3, label=told)
        # Losses above the second validation show only the fall from random weights, where the curves look equal.
        axes.set_ylim(top=max(point.loss for some in summaries for point in some.validation[1:] or some.validation))
        axes.set(xlabel=label, ylabel="loss [nats per token]")
        axes.legend()
    figure.savefig(picture)
