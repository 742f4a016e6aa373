"""A step of few or many small matrices of distinct shapes on a CPU, beside torch.optim.Muon in the same process.

    python -m benchmarks.studies.small
    python -m benchmarks.studies.small --rounds 15 --json benchmarks/results/small.json

Distinct shapes are the worst case: nothing can be batched. Processor time of one thread, in turns; the ratio is the
median over the rounds of torch's time over ours, so above 1 ours is faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from benchmarks.report import cpu, print_rows
from torch import nn

import muonmesh as mm

Shapes = Sequence[tuple[int, int]]

DISTINCT = [(8 + n % 57, 8 + n * 7 % 53) for n in range(300)]
CASES: dict[str, Shapes] = {
    **{f"{count} shapes of 8 to 64": DISTINCT[:count] for count in (1, 10, 100, 300)},
    "64 × 64 alone": [(64, 64)],
    "three layers of a policy": [(64, 17), (64, 64), (6, 64)],
    "three layers of a PINN": [(50, 2), (50, 50), (1, 50)],
}


def seconds(shapes: Shapes, rounds: int) -> dict[str, list[float]]:
    """Return processor seconds of each round for both optimizers, after two steps that are not counted."""
    weights = [nn.Parameter(torch.randn(shape) * 0.02) for shape in shapes]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    steps = {"muonmesh": mm.Muon(weights).step, "torch.optim.Muon": torch.optim.Muon(weights).step}
    times: dict[str, list[float]] = {name: [] for name in steps}
    repeats = max(1, 100 // len(shapes))
    for round_number in range(rounds + 2):
        for name, step in list(steps.items())[:: 1 if round_number % 2 else -1]:
            start = time.process_time()
            for _ in range(repeats):
                step()
            if round_number >= 2:
                times[name].append((time.process_time() - start) / repeats)
    return times


def main() -> None:
    """Measure every case and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tables, rows = {}, []
    for name, shapes in CASES.items():
        times = seconds(shapes, options.rounds)
        muonmesh_times, torch_times = times.values()
        ratio = statistics.median(b / a for a, b in zip(muonmesh_times, torch_times, strict=True))
        tables[name] = {"ratio": ratio, "seconds": times, "distinct shapes": len(set(shapes))}
        rows.append(
            [
                name,
                f"{ratio:.2f}",
                *(f"{statistics.median(values) * 1e3:.2f}" for values in (muonmesh_times, torch_times)),
            ]
        )
    print_rows("small matrices, one thread", ["", "torch's time / ours", "ours, ms", "torch's, ms"], rows)
    if options.json is not None:
        record = {"cpu": cpu(), "torch": torch.__version__, "rounds": options.rounds, "tables": tables}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
