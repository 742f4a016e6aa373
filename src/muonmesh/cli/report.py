"""Report: the end of a run: a table on the terminal, two pictures, and ``report.html`` that needs nothing else."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from muonmesh.cli.page import document, embedded, table
from muonmesh.cli.plots import FILES, plot_losses
from muonmesh.cli.settings import Settings, load_config
from muonmesh.cli.summary import LABELS, Comparison, TrainingSummary, compare, summarise
from muonmesh.cli.terminal import make_console
from muonmesh.files import read_text, write_text, writing

REPORT_FILE = "report.html"
METHOD = (
    "Both trainings start from the same weights, read the same sequences in the same order and follow the same "
    "schedule. The validation loss is the mean over the same held-out sequences each time. The number of steps is read "
    "off the validation curve of the better optimizer, at the final loss of the other, between two measurements by a "
    "straight line. Under a schedule that ends at zero this understates the better one: it is read while its learning "
    "rate is still high. Time is training time; evaluation and checkpoints are left out of it for both."
)


def write_report(run: Path, settings: Settings) -> Path | None:
    """Summarise a run: pictures and ``report.html`` into its directory, a table onto the terminal.

    A run that was stopped is reported as far as it got; one without a finished step is not (None).

    Raises:
        FileError: what the run left is damaged, or the report cannot be written.
    """
    summaries = summarise(run)
    if not summaries:
        return None
    comparison = compare(summaries)
    with writing(run):
        plot_losses(run, summaries, comparison)
    path = run / REPORT_FILE
    write_text(path, _page(run, settings, summaries, comparison))
    _print(settings, summaries, comparison)
    return path


def _print(settings: Settings, summaries: Sequence[TrainingSummary], comparison: Comparison | None) -> None:
    console = make_console()
    printed = Table()
    headings, rows = _figures(settings, summaries)
    for number, heading in enumerate(headings):
        printed.add_column(heading, justify="left" if number == 0 else "right")
    for row in rows:
        printed.add_row(*row)
    console.print(printed)
    if comparison is not None:
        console.print(f"[bold]{comparison}[/bold]", soft_wrap=True)


def _figures(settings: Settings, summaries: Sequence[TrainingSummary]) -> tuple[list[str], list[list[str]]]:
    """The table of the report: a row for each figure, a column for each training."""
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
    return ["", *(LABELS[summary.name] for summary in summaries)], rows


def _page(run: Path, settings: Settings, summaries: Sequence[TrainingSummary], comparison: Comparison | None) -> str:
    config = load_config(run)
    environment = config.pop("environment", {})
    titles = {"steps": "Loss against steps", "seconds": "Loss against time"}
    pictures = "".join(embedded(run / name, titles[axis]) for axis, name in FILES.items())
    explanation = read_text(run / "explain.txt", needed="what the run wrote there of its optimizers")
    lead = str(comparison) if comparison is not None else _unfinished(settings, summaries)
    return document(
        f"muonmesh train: {run.name}",
        f"""<p class="lead">{html.escape(lead)}.</p>
{table(*_figures(settings, summaries))}
<p class="note">{html.escape(METHOD)} Shares are of a step's time on the first rank; waits for others included.</p>
{pictures}
<h2>Who orthogonalises what</h2><pre>{html.escape(explanation)}</pre>
<h2>Where it ran</h2>{_pairs(environment)}
<h2>Settings</h2>{_pairs(config)}""",
    )


def _unfinished(settings: Settings, summaries: Sequence[TrainingSummary]) -> str:
    losses = ", ".join(f"{LABELS[s.name]} {s.final_validation_loss:.3f} after {s.last_step} steps" for s in summaries)
    missing = [LABELS[name] for name in settings.optimizers if name not in {s.name for s in summaries}]
    return f"Validation loss: {losses}" + (f"; not trained yet: {', '.join(missing)}" if missing else "")


def _pairs(values: dict[str, Any]) -> str:
    return table(("", "value"), [(str(name), str(value)) for name, value in values.items()])
