"""What training loses if Muon's exchange is late or rare: a trial in one process, no mode of the optimizer.

    python -m benchmarks.studies.fewer_exchanges --json benchmarks/results/fewer_exchanges.json   # an hour on one core

The results of `MuonStep.compute` are changed as each way would change them, for whole matrices and with the
same numbers on any number of ranks:

- ``delayed``: every result is used a step later, so that it may travel during the next forward and backward pass.
  AdamW's half is not late, since its step needs no exchange.
- ``corrected``: the same, and each step adds what the step before should have used minus what it did use, which makes
  2·uₜ₋₁ − uₜ₋₂. This is error feedback on updates with one more buffer, as "One-Step Gradient Delay is Not a Barrier"
  (arXiv 2606.30634) describes it. Its formula was not at hand: the sum is derived from that description.
- ``blocks of N``: N blocks of rows are orthogonalized each by itself, and the whole matrix in every 5th step (MuonBP,
  arXiv 2510.16981). Steps of blocks have a rate of their own, which makes the RMS of both kinds of step the same.

Every way is trained at the same multiples of the learning rate with the first seed, and at the best of them with all
seeds. Trainings that are in the JSON already are not repeated.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from benchmarks.studies import llama, sweep
from benchmarks.studies.trainings import Trainings
from torch import Tensor

from muonmesh.numerics.newton_schulz import orthogonalize
from muonmesh.step.muon_step import MuonStep
from muonmesh.tools.cli.corpus import prepare_corpus

WAYS = ("plain", "delayed", "corrected", "blocks of 4", "blocks of 8")
MODELS = ("nano", "small")
RATES = (1.0, 2.0, 4.0)
PERIOD = 5
RANKS = (4, 8, 64)


def share_of_bytes(variant: str, ranks: int) -> float:
    """Bytes of the exchange under FSDP2 over those of plain Muon.

    A matrix sends all but its owner's part, (R - 1)/R of it, and a block of rows all but the part of the rank that
    orthogonalizes it, 1 - N/R of the matrix for N blocks. A block inside one rank sends nothing.
    """
    if not variant.startswith("blocks"):
        return 1.0
    rare = max(0.0, 1 - blocks_of(variant) / ranks) / (1 - 1 / ranks)
    return (1 + (PERIOD - 1) * rare) / PERIOD


def blocks_of(variant: str) -> int:
    return int(variant.rpartition(" ")[2])


def by_blocks(step: MuonStep, assignments: Sequence[int], batch: Tensor, out: Tensor, blocks: int) -> None:
    """Orthogonalize blocks of rows of matrices; tall ones lie transposed in a batch (count, short, long)."""
    matrix = step.ready.of(assignments[0]).matrix
    rows, cols = matrix.rows, matrix.cols
    dim = 1 if tuple(batch.shape[1:]) == (rows, cols) else 2
    cut = torch.stack(batch.chunk(blocks, dim), 1)
    result = orthogonalize(cut, coefficients="auto") * sqrt(max(rows // blocks, cols) / max(rows, cols))
    torch.cat(result.unbind(1), dim, out=out)


@contextmanager
def exchanged(variant: str) -> Iterator[None]:
    """Let owners hand out what a way hands out; for one optimizer, whose steps are counted by matrix."""
    compute = MuonStep.compute
    steps: dict[int, int] = {}
    last: dict[int, list[Tensor]] = {}  # by the first matrix of a batch: results of the two steps before

    def changed(
        step: MuonStep, assignments: Any, batches: Sequence[Tensor], outs: Sequence[Tensor], memory: Tensor | None
    ) -> None:
        key = assignments[0]
        steps[key] = steps.get(key, -1) + 1
        (batch,), (out,) = batches, outs  # on a CPU all have one shape
        if variant.startswith("blocks") and steps[key] % PERIOD:
            by_blocks(step, assignments, batch, out, blocks_of(variant))
            return
        compute(step, assignments, batches, outs, memory)
        if variant in ("delayed", "corrected"):
            before, earlier = last.get(key) or [torch.zeros_like(out)] * 2
            last[key] = [out.clone(), before]
            out.copy_(before if variant == "delayed" else 2 * before - earlier)

    MuonStep.compute = changed  # type: ignore[method-assign]
    try:
        yield
    finally:
        MuonStep.compute = compute  # type: ignore[method-assign]


def best(runs: Sequence[dict[str, Any]], model: str, variant: str) -> list[dict[str, Any]]:
    """The trainings of a model in one way at the multiple that is best for the first seed."""
    trainings = [run for run in runs if (run["model"], run["way"]) == (model, variant)]
    chosen = min((run for run in trainings if run["seed"] == 0), key=sweep.final)["multiple"]
    return [run for run in trainings if run["multiple"] == chosen]


def steps_lost(runs: Sequence[dict[str, Any]], model: str, variant: str) -> float:
    """How many steps before its end plain Muon had a way's last loss, or, below 0, the way had plain Muon's."""
    plain, changed = (sweep.middle(best(runs, model, name)) for name in ("plain", variant))
    steps = plain["validation"][-1][0]
    lost = steps - sweep.steps_to(plain, sweep.final(changed))
    return float(lost if lost >= 0 else sweep.steps_to(changed, sweep.final(plain)) - steps)


def rows(runs: Sequence[dict[str, Any]]) -> list[str]:
    """The table of benchmarks/reports/fewer-exchanges.md, a row for each model and way."""
    lines = []
    for model, variant in dict.fromkeys((run["model"], run["way"]) for run in runs):
        changed, plain = best(runs, model, variant), best(runs, model, "plain")
        start = {run["seed"]: sweep.final(run) for run in plain}
        gaps = ", ".join(f"{sweep.final(run) - start[run['seed']]:+.3f}" for run in changed if variant != "plain")
        lost = "" if variant == "plain" else f"{steps_lost(runs, model, variant):.0f}"
        ends = f"{statistics.mean(map(sweep.final, changed)):.3f}"
        shares = " | ".join(f"{share_of_bytes(variant, ranks):.2f}" for ranks in RANKS)
        row = f"| {model} | {variant} | × {changed[0]['multiple']:g} | {ends} | {gaps} | {lost} | {shares} |"
        lines.append(row.replace("|  |", "| |").replace("|  |", "| |").replace("-", "−"))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=MODELS, help="presets of `muonmesh train`")
    parser.add_argument("--ways", nargs="*", default=WAYS, choices=WAYS)
    parser.add_argument("--rates", type=float, nargs="*", default=RATES, help="multiples of Muon's learning rate")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--cache", type=Path, default=Path("runs/corpus"), help="where the tokens are kept")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    trainings = Trainings(options.json, {"steps": options.steps, "period": PERIOD})
    corpus = prepare_corpus((), vocab=llama.VOCAB, cache=options.cache)

    def train_once(model: str, variant: str, multiple: float, seed: int) -> None:
        def train() -> dict[str, Any]:
            with exchanged(variant):
                return llama.train(multiple, seed, corpus, model, options.steps)

        run = trainings.get(train, model=model, way=variant, multiple=multiple, seed=seed)
        print(f"{model}, {variant} × {multiple:g}, seed {seed}: {sweep.final(run):.4f}", flush=True)

    for model in options.models:
        for rate in options.rates:
            for variant in options.ways:
                train_once(model, variant, rate, 0)
        for seed in range(1, options.seeds):
            for variant in options.ways:
                train_once(model, variant, best(trainings.runs, model, variant)[0]["multiple"], seed)
    print("\n".join(rows(trainings.runs)))


if __name__ == "__main__":
    main()
