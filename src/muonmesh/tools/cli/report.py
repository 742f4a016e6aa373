"""Report: the metrics of a run, their summary, and the report: a table, ``report.html`` and JSON.

Each line of ``metrics.jsonl`` is a JSON object; the report reads no other source. A line has ``run`` ("muon" or
"adamw"), ``step``, ``tokens`` and ``seconds`` (training time without evaluation and checkpoints), and then either a
step's ``loss``, ``lr`` and times, or a ``validation_loss``.
"""

from __future__ import annotations

import io
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from importlib.resources import files
from pathlib import Path
from statistics import fmean, median
from string import Template
from typing import Any, get_args

import numpy as np

from muonmesh.checkpoint.form import FINITE, POSITIVE, SIZE, TEXT, ValueKind, check_form, one_of
from muonmesh.errors import FileError
from muonmesh.files import read_text, write_text, writing
from muonmesh.table import aligned
from muonmesh.tools.cli.corpus import load_corpus_of
from muonmesh.tools.cli.run_settings import Optimizer, Settings, load_config
from muonmesh.tools.cli.terminal import say

METRICS_FILE = "metrics.jsonl"
TIMES = ("step_seconds", "forward_backward_seconds", "optimizer_seconds")
OF_BOTH = {"run": one_of(get_args(Optimizer)), "step": SIZE, "seconds": FINITE}
OF_A_STEP = {**OF_BOTH, "tokens": SIZE, "loss": FINITE, **dict.fromkeys(TIMES, FINITE)}
OF_A_STEP |= {"step": ValueKind("a whole number of at least 1", lambda step: SIZE.holds(step) and step > 0)}
OF_A_STEP |= {"step_seconds": POSITIVE}  # the report divides by both
OF_A_VALIDATION = {**OF_BOTH, "validation_loss": FINITE, "optimizer": ({TEXT: (FINITE, None)}, None)}


