"""A step beside other busy processes: ours and torch.optim.Muon in turns, in wall time and in processor time.

    python -m benchmarks.studies.contended --json benchmarks/results/contended.json
    python -m benchmarks.studies.contended --busy 2 --shapes 768x768 --layouts one --ours torch:kernels=torch

`--busy K` processes, which do nothing but count, run beside the ranks; the benchmark starts them, and ends them by
their ids. One process has as many threads as there are cores, and two gloo ranks have one thread each. The wall time is
that of the slowest rank, from a barrier to the end of its step; processor time and switches are those of all threads
of rank 0. A ratio is the median over the rounds of torch's wall time over ours: above 1, ours is faster.
"""

from __future__ import annotations

import argparse
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.contenders import OURS, TORCH, Entries
from benchmarks.report import print_rows, quartiles, write_json
from benchmarks.step import PATIENCE
from benchmarks.workload import GPT2_SMALL_LAYER, Layout, Shape, Workload, parse_shapes
from torch.multiprocessing.spawn import spawn

KINDS = "wall", "processor", "lost"
Case = tuple[str, tuple[Shape, ...]]

CASES: list[Case] = [
    ("64x64", ((64, 64),)),
    ("256x256", ((256, 256),)),
    ("768x768", ((768, 768),)),
    ("2048x2048", ((2048, 2048),)),
    ("a layer of GPT-2 small", GPT2_SMALL_LAYER),
]
# It looks for its parent about every tenth of a second, so that none is left if the benchmark is killed.
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(1 << 22): pass"
LAYOUTS = {"one": Layout("one", 1, os.cpu_count() or 1), "ddp2": Layout("ddp", 2, 1)}


@dataclass(frozen=True)
class Options:
    """What the ranks need to know; plain data, since they are started by spawning."""

    cases: Sequence[Case]
    busy: Sequence[int]
    rounds: int
    entries: Entries


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Run busy processes beside a block."""
    running = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def switches() -> int:
    """How often threads of this process have lost a core to others."""
    total = 0
    for status in Path("/proc/self/task").glob("*/status"):
        line = next(line for line in status.read_text().splitlines() if line.startswith("nonvoluntary"))
        total += int(line.split()[1])
    return total


def _rank(rank: int, folder: str, layout: Layout, options: Options) -> None:
    torch.set_num_threads(layout.threads)
    several = layout.kind != "one"
    if several:
        method = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=layout.ranks, timeout=PATIENCE)
    results = {}
    for name, shapes in options.cases:
        workload = Workload(shapes, 1, layout)
        contenders = [candidate for candidate in options.entries.contenders() if layout.kind in candidate.layouts]
        steps = {candidate.name: candidate.build(workload.parameters, layout).step for candidate in contenders}
        for count in options.busy:
            figures: dict[str, dict[str, list[float]]] = {label: {kind: [] for kind in KINDS} for label in steps}
            with busy(count if rank == 0 else 0):
                for round_number in range(options.rounds + 2):
                    for contender, step in list(steps.items())[:: 1 if round_number % 2 else -1]:
                        workload.refresh_gradients()
                        if several:
                            dist.barrier()
                        lost, processor, start = switches(), time.process_time(), time.perf_counter()
                        step()
                        took = torch.tensor((time.perf_counter() - start) * 1e3, dtype=torch.float64)
                        processor, lost = time.process_time() - processor, switches() - lost
                        if several:
                            dist.all_reduce(took, op=dist.ReduceOp.MAX)
                        if round_number >= 2:
                            for kind, number in zip(KINDS, (took.item(), processor * 1e3, lost), strict=True):
                                figures[contender][kind].append(round(number, 3))
            results[name, count] = {"load": round(os.getloadavg()[0], 1), "milliseconds": figures}
            if rank == 0:
                ratios = {label: summary["ratio"] for label, summary in summed_up(figures).items()}
                print(
                    f"{layout.title}, {name}, {count} busy, load {results[name, count]['load']}: {ratios}", flush=True
                )
    if rank == 0:
        (Path(folder) / "found").write_bytes(pickle.dumps(results))
    if several:
        dist.barrier()
        dist.destroy_process_group()


def measure(layout: Layout, options: Options) -> dict[tuple[str, int], Any]:
    """Start the ranks of a layout, and return rank 0's figures by case and number of busy processes."""
    os.environ["OMP_NUM_THREADS"] = str(layout.threads)  # read when the ranks import torch
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, args=(folder, layout, options), nprocs=layout.ranks)  # type: ignore[no-untyped-call]
        results: dict[tuple[str, int], Any] = pickle.loads((Path(folder) / "found").read_bytes())
    return results


def summed_up(figures: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, Any]]:
    """The medians and quarters of each contender, and the ratio of torch's wall time to its own."""
    torch_took = figures[TORCH]["wall"]
    return {
        name: {
            "ratio": round(statistics.median(b / a for a, b in zip(seconds["wall"], torch_took, strict=True)), 3),
            "wall": [round(value, 2) for value in quartiles(seconds["wall"])],
            "processor": [round(value, 2) for value in quartiles(seconds["processor"])],
            "lost": statistics.median(seconds["lost"]),
        }
        for name, seconds in figures.items()
    }


def main() -> None:
    """Measure, print and write; end with 1 if ours took longer than torch's."""
    summary, _, description = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2, 4], help="default: 0 1 2 4")
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS), metavar="LAYOUT")
    parser.add_argument("--shapes", type=parse_shapes, action="append", help="768x3072,768x768; may be repeated")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ours", action="append", default=[], metavar="LABEL:KEY=VALUE,...", help="a variant of ours")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    chosen = parser.parse_args()
    cases = (
        CASES
        if chosen.shapes is None
        else [(",".join(f"{m}x{n}" for m, n in shapes), shapes) for shapes in chosen.shapes]
    )
    entries = Entries(("ours", "torch"), tuple(chosen.ours), {})
    options = Options(cases, chosen.busy, chosen.rounds, entries)
    before = round(os.getloadavg()[0], 2)
    tables: dict[str, Any] = {}
    slower = []
    for key in chosen.layouts:
        rows = []
        for (name, count), result in measure(LAYOUTS[key], options).items():
            summaries = summed_up(result["milliseconds"])
            tables.setdefault(key, {}).setdefault(name, {})[f"{count} busy"] = {"summary": summaries, **result}
            for contender, shapes in summaries.items():
                (low, middle, high), processor = shapes["wall"], shapes["processor"][1]
                wall = f"{middle:.1f} ({low:.1f} – {high:.1f})"
                rows.append([f"{name}, {count} busy", contender, f"{shapes['ratio']:.2f}", wall, f"{processor:.1f}"])
            if summaries[OURS]["ratio"] < 1:
                slower.append(f"{LAYOUTS[key].title}, {name}, {count} busy: {summaries[OURS]['ratio']}")
        print_rows(LAYOUTS[key].title, ["", "", "torch's time / its", "wall, ms", "processor, ms"], rows)
    if chosen.json:
        write_json(chosen.json, "benchmarks/studies/contended.py", entries, tables, {"load_before": before})
    sys.exit("\n".join(slower) or 0)


if __name__ == "__main__":
    main()
