"""Weights in bf16 with fp32 masters, rounded to nearest, and rounded stochastically: losses and bytes that are kept.

    python -m benchmarks.rounding --json benchmarks/results/rounding.json

Three models by three seeds. The job, the text and the schedule are those of `benchmarks/llama.py`, at one learning
rate. Trainings with one seed see the same batches. Weights are in bf16 in all of them, moments of AdamW's half as
muonmesh keeps them: in the dtype of the masters, or of the weights without masters. Trainings that are in the JSON
already are not repeated.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from benchmarks.llama import HELD_OUT, LENGTH, VOCAB, loss, take_steps
from benchmarks.trainings import Trainings

import muonmesh as mm
from muonmesh.tools.cli.corpus import Corpus, Windows, prepare_corpus
from muonmesh.tools.cli.model import build_model, model_config

WEIGHTS: dict[str, dict[str, Any]] = {
    "masters": {"master_dtype": torch.float32},
    "nearest": {},
    "stochastic": {"stochastic_rounding": 0},
}
MODELS = {"64 × 2": ("nano", 2), "64 × 4": ("nano", 4), "128 × 2": ("small", 2)}
"""Width × layers: a preset of `muonmesh train`, and how many layers."""
LR, BATCH = 6e-3, 4


def train(name: str, seed: int, corpus: Corpus, shape: tuple[str, int], steps: int) -> dict[str, Any]:
    """One training: the last validation loss, and bytes of weights and state for each element of a half."""
    torch.manual_seed(seed)
    config = model_config(shape[0], vocab=corpus.vocab, seq=LENGTH)
    config.num_hidden_layers = shape[1]
    model = build_model(config).bfloat16()
    optimizer = mm.from_model(model, lr=LR, process_group="local", **WEIGHTS[name])
    windows = Windows(corpus.train(), length=LENGTH, seed=seed)
    held_out = torch.from_numpy(Windows(corpus.validation(), length=LENGTH, seed=0).spread(HELD_OUT))
    for _ in take_steps(model, optimizer, windows, steps, batch=BATCH):
        pass
    with torch.no_grad():
        found: dict[str, Any] = {"loss": float(loss(model.float(), held_out))}
    for half in ("muon", "adamw"):
        some = [p for group in optimizer.param_groups if group["algorithm"] == half for p in group["params"]]
        kept = [t for p in some for t in optimizer.state[p].values() if t.numel() == p.numel()]
        size = sum(t.numel() * t.element_size() for t in kept)
        found[half] = 2 + size / sum(p.numel() for p in some)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=Path("runs/corpus"), help="where the tokens are kept")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    corpus = prepare_corpus((), vocab=VOCAB, cache=given.cache)
    trainings = Trainings(given.json, {"steps": given.steps, "lr": LR, "batch": BATCH})
    for shape in MODELS:
        for seed in range(given.seeds):
            for name in WEIGHTS:
                run = trainings.one(
                    lambda n=name, s=seed, m=shape: train(n, s, corpus, MODELS[m], given.steps),
                    model=shape,
                    weights=name,
                    seed=seed,
                )
                print(f"{shape} {name} seed {seed}: {run['loss']:.4f}", flush=True)
    last = {(run["model"], run["weights"], run["seed"]): run for run in trainings.runs}
    print("| model | weights | bytes an element, Muon | AdamW | final loss | above masters, each seed |")
    print("| --- | --- | --: | --: | --: | --- |")
    for shape in MODELS:
        for name in WEIGHTS:
            runs = [last[shape, name, seed] for seed in range(given.seeds)]
            base = [last[shape, "masters", seed]["loss"] for seed in range(given.seeds)]
            more = ", ".join(f"{run['loss'] - masters:+.4f}" for run, masters in zip(runs, base, strict=True))
            mean = statistics.mean(run["loss"] for run in runs)
            print(f"| {shape} | {name} | {runs[0]['muon']:.1f} | {runs[0]['adamw']:.1f} | {mean:.4f} | {more} |")


if __name__ == "__main__":
    main()