def append_metrics(directory: Path, **record: Any) -> None:
    """Append one line. If a run is killed, at most the last line is incomplete.

    Raises:
        FileError: the line cannot be written.
    """
    path = directory / METRICS_FILE
    with writing(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def cut_metrics(directory: Path, run: str, step: int) -> float:
    """Remove the lines of a training after a step, which a resumed run writes again; return its seconds until then.

    Args:
        directory: The run's directory.
        run: The training, "muon" or "adamw".
        step: The last step to keep.

    Raises:
        FileError: the file is damaged, or cannot be written; the file is unchanged.
    """
    records = [r for r in read_metrics(directory) if r["run"] != run or r["step"] <= step]
    write_text(directory / METRICS_FILE, "".join(json.dumps(record) + "\n" for record in records))
    return max((float(record["seconds"]) for record in records if record["run"] == run), default=0.0)


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """Return every complete line of a run's metrics, in the order of writing; empty if there is no file.

    Raises:
        FileError: a line has another form than a training writes; the message has its number.
    """
    path = directory / METRICS_FILE
    if not path.exists():
        return []
    lines = read_text(path, needed="the metrics that a training wrote there").split("\n")
    # After a kill, the last line is incomplete.
    return [_read(path, number, line) for number, line in enumerate(lines[:-1], start=1)]


def _read(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    form = OF_A_STEP if isinstance(record, dict) and "loss" in record else OF_A_VALIDATION
    write = "Remove the line, or bring an undamaged copy"
    checked: dict[str, Any] = check_form(f"{path}: line {number}", record, form, write, kind=FileError)
    return checked


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
    evaluation. ``groups`` are figures of the param groups at the last validation, by group and name.
    """

    name: Optimizer
    train: tuple[Point, ...]
    validation: tuple[Point, ...]
    tokens: int
    step_seconds: float
    tokens_per_second: float
    forward_backward: float
    optimizer: float
    groups: dict[str, dict[str, float | None]] = field(default_factory=dict)

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
        groups=_groups(validations[-1].get("optimizer") or {}),
    )


def _groups(figures: Mapping[str, float | None]) -> dict[str, dict[str, float | None]]:
    """Return the figures of `Muon.metrics` by group and name, with the RMS of the weights."""
    groups: dict[str, dict[str, float | None]] = {}
    for key, value in figures.items():
        group, _, name = key.rpartition("/")
        groups.setdefault(group, {})[name] = value
    for group_figures in groups.values():
        if (update := group_figures.get("update_rms")) and (ratio := group_figures.get("update_to_weight")):
            group_figures["weight_rms"] = update / ratio
    return groups


REPORT_FILE, FIGURES_FILE = "report.html", "report.json"
COLOURS = {"muon": "#d1495b", "adamw": "#3f7cb5"}  # of different brightness, for print and for color-blind readers
ALONG = {"step": "step", "seconds": "training time [s], evaluation left out"}
INK = "#010203"  # of the pictures' text and axes: the page's text color takes its place


def facts_of(run: Path, settings: Settings) -> dict[str, str]:
    """Return what a run trains, on what and where, in words.

    Raises:
        FileError: a file of the run is missing or damaged.
    """
    corpus, began = load_corpus_of(run), load_config(run)["environment"]
    return {
        "model": f"{settings.model}, {began.get('parameters', '?')} parameters",
        "data": f"{corpus.source}, {corpus.files} files, {corpus.train_tokens:,} tokens to learn from, "
        f"{corpus.validation_tokens:,} held out",
        "steps": f"{settings.steps} of {settings.tokens_per_step:,} tokens",
        "mesh": f"{settings.parallel.upper()}, ranks: {settings.ranks}, on {settings.device}, {settings.dtype}",
        "seed": f"{settings.seed}, of weights, data order and dropout",
        "began": f"{began.get('date', '?')} on {began.get('machine', '?')}",
        "versions": f"muonmesh {began.get('muonmesh', '?')}, torch {began.get('torch', '?')}",
        "directory": str(run),
    }


def write_report(run: Path, settings: Settings) -> Path | None:
    """Write ``report.html`` and ``report.json`` of a run into its directory, and print a table.

    The report of a stopped run has the finished steps.

    Returns:
        The path of ``report.html``; None if no step was finished.

    Raises:
        FileError: the run's metrics are damaged, or the report cannot be written.
    """
    summaries = summarise(run)
    if not summaries:
        return None
    comparison, facts = compare(summaries), facts_of(run, settings)
    table = [["", *(LABELS[summary.name] for summary in summaries)], *_rows(settings, summaries)]
    say(*aligned(table, right=(1, 2), ruled=True))
    if comparison is not None:
        say(str(comparison), style="bold")
    with writing(run):
        pictures = "".join(_picture(summaries, along, label) for along, label in ALONG.items())
    body = [_table(list(facts.items())), f"<p><b>{escape(str(comparison))}</b>" if comparison else ""]
    body += [f'<div class="curves">{pictures}</div>', _table(table, "figures")]
    for summary in summaries:
        if summary.groups:
            body += [f"<h2>{LABELS[summary.name]}, by group</h2>", _table(_group_rows(summary), "figures")]
        if (sample := run / f"sample-{summary.name}.txt").is_file():
            written = escape(read_text(sample, needed="what the training wrote there"))
            body += [f"<h2>{LABELS[summary.name]}, a sample of its text</h2>", f"<pre>{written}</pre>"]
    page = Template((files("muonmesh.tools.cli") / REPORT_FILE).read_text("utf-8"))
    title = escape(f"{' and '.join(LABELS[summary.name] for summary in summaries)} on {settings.model}")
    write_text(run / REPORT_FILE, page.substitute(title=title, body="\n".join(body)))
    figures = {
        "facts": facts,
        "trainings": [asdict(summary) for summary in summaries],
        "comparison": comparison and asdict(comparison),
    }
    write_text(run / FIGURES_FILE, json.dumps(figures, indent=1) + "\n")
    return run / REPORT_FILE


def _rows(settings: Settings, summaries: Sequence[TrainingSummary]) -> list[list[str]]:
    """Return a row for each figure, with a cell for each training."""
    figures: dict[str, Callable[[TrainingSummary], str]] = {
        "validation loss, last": lambda s: f"{s.final_validation_loss:.3f}",
        "perplexity of the held-out text": lambda s: f"{math.exp(min(s.final_validation_loss, 99)):,.1f}",
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


def _group_rows(summary: TrainingSummary) -> list[list[str]]:
    """Return a row for each param group, with its figures at the last validation."""
    columns = {"lr": "last learning rate", **{f"{of}_rms": f"RMS of {of}" for of in ("update", "weight", "gradient")}}
    rows = [["group", *columns.values()]]
    for name, figures in summary.groups.items():
        rows.append([name, *("" if figures.get(key) is None else f"{figures[key]:.3g}" for key in columns)])
    return rows


def _table(rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """Return rows as a table of HTML. Their first cells are headings; in a table of figures, so is the first row.

    A heading may break after a dot, because a phone has no room for "adamw.embeddings" beside four figures.
    """
    lines = []
    for number, (first, *cells) in enumerate(rows):
        cell = "th" if kind and not number else "td"
        others = "".join(f"<{cell}>{escape(text)}</{cell}>" for text in cells)
        heading = escape(first).replace(".", ".<wbr>")
        lines.append(f'<tr><th scope="row">{heading}</th>{others}</tr>')
    return f'<section><table class="{kind}">{"".join(lines)}</table></section>'


def _picture(summaries: Sequence[TrainingSummary], along: str, label: str) -> str:
    """Return the loss curves over steps or over time as SVG, in the colors of the page."""
    import matplotlib
    from matplotlib.figure import Figure

    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    plain = {"axes.facecolor": "none", "svg.fonttype": "none", "font.size": 9}
    with matplotlib.rc_context({**plain, **dict.fromkeys(inked, INK)}):
        figure = Figure(figsize=(4.8, 3.4), layout="constrained")
        axes = figure.subplots()
        for summary in summaries:
            colour, width = COLOURS[summary.name], max(1, len(summary.train) // 40)
            # Losses of single batches are noisy, so each point is a mean with the losses just before it.
            losses = np.convolve([point.loss for point in summary.train], np.full(width, 1 / width), mode="valid")
            places = [getattr(point, along) for point in summary.train[width - 1 :]]
            axes.plot(places, losses, color=colour, alpha=0.4, linewidth=0.8)
            places = [getattr(point, along) for point in summary.validation]
            legend = f"{LABELS[summary.name]}: validation {summary.final_validation_loss:.3f} (thin: training)"
            validated = [point.loss for point in summary.validation]
            axes.plot(places, validated, color=colour, marker="o", markersize=3, label=legend)
        # Losses above the second validation show only the fall from random weights, where the curves look equal.
        axes.set_ylim(top=max(point.loss for run in summaries for point in run.validation[1:] or run.validation))
        axes.set(xlabel=label, ylabel="loss [nats per token]")
        axes.legend(frameon=False)
        written = io.StringIO()
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    return "<svg" + written.getvalue().partition("<svg")[2].replace(INK, "currentColor")
