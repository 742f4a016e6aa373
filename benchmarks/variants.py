"""The rules that come with muonmesh, against Muon and AdamW, each with learning rates swept alike.

    python -m benchmarks.variants                                          # small, 300 steps, three seeds: hours
    python -m benchmarks.variants --rules muon normuon --model nano --steps 40 --seeds 1 --rates 1    # minutes
    python -m benchmarks.variants --json benchmarks/results/variants.json --picture docs/images/variants.png

The model and the text are those of `muonmesh train`: a Llama, and Python's own standard library. Every rule is tried at
the same multiples of one learning rate with the first seed; the best of them is trained with all seeds. A rule is
measured by the steps in which the mean over seeds comes to Muon's final validation loss, by its own final loss with
the spread over seeds, and by what a step of the optimizer costs: processor time, since other programs may run beside
this one, of steps that the rules take in turns on gradients of one batch. Trainings that are in the JSON already are
not repeated: a sweep can be cut short, and goes on where it was.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.trainings import Trainings
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import muonmesh as mm
from muonmesh.cli.configuration import model_config
from muonmesh.cli.corpus import Corpus, Windows, prepare_corpus
from muonmesh.cli.model import build_model
from muonmesh.numerics.rules.dynmuon import power_at

VOCAB, LENGTH, BATCH, HELD_OUT = 2048, 128, 8, 32
WARMUP = 0.1  # of the steps; then to a tenth along a cosine
WARM_STEPS, COST_STEPS = 3, 15
RULES: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 3e-3, "overrides": {"": "adamw"}},
    "muon": {"lr": 6e-3},
    "normuon": {"lr": 6e-3, "rule": "normuon"},
    "adamuon": {"lr": 6e-3, "rule": "adamuon"},
    "muoneq": {"lr": 6e-3, "rule": "muoneq"},
    "muon_plus": {"lr": 6e-3, "rule": "muon_plus"},
    "dynmuon": {"lr": 6e-3, "rule": "dynmuon"},
    "soap": {"lr": 6e-3, "rule": "soap"},
    "soap, every 10": {"lr": 6e-3, "rule": "soap", "muon": {"lr": 6e-3, "soap_every": 10}},
    "hyperball": {"lr": 6e-3, "rule": "hyperball", "muon": {"lr": 2e-2}},
    "cautious": {"lr": 6e-3, "decay_mode": "cautious"},
    "per head": {"lr": 6e-3, "per_head": True},
    "scion head": {"lr": 6e-3, "overrides": {"lm_head.weight": "scion_sign"}},
}
"""What `from_model` is told, with the learning rate that the multiples are of. AdamW's half has that of the rule, but
Hyperball's, whose rate is a length relative to the weights'."""
RATES = (0.5, 1.0, 2.0, 4.0)


def build(rule: str, multiple: float, seed: int, corpus: Corpus, model_name: str) -> tuple[nn.Module, mm.Muon]:
    """A fresh model and the optimizer of a rule."""
    torch.manual_seed(seed)
    model = build_model(model_config(model_name, vocab=corpus.vocab, seq=LENGTH))
    settings = {key: value for key, value in RULES[rule].items() if key != "lr"}
    lr = RULES[rule]["lr"]
    if "muon" in settings:
        settings["muon"] = {**settings["muon"], "lr": settings["muon"]["lr"] * multiple}
    else:
        lr *= multiple
    return model, mm.from_model(model, lr=lr, process_group="local", **settings)


def train(rule: str, multiple: float, seed: int, corpus: Corpus, model_name: str, steps: int) -> dict[str, Any]:
    """One training: validation losses by step."""
    model, optimizer = build(rule, multiple, seed, corpus, model_name)
    windows = Windows(corpus.train(), length=LENGTH, seed=seed)
    held_out = torch.from_numpy(Windows(corpus.validation(), length=LENGTH, seed=0).spread(HELD_OUT))
    every = max(1, steps // 30)
    validation: list[tuple[int, float]] = []
    for done in take_steps(model, optimizer, windows, steps):
        if done % every == 0 or done == steps:
            model.eval()
            with torch.no_grad():
                validation.append((done, float(loss(model, held_out))))
            model.train()
            if not math.isfinite(validation[-1][1]):
                break
    return {"validation": validation}


def costs(rules: Sequence[str], corpus: Corpus, model_name: str) -> dict[str, float]:
    """Processor milliseconds of one step of each rule's optimizer, medians of steps that they take in turns."""
    batch = torch.from_numpy(Windows(corpus.train(), length=LENGTH, seed=0).shuffled(range(BATCH)))
    optimizers: dict[str, mm.Muon] = {}
    for rule in rules:
        model, optimizers[rule] = build(rule, 1.0, 0, corpus, model_name)
        loss(model, batch).backward()
    seconds: dict[str, list[float]] = {rule: [] for rule in rules}
    for number in range(WARM_STEPS + COST_STEPS):
        for rule, optimizer in optimizers.items():
            started = time.process_time()
            optimizer.step()
            if number >= WARM_STEPS:
                seconds[rule].append(time.process_time() - started)
    return {rule: 1000 * statistics.median(some) for rule, some in seconds.items()}


