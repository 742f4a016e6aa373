"""What training loses if results of Muon travel in int8: a trial, no mode of the optimizer.

    python -m benchmarks.narrow_results --json benchmarks/results/narrow_results.json

Every orthogonalized matrix is rounded as its owner would round it before it cuts it into what the ranks are sent, so
one process shows what any layout would compute. Three codecs, each with blocks along the rows of the matrix:

- ``powers``: 32 elements to a block, 8 bits each and a power of two for a scale, which is one byte (MXINT8 of the OCP
  Microscaling Formats 1.0). What is decoded is exact in bf16, and any part of a block encodes to the same numbers
  again: a rank that is sent a part of a block needs no scale of the whole.
- ``linear``: 256 to a block, multiples of the largest / 127 in fp32.
- ``tree``: 256 to a block, the codes of momentum in int8 (`muonmesh.numerics.blockwise`).

First the relative error (Frobenius) on polar factors of several spectra; then the last validation loss of three small
models by three seeds, with results in bf16 and in ``powers``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from benchmarks import llama
from benchmarks.sweep import final
from benchmarks.trainings import Trainings
from torch import Tensor

from muonmesh.numerics import blockwise
from muonmesh.numerics.newton_schulz import orthogonalize
from muonmesh.step.muon_step import MuonStep
from muonmesh.tools.cli.corpus import prepare_corpus

GPT2 = {"model_type": "gpt2", "n_embd": 96, "n_layer": 3, "n_head": 4, "n_positions": 128}
MODELS = ("nano", "small", "gpt2")
CODECS = ("bf16", "powers")


def blocks(x: Tensor, size: int) -> Tensor:
    """Rows of (..., rows, cols) cut into blocks, the last one filled with zeros, (..., rows, blocks, size)."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))


def powers(x: Tensor) -> Tensor:
    """What the codes of blocks of 32 with a power of two stand for, exact in bf16."""
    cut = blocks(x.float(), 32)
    exponent = torch.frexp(cut.abs().amax(-1, keepdim=True)).exponent - 7  # the largest becomes 64 to 127
    codes = torch.ldexp(cut, -exponent).round_().clamp_(-127, 127)
    return torch.ldexp(codes, exponent).flatten(-2)[..., : x.shape[-1]].to(x.dtype)


def linear(x: Tensor) -> Tensor:
    """What codes of equal distance stand for, in blocks of 256."""
    cut = blocks(x.float(), 256)
    scale = cut.abs().amax(-1, keepdim=True) / 127
    codes = (cut / scale.clamp_min(1e-30)).round_()
    return (codes * scale).flatten(-2)[..., : x.shape[-1]].to(x.dtype)


def tree(x: Tensor) -> Tensor:
    """What momentum's codes stand for, in blocks of 256."""
    codes, lines = blockwise.Codes.on(x.device), x.float().reshape(-1, x.shape[-1])
    scales = blockwise.largest(lines, first=0, size=256)
    kept = blockwise.encode(lines, scales, codes, first=0, size=256)
    return blockwise.decode(kept, scales, codes, first=0, size=256).view(x.shape).to(x.dtype)


ROUND: dict[str, Callable[[Tensor], Tensor]] = {"powers": powers, "linear": linear, "tree": tree}


@contextmanager
def results_in(codec: str) -> Iterator[None]:
    """Let owners round what they have orthogonalized."""
    own = MuonStep.compute

    def rounded(step: MuonStep, assignments: Any, batch: Tensor, out: Tensor) -> None:
        own(step, assignments, batch, out)
        if codec != "bf16":
            out.copy_(ROUND[codec](out))

    MuonStep.compute = rounded  # type: ignore[method-assign]
    try:
        yield
    finally:
        MuonStep.compute = own  # type: ignore[method-assign]


def spectra(rows: int, cols: int) -> dict[str, Tensor]:
    """Directions whose polar factors differ much in shape."""
    torch.manual_seed(0)
    noise = torch.randn(rows, cols)
    thin = torch.randn(rows, 8) @ torch.randn(8, cols)
    rare = noise * (torch.rand(rows, 1) < 0.05) + 1e-3 * noise
    few = torch.where(torch.rand(rows, cols) < 0.01, noise, 0.0)
    decades = torch.linalg.qr(torch.randn(rows, rows))[0] * torch.logspace(0, -4, rows)
    return {
        "noise": noise,
        "four decades": decades @ torch.linalg.qr(torch.randn(cols, rows))[0].T,
        "rank 8 and noise": thin + 0.01 * noise,
        "few rows": rare,
        "few elements": few,
        "identity and noise": torch.eye(rows, cols) + 1e-3 * noise,
    }


def errors() -> dict[str, dict[str, float]]:
    """The relative error of each codec on each spectrum, against the polar factor in fp32 that is rounded to bf16."""
    found = {}
    for name, direction in spectra(256, 1000).items():
        factor = orthogonalize(direction, dtype=torch.float32)
        kept = factor.bfloat16()
        again = powers(kept)
        assert torch.equal(powers(again), again), "encoding again changes something"
        for low, high in ((5, 32), (32, 33), (70, 90)):
            assert torch.equal(powers(again[:, low:high]), again[:, low:high]), "a part of a block differs"
        told = {codec: round_(kept) for codec, round_ in ROUND.items()}
        found[name] = {
            codec: float((x.float() - kept.float()).norm() / kept.float().norm()) for codec, x in told.items()
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=MODELS, choices=MODELS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--cache", type=Path, default=Path("runs/corpus"), help="where the tokens are kept")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = errors()
    for name, of in found.items():
        print(f"{name}: " + ", ".join(f"{codec} {error:.4f}" for codec, error in of.items()), flush=True)
    trainings = Trainings(options.json, {"steps": options.steps, "errors": found})
    corpus = prepare_corpus((), vocab=llama.VOCAB, cache=options.cache)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "gpt2.json"
        file.write_text(json.dumps(GPT2))
        for seed in range(options.seeds):
            for model in options.models:
                named = str(file) if model == "gpt2" else model
                for codec in CODECS:

                    def train(named: str = named, codec: str = codec, seed: int = seed) -> dict[str, Any]:
                        with results_in(codec):
                            return llama.train(1.0, seed, corpus, named, options.steps)

                    run = trainings.one(train, model=model, codec=codec, seed=seed)
                    print(f"{model}, seed {seed}, {codec}: {final(run):.4f}", flush=True)
    for model in options.models:
        ends = {c: [final(r) for r in trainings.runs if (r["model"], r["codec"]) == (model, c)] for c in CODECS}
        gaps = [b - a for a, b in zip(ends["bf16"], ends["powers"], strict=True)]
        spread = max(ends["bf16"]) - min(ends["bf16"])
        print(
            f"{model}: int8 − bf16 by seed {', '.join(f'{gap:+.4f}' for gap in gaps)}, "
            f"mean {statistics.mean(gaps):+.4f}; bf16 differs by {spread:.4f} over seeds"
        )


if __name__ == "__main__":
    main()
