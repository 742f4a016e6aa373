"""Sweep: each optimizer trained whole at several peak learning rates and seeds, alike, and what came of it.

Every training of a sweep is a run of its own below the sweep's directory, with its own report, and can be looked at,
resumed and reported like any other. A sweep that is started again goes on where it stopped.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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

Losses = Mapping[Optimizer, Mapping[float, Sequence[float]]]
"""The last validation losses of all seeds, by optimizer and by peak learning rate, the smallest first."""


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
        resuming = (trial.directory / CONFIG_FILE).is_file()
        settings = load_settings(trial.directory, out=trial.out) if resuming else trial
        if replace(trial, ranks=settings.ranks, parallel=settings.parallel) != settings:
            raise ValueError(f"--resume auto: found other settings in {trial.out}; needed those of the same sweep")
        if loss_of(trial) is None and (code := train_run(settings, resuming=resuming)):
            return code
    losses = write_sweep(base, trials)
    console = make_console()
    console.print(table_of(*figures(losses)))
    for line in best_of(losses):
        console.print(line, style="bold", soft_wrap=True)
    console.print(f"Sweep: {base.directory / SWEEP_FILE}", soft_wrap=True)
    return 0


def parse_sweep(sweep: str, seeds: str | None, base: Settings) -> list[Settings]:
    """Read ``--sweep lr=0.003,0.006`` and ``--seeds 0,1``: every rate with every seed, for each optimizer.

    Returns:
        The settings of each training, of one optimizer.

    Raises:
        FileError: a rate or a seed is none, or is there twice.
    """
    name, _, text = sweep.partition("=")
    if name != "lr" or not text:
        raise FileError(f"--sweep {sweep}: found {name!r}; needed learning rates. Write: --sweep lr=0.003,0.006")
    rates = _numbers(f"--sweep {sweep}", text, float)
    each = [base.seed] if seeds is None else _numbers(f"--seeds {seeds}", seeds, int)
    trials = []
    for optimizer, lr, seed in itertools.product(base.optimizers, rates, each):
        own = replace(base, out=f"{base.out}/{optimizer}-lr{lr:g}-seed{seed}", optimizer=optimizer, seed=seed)
        trials.append(replace(own, lr=lr) if optimizer == "muon" else replace(own, adamw_lr=lr))
    return trials


def loss_of(trial: Settings) -> float | None:
    """Return the last validation loss of a training, None until it has finished.

    Raises:
        FileError: what it left is damaged.
    """
    for summary in summarise(trial.directory):
        if summary.last_step == trial.steps == summary.validation[-1].step:
            return summary.final_validation_loss
    return None


def write_sweep(base: Settings, trials: Sequence[Settings]) -> Losses:
    """Write the losses of finished trainings, ``sweep.json``, into the directory of a sweep, and return them.

    Raises:
        FileError: it could not be written.
    """
    found: dict[Optimizer, dict[float, list[float]]] = {}
    rows = []
    for trial in trials:
        (optimizer,), loss = trial.optimizers, loss_of(trial)
        if loss is not None:
            rate = trial.lr_of(optimizer)
            found.setdefault(optimizer, {}).setdefault(rate, []).append(loss)
            rows.append({"optimizer": optimizer, "lr": rate, "seed": trial.seed, "loss": loss})
    write_text(base.directory / SWEEP_FILE, json.dumps(rows, indent=1) + "\n")
    return {optimizer: dict(sorted(of.items())) for optimizer, of in found.items()}


def figures(losses: Losses) -> tuple[list[str], list[list[str]]]:
    """Return the table of a sweep: a row for each optimizer, a column for each learning rate; the best is starred."""
    rows = []
    for optimizer, found in losses.items():
        best = min(map(fmean, found.values()))
        rows.append([LABELS[optimizer], *(_cell(some, best) for some in found.values())])
    return ["peak learning rate", *(f"{rate:g}" for rate in next(iter(losses.values())))], rows


def best_of(losses: Losses) -> list[str]:
    """Return a sentence for each optimizer: the learning rate with the lowest loss."""
    said = []
    for optimizer, found in losses.items():
        means = {rate: fmean(some) for rate, some in found.items()}
        rate = min(means, key=means.__getitem__)
        edge = " (the edge of what was tried)" if len(means) > 1 and rate in (min(means), max(means)) else ""
        said.append(f"{LABELS[optimizer]} is best at {rate:g}{edge}: validation loss {means[rate]:.3f}")
    return said


def _cell(losses: Sequence[float], best: float) -> str:
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