def take_steps(
    model: nn.Module, optimizer: mm.Muon, windows: Windows, steps: int, *, batch: int = BATCH
) -> Iterator[int]:
    """Train on the schedule of `rate_at`, from the rates that the groups have; yield how many steps are done."""
    peaks = [group["lr"] for group in optimizer.param_groups]
    for step in range(steps):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * rate_at(step, steps)
            if group["algorithm"] == "dynmuon":
                group["dynmuon_power"] = power_at(step / steps)
        loss(model, torch.from_numpy(windows.shuffled(range(step * batch, (step + 1) * batch)))).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield step + 1


def rate_at(step: int, steps: int) -> float:
    """The schedule: linear warmup, then a cosine down to a tenth."""
    warmup = max(1, int(WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def final(run: dict[str, Any]) -> float:
    """The last validation loss; infinite where the training diverged."""
    value = float(run["validation"][-1][1])
    return value if math.isfinite(value) else math.inf


def steps_to(run: dict[str, Any], target: float) -> float:
    """Steps to a validation loss, interpolated; infinite if it is never reached."""
    before: tuple[int, float] = (0, math.inf)
    for step, value in run["validation"]:
        if value <= target:
            if not math.isfinite(before[1]):
                return float(step)
            return before[0] + (step - before[0]) * (before[1] - target) / (before[1] - value)
        before = step, value
    return math.inf


def middle(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean of trainings with several seeds; as long as the shortest, if some diverged."""
    rows = zip(*(run["validation"] for run in runs), strict=False)
    return {"validation": [(row[0][0], statistics.mean(value for _, value in row)) for row in rows]}


def best(runs: Sequence[dict[str, Any]], rule: str) -> list[dict[str, Any]]:
    """The trainings of a rule at its best multiple."""
    own = [run for run in runs if run["rule"] == rule]
    chosen = min((run for run in own if run["seed"] == 0), key=final)["multiple"]
    return [run for run in own if run["multiple"] == chosen]


def table(runs: Sequence[dict[str, Any]], milliseconds: Mapping[str, float]) -> Table:
    rules = list(dict.fromkeys(run["rule"] for run in runs))
    target = statistics.mean(final(run) for run in best(runs, "muon"))
    result = Table(box=MARKDOWN)
    columns = ("rule", "rate", "final loss", "spread", "steps to Muon's", "of the steps", "cost of a step / Muon's")
    for column in columns:
        result.add_column(column, justify="left" if column == "rule" else "right")
    for rule in rules:
        own = best(runs, rule)
        losses = [final(run) for run in own]
        steps = steps_to(middle(own), target)
        last = own[0]["validation"][-1][0]
        result.add_row(
            rule,
            f"× {own[0]['multiple']:g}",
            f"{statistics.mean(losses):.4f}",
            f"{max(losses) - min(losses):.4f}",
            f"{steps:.0f}" if math.isfinite(steps) else "never",
            f"{steps / last:.0%}" if math.isfinite(steps) else "–",
            f"{milliseconds[rule] / milliseconds['muon']:.2f}",
        )
    return result


def draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Validation losses of each rule at its best rate, with the spread over seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for rule in dict.fromkeys(run["rule"] for run in runs):
        own = best(runs, rule)
        steps = [step for step, _ in own[0]["validation"]]
        values = [[value for _, value in run["validation"]] for run in own]
        middle = [statistics.mean(at) for at in zip(*values, strict=False)]
        axes.plot(steps[: len(middle)], middle, label=rule, linewidth=1.2)
        low, high = ([pick(at) for at in zip(*values, strict=False)] for pick in (min, max))
        axes.fill_between(steps[: len(middle)], low, high, alpha=0.2)
    axes.set(xlabel="step", ylabel="validation loss")
    axes.legend(frameon=False, ncols=2)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rules", nargs="*", default=list(RULES), choices=list(RULES), help="muon is always among them"
    )
    parser.add_argument("--rates", type=float, nargs="*", default=RATES, help="multiples of each rule's learning rate")
    parser.add_argument("--model", default="small", help="a preset of `muonmesh train`")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=Path("runs/corpus"), help="where the tokens are kept")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    trainings = Trainings(arguments.json, {"model": arguments.model, "steps": arguments.steps})
    corpus = prepare_corpus((), vocab=VOCAB, cache=arguments.cache)
    wanted = list(dict.fromkeys(["muon", *arguments.rules]))

    def one(rule: str, multiple: float, seed: int) -> None:
        key = {"rule": rule, "multiple": multiple, "seed": seed}
        run = trainings.one(lambda: train(rule, multiple, seed, corpus, arguments.model, arguments.steps), **key)
        print(f"{rule} × {multiple:g}, seed {seed}: {final(run):.4f}", flush=True)

    for rule in wanted:
        for multiple in arguments.rates:
            one(rule, multiple, 0)
        chosen = best(trainings.runs, rule)[0]["multiple"]
        for seed in range(1, arguments.seeds):
            one(rule, chosen, seed)
    runs = [run for run in trainings.runs if run["rule"] in wanted]
    Console(width=140).print(table(runs, costs(wanted, corpus, arguments.model)))
    if arguments.picture is not None:
        draw(runs, arguments.picture)


if __name__ == "__main__":
    main()
