"""Sweep: each optimizer trained whole at several peak learning rates and seeds, alike, and what came of it.

Every training of a sweep is a run of its own below the sweep's directory, with its own report, and can be looked at,
resumed and reported like any other. A sweep that is started again goes on where it stopped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, stdev
from typing import TypeVar

from muonmesh.cli.run import train_run
from muonmesh.cli.run_settings import CONFIG_FILE, Optimizer, Request, Settings, load_settings
from muonmesh.cli.summary import LABELS, summarise
from muonmesh.cli.terminal import make_console, table_of
from muonmesh.errors import FileError
from muonmesh.files import write_text

Number = TypeVar("Number", int, float)
SWEEP_FILE = "sweep.json"


@dataclass(frozen=True)
class Trial:
    """One training of a sweep.

    Attributes:
        optimizer: What learns.
        lr: Its peak learning rate.
        seed: Of weights, data order and dropout.
        loss: Last validation loss; None until it has finished.
    """

    optimizer: Optimizer
    lr: float
    seed: int
    loss: float | None = None

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.optimizer}-lr{self.lr:g}-seed{self.seed}"

    def settings(self, base: Settings) -> Settings:
        """Return the settings of its run."""
        own = replace(base, out=str(base.directory / self.name), optimizer=self.optimizer, seed=self.seed)
        return replace(own, lr=self.lr) if self.optimizer == "muon" else replace(own, adamw_lr=self.lr)


def train_sweep(base: Settings, request: Request) -> int:
    """Train everything that a sweep asks for and is not finished yet, report, and return the exit code.

    Raises:
        ValueError: an option is wrong, or does not go with a sweep.
    """
    sweep, resume = request.sweep, request.resume
    if sweep is None:
        write = f"--sweep lr={base.lr:g} --seeds {request.seeds}"
        raise ValueError(f"--seeds {request.seeds}: found no --sweep beside it. Write: {write}")
    if resume not in (None, "auto"):
        raise ValueError(f"--sweep {sweep}: found --resume beside it, which is of one run. Leave it out")
    trials = parse_sweep(sweep, request.seeds, base)
    if resume is None and os.path.lexists(base.directory) and os.listdir(base.directory):
        raise ValueError(
            f"--out {base.out}: already there. Write: --resume auto beside the same --sweep, or another --out"
        )
    for trial in trials:
        if list(finished(base, [trial])):
            continue
        settings = trial.settings(base)
        resuming = (settings.directory / CONFIG_FILE).is_file()
        if resuming:
            settings = load_settings(settings.directory, out=settings.out)
        code = train_run(settings, resuming=resuming)
        if code:
            return code
    done = list(finished(base, trials))
    write_sweep(base, done)
    console = make_console()
    console.print(table_of(*figures(done)))
    for line in best_of(done):
        console.print(f"[bold]{line}[/bold]", soft_wrap=True)
    console.print(f"Sweep: {base.directory / SWEEP_FILE}", soft_wrap=True)
    return 0


def parse_sweep(sweep: str, seeds: str | None, base: Settings) -> list[Trial]:
    """Read ``--sweep lr=0.003,0.006`` and ``--seeds 0,1``: every rate with every seed, for each optimizer.

    Raises:
        FileError: a rate or a seed is none, or is there twice.
    """
    name, _, text = sweep.partition("=")
    if name != "lr" or not text:
        raise FileError(f"--sweep {sweep}: found {name!r}; needed learning rates. Write: --sweep lr=0.003,0.006")
    rates = _numbers(f"--sweep {sweep}", text, float)
    each = [base.seed] if seeds is None else _numbers(f"--seeds {seeds}", seeds, int)
    trials = [Trial(optimizer, lr, seed) for optimizer in base.optimizers for lr in rates for seed in each]
    for trial in trials:
        trial.settings(base)  # raises what is wrong with a value
    return trials


def finished(base: Settings, trials: Sequence[Trial]) -> Iterator[Trial]:
    """Yield the trials that have been trained to their end, with their losses.

    Raises:
        FileError: what one of them left is damaged.
    """
    for trial in trials:
        folder = base.directory / trial.name
        for summary in summarise(folder) if folder.is_dir() else ():
            if summary.last_step == base.steps and summary.validation[-1].step == base.steps:
                yield replace(trial, loss=summary.final_validation_loss)


def write_sweep(base: Settings, trials: Sequence[Trial]) -> None:
    """Write the losses of finished trials, ``sweep.json``, into the directory of a sweep.

    Raises:
        FileError: it could not be written.
    """
    write_text(base.directory / SWEEP_FILE, json.dumps([asdict(trial) for trial in trials], indent=1) + "\n")


def figures(trials: Sequence[Trial]) -> tuple[list[str], list[list[str]]]:
    """Return the table of a sweep: a row for each optimizer, a column for each learning rate; the best is starred."""
    rates = sorted({trial.lr for trial in trials})
    rows = []
    for optimizer, found in losses_of(trials).items():
        best = min(map(fmean, found.values()))
        rows.append([LABELS[optimizer], *(_cell(found.get(rate), best) for rate in rates)])
    return ["peak learning rate", *(f"{rate:g}" for rate in rates)], rows


def best_of(trials: Sequence[Trial]) -> list[str]:
    """Return a sentence for each optimizer: the learning rate with the lowest loss."""
    said = []
    for optimizer, found in losses_of(trials).items():
        means = {rate: fmean(losses) for rate, losses in found.items()}
        rate = min(means, key=means.__getitem__)
        edge = " (the edge of what was tried)" if len(means) > 1 and rate in (min(means), max(means)) else ""
        said.append(f"{LABELS[optimizer]} is best at {rate:g}{edge}: validation loss {means[rate]:.3f}")
    return said


def losses_of(trials: Sequence[Trial]) -> dict[Optimizer, dict[float, list[float]]]:
    """Return the losses of all seeds of finished trials, by optimizer and by learning rate, the smallest first."""
    found: dict[Optimizer, dict[float, list[float]]] = {}
    for trial in sorted(trials, key=lambda trial: trial.lr):
        if trial.loss is not None:
            found.setdefault(trial.optimizer, {}).setdefault(trial.lr, []).append(trial.loss)
    return found


def _cell(losses: Sequence[float] | None, best: float) -> str:
    if losses is None:
        return "–"
    spread = f" ± {stdev(losses):.3f}" if len(losses) > 1 else ""
    return f"{fmean(losses):.3f}{spread}{' *' if fmean(losses) == best else ''}"


def _numbers(option: str, text: str, kind: Callable[[str], Number]) -> list[Number]:
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise FileError(f"{option}: found {text!r}; needed numbers with commas between them. Correct it") from error
    if len(set(numbers)) < len(numbers):
        raise FileError(f"{option}: found a value twice; needed each once. Leave it out")
    return numbers
