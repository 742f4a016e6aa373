"""Which products are the fastest on this processor, shape by shape: it decides what ``kernels="auto"`` takes there.

    python -m benchmarks.studies.processor --json benchmarks/results/processor_NAME.json
    python -m benchmarks.studies.processor --threads 1 --shapes 768x768,768x3072 --rounds 5

A step of muonmesh.Muon with each ``kernels`` that runs here takes turns with one of torch.optim.Muon, on the same
weights and gradients. The ratio is the median over the rounds of torch.optim.Muon's time over ours, so above 1 ours is
faster. At the end stands, for each ``kernels``, from which rows on it was the fastest on every shape. Run it on a quiet
machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from benchmarks.report import cpu, print_rows
from benchmarks.workload import Shape, parse_shapes
from torch import nn

import muonmesh as mm
from muonmesh.numerics.kernels import check_kernels
from muonmesh.numerics.kernels.compiled import library
from muonmesh.tools.cli.installation import products_here

SQUARES = [(rows, rows) for rows in (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)]
SHAPES = [
    *SQUARES,
    (384, 1536),
    (768, 2304),
    (768, 3072),
    (1024, 4096),
    (2048, 5632),
    (100, 300),
    (500, 700),
    (1000, 3000),
]
ENOUGH = 1 << 32
"""Multiplications of a round: small matrices come in numbers."""


def runs_here(name: mm.KernelName) -> bool:
    """Whether an implementation runs on this processor."""
    try:
        check_kernels(name, device=torch.device("cpu"), dtype=torch.bfloat16)
    except ValueError:
        return False
    return True


def seconds(shape: Shape, names: Sequence[mm.KernelName], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each round for each optimizer, after two rounds that are not counted."""
    rows, cols = sorted(shape)
    weights = [
        nn.Parameter(torch.randn(shape) * 0.02) for _ in range(max(1, min(100, ENOUGH // (rows * rows * cols * 15))))
    ]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    steps: dict[str, Callable[[], Any]] = {"torch.optim.Muon": torch.optim.Muon(weights).step}
    steps |= {name: mm.Muon(weights, kernels=name).step for name in names}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_number in range(rounds + 2):
        for name, step in list(steps.items())[:: 1 if round_number % 2 else -1]:
            start = time.perf_counter()
            step()
            if round_number >= 2:
                times[name].append(time.perf_counter() - start)
    return times


def fastest_from(ratios: dict[Shape, dict[str, float]], names: Sequence[str]) -> dict[str, int | None]:
    """Return for each ``kernels`` the number of rows from which on it is the fastest; None: nowhere."""
    best = sorted((min(shape), max(by_kernel, key=by_kernel.__getitem__)) for shape, by_kernel in ratios.items())
    starts: dict[str, int | None] = {}
    for name in names:
        others = [rows for rows, other in best if other != name]
        later = [rows for rows, _ in best if not others or rows > others[-1]]
        starts[name] = later[0] if later else None
    return starts


def main() -> None:
    """Measure every shape and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=parse_shapes, default=SHAPES, help="such as 768x3072,768x768")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    names = [name for name in get_args(mm.KernelName) if name not in ("auto", "triton") and runs_here(name)]
    lines, variant = products_here().result, library().variant if runs_here("compiled") else ""
    print(f"{cpu()}, load {os.getloadavg()[0]:.1f}, {options.threads} threads. Compiled products: {lines}")
    tables, ratios, rows = {}, dict[Shape, dict[str, float]](), []
    for shape in options.shapes:
        times = seconds(shape, names, options.rounds)
        reference = times["torch.optim.Muon"]
        ratios[shape] = {
            name: statistics.median(b / a for a, b in zip(times[name], reference, strict=True)) for name in names
        }
        tables[f"{shape[0]}x{shape[1]}"] = {"ratios": ratios[shape], "seconds": times}
        best = max(ratios[shape].values())
        cells = [f"{ratio:.2f}{' *' if ratio == best else ''}" for ratio in ratios[shape].values()]
        rows.append([f"{shape[0]} × {shape[1]}", *cells, f"{statistics.median(reference) * 1e3:.1f}"])
    header = ["", *(f'kernels="{name}"' for name in names), "torch.optim.Muon, ms"]
    print_rows("torch.optim.Muon's time over ours; * the fastest", header, rows)
    starts = fastest_from(ratios, names)
    for name, start in starts.items():
        print(
            f'kernels="{name}": the fastest ' + ("of no large matrices" if start is None else f"from {start} rows on")
        )
    if options.json is not None:
        facts = {
            "cpu": cpu(),
            "variant": variant,
            "kernels": names,
            "products": lines,
            "torch": torch.__version__,
            "threads": options.threads,
        }
        facts |= {"load_before": os.getloadavg()[0], "rounds": options.rounds, "fastest_from_rows": starts}
        options.json.write_text(json.dumps(facts | {"tables": tables}, indent=1) + "\n")


if __name__ == "__main__":
    main()
