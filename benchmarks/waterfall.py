"""Where the time of a step on a CPU goes, for matrices of several shapes, and what that leaves to torch.optim.Muon.

    python benchmarks/waterfall.py --json benchmarks/results/waterfall.json
    python benchmarks/waterfall.py --only squares-768 small-64 --rounds 5
    python benchmarks/waterfall.py --coefficients polar_express --kernels torch --json FILE
    python benchmarks/waterfall.py --coefficients deflated --kernels compiled --json FILE

Each workload is stepped by ours and by torch.optim.Muon in turns, on all threads and on one. The step of ours on one
thread is then divided, by torch's profiler, into

- *least*: the operations of its products, symmetric results at half, at the peak: the rate of a dense product of
  1024 × 1024, in bf16 if the processor has instructions for it, measured in the same run on one thread;
- *blocks*: what is multiplied beyond that, since a symmetric result is computed by blocks, at the peak too;
- *below peak*: what its products take longer than at the peak;
- *elementwise*: all other operations of torch; *Python*: the rest of the step.

*Sharing* is what all threads together take longer than one: both cores at work, unequal parts, waiting. "Limit" is the
ratio that would remain if ours were its least alone: torch's time over that, on one thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from contenders import Entries, ours, torch_muon
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile
from workload import GPT2_SMALL_LAYER, LAYOUTS, Shape, Workload

from muonmesh.layout.cost import cost
from muonmesh.numerics.coefficients import CoefficientName
from muonmesh.numerics.kernels import KernelName, compiled
from muonmesh.numerics.newton_schulz import Orthogonalizer
from report import print_rows, write_json

WORKLOADS: dict[str, tuple[tuple[Shape, ...], int]] = {
    "layers": (GPT2_SMALL_LAYER, 3),
    "wide-768": (((768, 3072),), 6),
    "wide-1024": (((1024, 4096),), 2),
    "squares-768": (((768, 768),), 6),
    "squares-1024": (((1024, 1024),), 4),
    "squares-2048": (((2048, 2048),), 2),
    "squares-256": (((256, 256),), 40),
    "small-128": (((128, 128),), 100),
    "small-64": (((64, 64),), 300),
    "small-16": (((16, 16),), 500),
    "small-8": (((8, 8),), 500),
}
"""Shapes of a layer, and how many layers."""
SIZES = {"avx512": (32, 12), "avx512bf16": (32, 12), "amx": (32, 32)}
"""Columns and rows that a compiled product sums at a time, by its variant."""
PRODUCTS = ("aten::addmm", "aten::mm", "aten::bmm", "aten::baddbmm")
PROFILED = 3  # steps
SQUARE = 1024  # rows of the product whose rate is the peak


def milliseconds(optimizer: Optimizer, workload: Workload) -> float:
    """Of one step."""
    workload.refresh_gradients()
    begin = time.perf_counter()
    optimizer.step()
    return (time.perf_counter() - begin) * 1e3


def turns(optimizers: dict[str, Optimizer], workload: Workload, *, rounds: int, threads: int) -> dict[str, float]:
    """Medians of steps that take turns, in milliseconds."""
    torch.set_num_threads(threads)
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for number in range(-2, rounds):
        for name, optimizer in optimizers.items():
            took = milliseconds(optimizer, workload)
            if number >= 0:
                times[name].append(took)
    return {name: statistics.median(some) for name, some in times.items()}


def peak() -> float:
    """Operations of a dense product in a millisecond, on one thread; in fp32 where bf16 is emulated."""
    torch.set_num_threads(1)
    fastest = max((torch.float32, torch.bfloat16), key=lambda dtype: _rate(128, dtype))
    return _rate(SQUARE, fastest)


def _rate(rows: int, dtype: torch.dtype) -> float:
    a, b = (torch.randn(rows, rows).to(dtype) for _ in range(2))
    out, took = torch.empty_like(a), []
    for _ in range(7):
        begin = time.perf_counter()
        torch.mm(a, b, out=out)
        took.append((time.perf_counter() - begin) * 1e3)
    return float(2 * rows**3 / min(took))


class Timed:
    """The functions of products.c, whose products are timed and counted: torch's profiler does not see them."""

    def __init__(self, variant: str) -> None:
        self.functions, self.seconds, self.operations = compiled.library(variant), 0.0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.functions, name)

    def multiply(self, *arguments: Any) -> None:
        """Multiply, on one thread."""
        batch, rows, depth, cols, _, _, _, symmetric, *_ = arguments
        panel, tile = SIZES.get(self.functions.variant, (16, 4))
        begin = time.perf_counter()
        self.functions.multiply(*arguments)
        self.seconds += time.perf_counter() - begin
        heights = (
            min(rows, -(-(left + panel) // tile) * tile) if symmetric else rows for left in range(0, cols, panel)
        )
        self.operations += 2 * batch * depth * panel * sum(heights)


def divided(optimizer: Optimizer, workload: Workload, variant: str) -> tuple[float, float, float, float]:
    """Milliseconds of products and of other operations, operations of the products, milliseconds; of a step."""
    torch.set_num_threads(1)
    library = compiled.library
    try:
        timed = Timed(variant)
    except compiled.NoLibrary:
        timed = None
    if timed is not None:
        compiled.library = lambda _="": timed  # type: ignore[assignment,return-value]
    with profile(activities=[ProfilerActivity.CPU], with_flops=True, record_shapes=True) as profiled:
        took = sum(milliseconds(optimizer, workload) for _ in range(PROFILED))
    compiled.library = library
    products, others, flops = (0.0, 0.0, 0.0) if timed is None else (timed.seconds * 1e3, 0.0, timed.operations)
    for event in profiled.key_averages():
        if event.key in PRODUCTS:
            products += event.self_cpu_time_total / 1e3
            flops += event.flops
        elif event.key.startswith("aten::"):
            others += event.self_cpu_time_total / 1e3
    return products / PROFILED, others / PROFILED, flops / PROFILED, took / PROFILED


def least_of(rows: int, cols: int, coefficients: CoefficientName | Literal["auto"], kernels: KernelName) -> int:
    """Operations of one orthogonalization: those of the polynomials, and the five thin products of deflation."""
    taken = Orthogonalizer.of(
        rows,
        cols,
        coefficients=coefficients,
        steps=None,
        method="auto",
        dtype=torch.bfloat16,
        kernels=kernels,
        device=torch.device("cpu"),
    )
    return cost(rows, cols, degrees=taken.degrees, at_once=taken.whole, deflated=taken.deflated)


def measure(
    shapes: tuple[Shape, ...],
    layers: int,
    coefficients: CoefficientName | Literal["auto"],
    kernels: KernelName,
    *,
    rounds: int,
    threads: int,
) -> dict[str, Any]:
    """The figures of one workload; times in milliseconds."""
    layout = LAYOUTS["one"]
    workload = Workload(shapes, layers, layout)
    optimizers = {
        "ours": ours({"ns_coefficients": coefficients, "kernels": kernels})(workload.parameters, layout),
        "torch": torch_muon(workload.parameters, layout),
    }
    rate, least = peak(), sum(least_of(*shape, coefficients, kernels) for shape in shapes) * layers
    alone = turns(optimizers, workload, rounds=rounds, threads=1)
    shared = turns(optimizers, workload, rounds=rounds, threads=threads)
    products, others, flops, _ = divided(optimizers["ours"], workload, "amx" if kernels == "amx" else "")
    return {
        "matrices": [list(shape) for shape in shapes],
        "layers": layers,
        "peak, GFLOP/s": rate / 1e6,
        "alone": alone,
        "shared": shared,
        "least": least / rate,
        "blocks": (flops - least) / rate,
        "below peak": products - flops / rate,
        "elementwise": others,
        "Python": alone["ours"] - products - others,
        "sharing": threads * shared["ours"] - alone["ours"],
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS), metavar="WORKLOAD")
    parser.add_argument("--rounds", type=int, default=7, help="counted rounds (default 7)")
    parser.add_argument("--threads", type=int, default=2, help="beside one (default 2)")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--coefficients", choices=("auto", *get_args(CoefficientName)), default="auto", metavar="SET")
    parser.add_argument("--kernels", choices=get_args(KernelName), default="auto", metavar="NAME")
    options = parser.parse_args()
    how_often = {"rounds": options.rounds, "threads": options.threads}
    found = {
        name: measure(*WORKLOADS[name], options.coefficients, options.kernels, **how_often) for name in options.only
    }
    parts = ("least", "blocks", "below peak", "elementwise", "Python", "sharing")
    header = ["", f"ratio, {options.threads} threads", "one thread", "limit", "ms, one thread", *parts]
    rows = []
    for name, some in found.items():
        ratios = [some[how]["torch"] / some[how]["ours"] for how in ("shared", "alone")]
        limit = some["alone"]["torch"] / some["least"]
        cells = [*(f"{value:.2f}" for value in (*ratios, limit)), f"{some['alone']['ours']:.0f}"]
        rows.append([name, *cells, *(f"{some[part] / some['alone']['ours']:.0%}" for part in parts)])
    print_rows(
        f"A step: torch.optim.Muon's time over ours, {options.coefficients}, {options.kernels}; shares on one thread",
        header,
        rows,
    )
    if options.json is not None:
        write_json(
            str(options.json),
            "benchmarks/waterfall.py",
            Entries((), (), {}),
            found,
            {"coefficients": options.coefficients, "kernels": options.kernels},
        )


if __name__ == "__main__":
    main()
