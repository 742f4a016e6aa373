"""One optimizer step on one GPU, against torch.optim.Muon and AdamW, interleaved, timed with CUDA events.

    python -m benchmarks.gpu --json benchmarks/results/gpu.json
    python -m benchmarks.gpu --peer dion=../dion --ours fp32:compute_dtype=float32

The three GPT-2-small layers of benchmarks/step.py, 1,000 small matrices, and layers of Llamas, whose matrices are large
enough to fill a GPU. The time runs from an idle device to the end of the step's last kernel, so waiting for the host
counts; the host's own time until it returns is told beside, and how much memory a step takes beyond what is kept.
Afterwards the update of every matrix is measured by its singular values.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from benchmarks.contenders import Contender, Parameters, add_options, entries
from benchmarks.contest import contest
from benchmarks.report import print_rows, print_table, problems_of_ours, record, write_json
from benchmarks.workload import GPT2_SMALL_LAYER, LLAMA_1B_LAYER, LLAMA_8B_LAYER, Layout, Shape, Workload
from torch.optim import Optimizer

WORKLOADS: dict[str, tuple[tuple[Shape, ...], int]] = {
    "gpt2-small": (GPT2_SMALL_LAYER, 3),
    "small": (((64, 64),), 1000),
    "llama-1b": (LLAMA_1B_LAYER, 4),
    "llama-8b": (LLAMA_8B_LAYER, 2),
}
ONE_GPU = Layout("one", 1, 1)


class Beside(NamedTuple):
    """What a step takes besides time: the host's milliseconds until it returns, and MiB beyond what was there."""

    host: float
    peak: float


def timed_step(workload: Workload, beside: dict[Optimizer, list[Beside]], optimizer: Optimizer) -> float:
    """Milliseconds from an idle device to the end of the step's last kernel."""
    workload.refresh_gradients()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    begin.record()
    clock = time.perf_counter()
    optimizer.step()
    host = (time.perf_counter() - clock) * 1e3
    end.record()
    end.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    beside.setdefault(optimizer, []).append(Beside(host, peak))
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds


def remembered(contender: Contender, optimizers: dict[str, Optimizer]) -> Contender:
    """The contender, whose optimizer will be found by its name."""

    def build(parameters: Parameters, layout: Layout) -> Optimizer:
        optimizers[contender.name] = contender.build(parameters, layout)
        return optimizers[contender.name]

    return replace(contender, build=build)


def main() -> None:
    """Measure, print and write."""
    summary, _, description = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS), metavar="NAME")
    add_options(parser)
    parser.set_defaults(rounds=20, warmup=5)
    chosen = parser.parse_args()
    contenders = entries(parser, chosen)
    if not torch.cuda.is_available():
        print("No CUDA device: nothing was measured.")
        return
    device = torch.cuda.get_device_name()
    tables = {}
    wrong = []
    for name in chosen.workloads:
        shapes, layers = WORKLOADS[name]
        workload = Workload(shapes, layers, ONE_GPU, device="cuda")
        beside: dict[Optimizer, list[Beside]] = {}
        optimizers: dict[str, Optimizer] = {}
        results = contest(
            [remembered(contender, optimizers) for contender in contenders.contenders()],
            workload,
            ONE_GPU,
            partial(timed_step, workload, beside),
            rounds=chosen.rounds,
            warmup=chosen.warmup,
        )
        title = f"{name}, {layers} layers on {device}"
        print_table(title, results)
        more = {}
        for result in results:
            if result.milliseconds:
                host, peak = zip(*beside[optimizers[result.name]][chosen.warmup :], strict=True)
                more[result.name] = {"host_ms": median(host), "peak_mib": max(peak)}
        rows = [[contender, f"{m['host_ms']:.2f}", f"{m['peak_mib']:.0f}"] for contender, m in more.items()]
        print_rows(f"{title}, beside", ["", "host ms", "peak MiB"], rows)
        tables[name] = {
            "title": title,
            "shapes": [f"{rows}x{cols}" for rows, cols in shapes],
            "layers": layers,
            "contenders": {key: value | more.get(key, {}) for key, value in record(results).items()},
        }
        wrong += problems_of_ours(title, results)
        if chosen.json:  # after each table: a lent device may be gone before the last one
            capability = ".".join(map(str, torch.cuda.get_device_capability()))
            facts = {"device": device, "compute_capability": capability, "cuda": torch.version.cuda}
            write_json(chosen.json, "benchmarks/gpu.py", contenders, tables, facts)
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main()
