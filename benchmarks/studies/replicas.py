"""How results reach replicas in several machines: passed on from replica to replica, or by an all-gather of gloo's.

    python -m benchmarks.studies.replicas
    python -m benchmarks.studies.replicas --json benchmarks/results/replicas.json

Each machine is a network namespace with one link of a given bandwidth, on which its ranks send (`bandwidth.py`; Linux,
root, `ip`, `tc`). Every rank owns one square matrix that all ranks hold, as under DDP. Both ways move the same results
in the same processes, in turns: muonmesh's exchange without computation, and `torch.distributed.all_gather` of results
of equal size. Bytes are those that the links have counted, protocols included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

MACHINES = ((2, 2), (4, 1))
"""Machines, and ranks of each."""

MEGABITS, SIDE, ROUNDS = 200, 1024, 5


def sent() -> int:
    """Return the bytes that this machine's link has sent so far."""
    link = os.environ["GLOO_SOCKET_IFNAME"]
    return int(Path(f"/sys/class/net/{link}/statistics/tx_bytes").read_text())


def measure() -> None:
    """Measure both ways on one rank; rank 0 prints seconds and bytes of each round as JSON."""
    import muonmesh as mm
    from muonmesh.comm.step_callbacks import StepCallbacks

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world, local = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    weights = [nn.Parameter(torch.zeros(SIDE, SIDE)) for _ in range(world)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = mm.Muon(weights, lr=0.01, process_group="world", ns_steps=1)
    optimizer.step()
    connected = optimizer._runtime.connected
    assert connected is not None
    results = [torch.zeros(SIDE * SIDE, dtype=torch.bfloat16) for _ in range(world)]
    variants: dict[str, Callable[[], Any]] = {
        "passed on": lambda: connected.exchange.run(StepCallbacks()),
        "all-gather": lambda: dist.all_gather(results, torch.zeros_like(results[0])),
    }
    samples: dict[str, list[tuple[float, int]]] = {variant: [] for variant in variants}
    for number in range(ROUNDS + 1):
        for variant in list(variants)[:: 1 if number % 2 else -1]:
            dist.barrier()
            time.sleep(0.3)  # until what was sent before has left
            dist.barrier()
            before, began = sent(), time.perf_counter()
            variants[variant]()
            took = time.perf_counter() - began
            dist.barrier()
            time.sleep(0.2)
            samples[variant].append((took, sent() - before))
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, samples)
    if dist.get_rank() == 0:
        summary = {}
        for variant in variants:
            rounds = [
                [rank_samples[variant][number] for rank_samples in everyone] for number in range(1, ROUNDS + 1)
            ]  # the first warms up
            summary[variant] = {
                "seconds": statistics.median(max(took for took, _ in values) for values in rounds),
                "bytes": statistics.median(sum(count for _, count in values[::local]) for values in rounds),
            }
        print(json.dumps(summary), flush=True)
    dist.destroy_process_group()


def run(machines: int, local: int) -> dict[str, Any]:
    """Start the ranks of some machines, and return what they have measured."""
    from benchmarks.studies.bandwidth import hosts

    with hosts(machines, MEGABITS) as machines_up:
        ranks = []
        for number in range(machines * local):
            host = machines_up[number // local]
            environment = {
                **os.environ,
                **{"RANK": f"{number}", "WORLD_SIZE": f"{machines * local}", "LOCAL_RANK": f"{number % local}"},
                **{"LOCAL_WORLD_SIZE": f"{local}", "MASTER_ADDR": machines_up[0].address, "MASTER_PORT": "29711"},
                **{"GLOO_SOCKET_IFNAME": host.interface, "OMP_NUM_THREADS": "1"},
            }
            command = [*host.prefix, sys.executable, "-m", "benchmarks.studies.replicas", "--rank"]
            ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
        assert all(rank.returncode == 0 for rank in ranks)
    return dict(json.loads(outputs[0]))


def main() -> None:
    """Measure, print a table, and write a file if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        measure()
        return
    figures = []
    print("machines × ranks | way | bytes on all links, of one copy a machine | seconds | of passing on")
    for machines, local in MACHINES:
        record = run(machines, local)
        least = machines * (machines - 1) * local * SIDE * SIDE * 2  # each machine's results once to each other machine
        for variant, figure in record.items():
            share, ratio = figure["bytes"] / least, figure["seconds"] / record["passed on"]["seconds"]
            print(f"{machines} × {local} | {variant} | {share:.2f} | {figure['seconds']:.3f} | {ratio:.2f}")
            figures.append(
                {"machines": machines, "ranks of each": local, "way": variant, **figure, "of one copy": share}
            )
    if options.json:
        command = "python -m benchmarks.studies.replicas --json benchmarks/results/replicas.json"
        record = {"command": command, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "figures": figures}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
