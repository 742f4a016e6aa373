"""Report: the end of a run: a table on the terminal, two pictures, ``report.html`` and its figures as JSON."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from rich.console import Console

from muonmesh.cli.run_settings import Settings, load_config
from muonmesh.cli.summary import LABELS, Comparison, Point, TrainingSummary, compare, summarise
from muonmesh.cli.terminal import make_console, table_of
from muonmesh.files import read_text, write_text, writing

REPORT_FILE, FIGURES_FILE = "report.html", "report.json"
COLOURS = {"muon": "#d1495b", "adamw": "#30638e"}  # apart in brightness too, for print and for the colour-blind
PICTURES = {"loss-steps.png": "step", "loss-time.png": "training time [s], evaluation left out"}
METHOD = (
    "Both trainings start from the same weights, read the same sequences in the same order and follow the same "
    "schedule. The validation loss is the mean over the same held-out sequences each time. The number of steps is read "
    "off the validation curve of the better optimizer, at the final loss of the other, between two measurements by a "
    "straight line. Under a schedule that ends at zero this understates the better one: it is read while its learning "
    "rate is still high. Time is training time; evaluation and checkpoints are left out of it for both. Shares are of "
    "a step's time on the first rank, waits for others included."
)


def write_report(run: Path, settings: Settings) -> Path | None:
    """Summarise a run: pictures, ``report.html`` and ``report.json`` into its directory, a table onto the terminal.

    A run that was stopped is reported as far as it got; one without a finished step is not (None).

    Raises:
        FileError: what the run left is damaged, or the report cannot be written.
    """
    summaries = summarise(run)
    if not summaries:
        return None
    comparison = compare(summaries)
    with writing(run):
        for name in PICTURES:
            _plot(run / name, summaries, comparison)
    path = run / REPORT_FILE
    write_text(path, _page(run, settings, summaries, comparison))
    figures = {
        "trainings": [asdict(summary) for summary in summaries],
        "comparison": comparison and asdict(comparison),
    }
    write_text(run / FIGURES_FILE, json.dumps(figures, indent=1) + "\n")
    _print(make_console(), settings, summaries, comparison)
    return path


def _print(
    console: Console, settings: Settings, summaries: Sequence[TrainingSummary], comparison: Comparison | None
) -> None:
    """Print a row for each figure, a column for each training, and what the comparison says."""
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
        "peak learning rate": lambda s: f"{settings.lr if s.name == 'muon' else settings.adamw_lr:g}",
    }
    rows = [[name, *(figure(summary) for summary in summaries)] for name, figure in figures.items()]
    console.print(table_of(["", *(LABELS[summary.name] for summary in summaries)], rows))
    if comparison is not None:
        console.print(f"[bold]{comparison}[/bold]", soft_wrap=True)


def _page(run: Path, settings: Settings, summaries: Sequence[TrainingSummary], comparison: Comparison | None) -> str:
    """Return what the terminal shows and what the run wrote beside it as one page, with the pictures in it."""
    console = Console(record=True, file=io.StringIO(), width=120, highlight=False)
    console.print(f"muonmesh train: {run.name}", style="bold", markup=False)
    _print(console, settings, summaries, comparison)
    needed = "what the run wrote there of its optimizer"
    explained = (f"{s.name}\n\n" + read_text(run / f"explain-{s.name}.txt", needed=needed) for s in summaries)
    config = load_config(run)
    environment = config.pop("environment")
    settings_of = "\n".join(f"{name}: {value}" for name, value in {**environment, **config}.items())
    for text in (METHOD, "Who orthogonalizes what", *explained, "Where it ran, and its settings", settings_of):
        console.print(f"\n{text}", markup=False)
    pictures = (base64.b64encode((run / name).read_bytes()).decode("ascii") for name in PICTURES)
    tags = "".join(f'<img alt="losses" src="data:image/png;base64,{picture}">' for picture in pictures)
    return console.export_html().replace("<body>", f"<body>{tags}")


def _plot(picture: Path, summaries: Sequence[TrainingSummary], comparison: Comparison | None) -> None:
    """Write the loss curves against steps or against time, as a PNG."""
    from matplotlib.figure import Figure

    by_step = picture.name == "loss-steps.png"

    def along(points: Sequence[Point]) -> list[float]:
        return [point.step if by_step else point.seconds for point in points]

    figure = Figure(figsize=(7.2, 4.4), dpi=150, layout="constrained")
    axes = figure.subplots()
    for summary in summaries:
        colour, width = COLOURS[summary.name], max(1, len(summary.train) // 40)
        # Single batches are noisy: the mean of each and those just before it.
        losses = np.convolve([point.loss for point in summary.train], np.full(width, 1 / width), mode="valid")
        axes.plot(along(summary.train)[width - 1 :], losses, color=colour, alpha=0.4, linewidth=0.8)
        validated = [point.loss for point in summary.validation]
        label = f"{LABELS[summary.name]}: validation {validated[-1]:.3f} (thin: training, running mean)"
        axes.plot(along(summary.validation), validated, color=colour, marker="o", markersize=3, label=label)
    if comparison is not None:  # the stretch between the moments at which both reached the same loss
        ends = (comparison.steps, comparison.of_steps) if by_step else (comparison.seconds, comparison.of_seconds)
        label = f"{ends[0] / ends[1]:.2f}× the {'steps' if by_step else 'time'}"
        axes.plot(ends, [comparison.loss] * 2, color="#444444", linestyle=":", marker="|", label=label)
    # What lies above the second validation is the fall from random weights, in which nothing can be told apart.
    axes.set_ylim(top=max(point.loss for some in summaries for point in some.validation[1:] or some.validation))
    axes.set_xlim(left=0)
    axes.set_xlabel(PICTURES[picture.name])
    axes.set_ylabel("loss [nats per token]")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.legend(frameon=False)
    figure.savefig(picture)
