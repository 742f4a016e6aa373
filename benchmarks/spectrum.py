"""Singular values of momentum and update over a training, as `metrics(spectrum=True)` tells them.

    python -m benchmarks.spectrum --json benchmarks/results/spectrum.json    # nano, 300 steps, one seed: a minute

The job, the text and the schedule are those of `benchmarks/llama.py`, in fp32; `docs/images/draw/spectrum.py` draws.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.llama import LENGTH, VOCAB, take_steps
from benchmarks.trainings import Trainings

import muonmesh as mm
from muonmesh.cli.configuration import model_config
from muonmesh.cli.corpus import Corpus, Windows, prepare_corpus
from muonmesh.cli.model import build_model

LR = 6e-3


def train(corpus: Corpus, model_name: str, steps: int, every: int) -> dict[str, Any]:
    """Return the figures of Muon's group by step, and how long a step took that measures them, and one that does not.

    A figure is a mean over 14 matrices of 64 rows, or columns, and more.
    """
    torch.manual_seed(0)
    model = build_model(model_config(model_name, vocab=corpus.vocab, seq=LENGTH))
    optimizer = mm.from_model(model, lr=LR, compute_dtype=torch.float32, process_group="local")
    figures, seconds, begin = [], dict[bool, list[float]]({True: [], False: []}), time.perf_counter()
    for done in take_steps(model, optimizer, Windows(corpus.train(), length=LENGTH, seed=0), steps):
        measured = done % every == 0 and done > 1  # asked for after the step before
        seconds[measured].append(time.perf_counter() - begin)
        found = optimizer.metrics(spectrum=(done + 1) % every == 0)
        if measured:
            told = {key.removeprefix("muon/"): value for key, value in found.items() if key.startswith("muon/")}
            figures.append({"step": done, **told})
        begin = time.perf_counter()
    return {"figures": figures, "seconds": {str(key): sorted(some)[len(some) // 2] for key, some in seconds.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nano", help="a preset of `muonmesh train`")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=10, help="steps between two measurements")
    parser.add_argument("--cache", type=Path, default=Path("runs/corpus"), help="where the tokens are kept")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    corpus = prepare_corpus((), vocab=VOCAB, cache=given.cache)
    trainings = Trainings(given.json, {"model": given.model, "steps": given.steps, "every": given.every, "lr": LR})
    run = trainings.one(lambda: train(corpus, given.model, given.steps, given.every), seed=0)
    for each in run["figures"]:
        print(", ".join(f"{name} {value:.4g}" for name, value in each.items()))


if __name__ == "__main__":
    main()
