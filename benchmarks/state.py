"""Momentum in fp32, bf16 and int8: losses of the main job with each, and the bytes that are kept.

    python -m benchmarks.state --json benchmarks/results/state.json    # nano, 300 steps, three seeds: minutes

The job, the text and the schedule are those of `benchmarks/llama.py`, at one learning rate, so that nothing but the
dtype differs. Trainings with one seed see the same batches. Trainings that are in the JSON already are not repeated.
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

DTYPES: dict[str, Any] = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": "int8"}
LR = 6e-3


def train(name: str, seed: int, corpus: Corpus, model_name: str, steps: int) -> dict[str, Any]:
    """One training: validation losses by step, and bytes of momentum for each element of Muon's matrices."""
    torch.manual_seed(seed)
    model = build_model(model_config(model_name, vocab=corpus.vocab, seq=LENGTH))
    optimizer = mm.from_model(
        model, lr=LR, state_dtype=DTYPES[name], compute_dtype=torch.float32, process_group="local"
    )
    windows = Windows(corpus.train(), length=LENGTH, seed=seed)
    held_out = torch.from_numpy(Windows(corpus.validation(), length=LENGTH, seed=0).spread(HELD_OUT))
    validation: list[tuple[int, float]] = []
    for done in take_steps(model, optimizer, windows, steps):
        if done % max(1, steps // 15) == 0:
            with torch.no_grad():
                validation.append((done, float(loss(model, held_out))))
    matrices = [p for group in optimizer.param_groups if group["algorithm"] == "muon" for p in group["params"]]
    kept = [
        tensor
        for parameter in matrices
        for key, tensor in optimizer.state[parameter].items()
        if key.startswith("momentum_buffer")
    ]
    size = sum(tensor.numel() * tensor.element_size() for tensor in kept)
    return {"validation": validation, "bytes_an_element": size / sum(parameter.numel() for parameter in matrices)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nano", help="a preset of `muonmesh train`")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=Path("runs/corpus"), help="where the tokens are kept")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    corpus = prepare_corpus((), vocab=VOCAB, cache=given.cache)
    trainings = Trainings(given.json, {"model": given.model, "steps": given.steps, "lr": LR})
    for seed in range(given.seeds):
        for name in DTYPES:
            run = trainings.one(
                lambda n=name, s=seed: train(n, s, corpus, given.model, given.steps), dtype=name, seed=seed
            )
            print(f"{name} seed {seed}: {run['validation'][-1][1]:.4f}", flush=True)
    runs = trainings.runs
    print(
        "| momentum | bytes an element | final loss | spread | above fp32, each seed |\n| --- | --: | --: | --: | --- |"
    )
    last = {(run["dtype"], run["seed"]): run["validation"][-1][1] for run in runs}
    for name in DTYPES:
        losses = [last[name, seed] for seed in range(given.seeds)]
        size = next(run["bytes_an_element"] for run in runs if run["dtype"] == name)
        more = ", ".join(f"{last[name, seed] - last['fp32', seed]:+.4f}" for seed in range(given.seeds))
        print(f"| {name} | {size:.3f} | {statistics.mean(losses):.4f} | {max(losses) - min(losses):.4f} | {more} |")


if __name__ == "__main__":
    main()
