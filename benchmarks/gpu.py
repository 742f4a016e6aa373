"""One optimizer step on one GPU, against torch.optim.Muon and AdamW, interleaved, timed with CUDA events.

    python benchmarks/gpu.py --json benchmarks/results/gpu.json
    python benchmarks/gpu.py --peer dion=../dion --ours fp32:compute_dtype=float32

Two workloads: the three GPT-2-small layers of benchmarks/step.py, and four layers of a 1B Llama, whose matrices
are large enough to fill a GPU. The time runs from an idle device to the end of the step's last kernel, so waiting
for the host counts. Afterwards the update of every matrix is measured by its singular values.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

import torch
from contenders import add_options, entries
from contest import contest
from report import print_table, problems_of_ours, record, write_json
from torch.optim import Optimizer
from workload import GPT2_SMALL_LAYER, Layout, Shape, Workload

LLAMA_1B_LAYER: tuple[Shape, ...] = (
    (2048, 2048),
    (512, 2048),
    (512, 2048),
    (2048, 2048),
    (8192, 2048),
    (8192, 2048),
    (2048, 8192),
)
WORKLOADS: dict[str, tuple[tuple[Shape, ...], int]] = {
    "gpt2-small": (GPT2_SMALL_LAYER, 3),
    "llama-1b": (LLAMA_1B_LAYER, 4),
}
ONE_GPU = Layout("one", 1, 1)


def timed_step(workload: Workload, optimizer: Optimizer) -> float:
    """Milliseconds from an idle device to the end of the step's last kernel."""
    workload.refresh_gradients()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin.record()
    optimizer.step()
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds


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
    asked = entries(parser, chosen)
    if not torch.cuda.is_available():
        print("No CUDA device: nothing was measured.")
        return
    device = torch.cuda.get_device_name()
    tables = {}
    wrong = []
    for name in chosen.workloads:
        shapes, layers = WORKLOADS[name]
        workload = Workload(shapes, layers, ONE_GPU, device="cuda")
        results = contest(
            asked.contenders(),
            workload,
            ONE_GPU,
            partial(timed_step, workload),
            rounds=chosen.rounds,
            warmup=chosen.warmup,
        )
        title = f"{name}, {layers} layers on {device}"
        print_table(title, results)
        tables[name] = {
            "title": title,
            "shapes": [f"{rows}x{cols}" for rows, cols in shapes],
            "layers": layers,
            "contenders": record(results),
        }
        wrong += problems_of_ours(title, results)
    if chosen.json:
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        facts = {"device": device, "compute_capability": capability, "cuda": torch.version.cuda}
        write_json(chosen.json, "benchmarks/gpu.py", asked, tables, facts)
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main()
