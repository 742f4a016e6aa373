"""One optimizer step against its peers, in the same process layout, interleaved.

    python -m benchmarks.step                                       # ours, torch.optim.Muon, AdamW
    python -m benchmarks.step --peer dion=../dion --peer keller=../Muon --json step.json
    python -m benchmarks.step --layouts fsdp2 --rounds 5            # something quick
    python -m benchmarks.step --ours fp32:compute_dtype=float32     # ours with other settings as well

Three GPT-2-small layers by default (--shapes, --layers). In each layout the contenders take turns, A B C A B C,
on the same parameters and gradients. The time is that of the slowest rank, from a barrier until `step()` has
returned; the first rounds, which create state, plans and compiled code, are not counted. Afterwards the update of
every whole matrix is measured by its singular values: whoever does not orthogonalize the whole has no figures.
"""

from __future__ import annotations

import argparse
import os
import pickle
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.contenders import Entries, add_options, entries
from benchmarks.contest import contest
from benchmarks.report import Result, print_table, problems_of_ours, record, write_json
from benchmarks.workload import GPT2_SMALL_LAYER, LAYOUTS, Layout, Shape, Workload, parse_shapes
from torch.multiprocessing.spawn import spawn
from torch.optim import Optimizer

PATIENCE = timedelta(minutes=5)  # with ranks that a failing peer has left waiting


@dataclass(frozen=True)
class Options:
    """What the ranks need to know; plain data, since they are started by spawning."""

    shapes: tuple[Shape, ...]
    layers: int
    rounds: int
    warmup: int
    entries: Entries


def measure(layout: Layout, options: Options) -> list[Result]:
    """Start the ranks of a layout, run the contest there, and return rank 0's results."""
    os.environ["OMP_NUM_THREADS"] = str(layout.threads)  # read when the ranks import torch
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, args=(folder, layout, options), nprocs=layout.ranks)  # type: ignore[no-untyped-call]
        results: list[Result] = pickle.loads((Path(folder) / "results").read_bytes())
    return results


def _rank(rank: int, folder: str, layout: Layout, options: Options) -> None:
    torch.set_num_threads(layout.threads)
    if layout.kind != "one":
        method = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=layout.ranks, timeout=PATIENCE)
    workload = Workload(options.shapes, options.layers, layout)

    def timed_step(optimizer: Optimizer) -> float:
        """Milliseconds of the slowest rank, from a barrier to the end of its step."""
        workload.refresh_gradients()
        if layout.kind != "one":
            dist.barrier()
        begin = time.perf_counter()
        optimizer.step()
        took = torch.tensor((time.perf_counter() - begin) * 1e3, dtype=torch.float64)
        if layout.kind != "one":
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
        return took.item()

    contenders = options.entries.contenders()
    results = contest(contenders, workload, layout, timed_step, rounds=options.rounds, warmup=options.warmup)
    if rank == 0:
        (Path(folder) / "results").write_bytes(pickle.dumps(results))
    if layout.kind != "one":
        dist.barrier()
        dist.destroy_process_group()


def main() -> None:
    """Measure, print and write."""
    summary, _, description = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS), metavar="LAYOUT")
    parser.add_argument(
        "--shapes", type=parse_shapes, default=GPT2_SMALL_LAYER, help="matrices of a layer, such as 768x3072,768x768"
    )
    parser.add_argument("--layers", type=int, default=3, help="how many such layers (default 3)")
    add_options(parser)
    chosen = parser.parse_args()
    options = Options(chosen.shapes, chosen.layers, chosen.rounds, chosen.warmup, entries(parser, chosen))
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"The machine is busy (load {load:.1f}): the ratios may hold, the milliseconds do not.")
    tables = {}
    wrong = []
    for name in chosen.layouts:
        layout = LAYOUTS[name]
        results = measure(layout, options)
        print_table(layout.title, results)
        tables[name] = {"title": layout.title, "contenders": record(results)}
        wrong += problems_of_ours(layout.title, results)
    if chosen.json:
        facts = {
            "load_before": round(load, 2),
            "shapes": [f"{rows}x{cols}" for rows, cols in options.shapes],
            "layers": options.layers,
        }
        write_json(chosen.json, "benchmarks/step.py", options.entries, tables, facts)
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main()
