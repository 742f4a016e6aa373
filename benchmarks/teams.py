"""Several ranks on one matrix: a whole step with a team against a step with one owner, over gloo.

    python benchmarks/teams.py
    python benchmarks/teams.py --coefficients deflated --kernels compiled
    python benchmarks/teams.py --ranks 4 --shapes 4096x4096 --rounds 5 --json benchmarks/results/teams.json

One matrix, sharded along dim 0 over all ranks as FSDP2 shards it, one thread a rank. Both optimizers have the same
weights and gradients and take turns; a time is that of the slowest rank, from a barrier to the end of its step. The
ratio is the median over the rounds of the team's time over the owner's. Weights must be equal bit for bit at the end.
"Waiting" is the share of the step in which the first rank waits for others, transfers between products included.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from typing import Any, get_args

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from contenders import Entries
from report import print_rows, write_json
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import muonmesh as mm

ALWAYS = mm.Rates(flops=1.0, bytes=1e18)
"""Gathering costs nothing, so that a team of all ranks is taken."""


def timed(optimizer: mm.Muon) -> tuple[float, float]:
    """Step once: seconds of the slowest rank, and those that this one waited."""
    dist.barrier()
    started = time.perf_counter()
    optimizer.step()
    seconds = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds), optimizer.counts.seconds_waiting


def run(
    rank: int, ranks: int, port: int, shapes: list[tuple[int, int]], rounds: int, settings: dict[str, Any], found: Any
) -> None:
    """What one rank does; the first one tells what it has found."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    for shape in shapes:
        value, gradient = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
        optimizers, weights = [], []
        for exchange in ("owner", mm.Teams(most=ranks, rates=ALWAYS)):
            weight = nn.Parameter(distribute_tensor(value.clone(), mesh, [Shard(0)], src_data_rank=None))
            weight.grad = distribute_tensor(gradient, mesh, [Shard(0)], src_data_rank=None)
            weights.append(weight)
            optimizers.append(mm.Muon([("weight", weight)], lr=0.02, exchange=exchange, **settings))
        times = [[timed(optimizer) for optimizer in optimizers] for _ in range(1 + rounds)][1:]
        equal = torch.tensor(torch.equal(*(weight.to_local() for weight in weights)))
        dist.all_reduce(equal, dist.ReduceOp.MIN)
        counts = optimizers[1].counts
        if rank == 0:
            found.append(
                {
                    "shape": "x".join(map(str, shape)),
                    "ratio": statistics.median(team / owner for (owner, _), (team, _) in times),
                    "ratios": [team / owner for (owner, _), (team, _) in times],
                    "owner_seconds": [owner for (owner, _), _ in times],
                    "team_seconds": [team for _, (team, _) in times],
                    "waiting": statistics.median(waited / team for _, (team, waited) in times),
                    "products_gathered": counts.products_gathered,
                    "megabytes_gathered": counts.bytes_gathered / 1e6,
                    "equal": bool(equal),
                }
            )
    dist.destroy_process_group()


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shapes", nargs="+", default=["4096x4096", "2048x8192"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="where to write the figures")
    parser.add_argument("--coefficients", choices=get_args(mm.CoefficientName), default="polar_express", metavar="SET")
    parser.add_argument("--kernels", choices=get_args(mm.KernelName), default="auto", metavar="NAME")
    chosen = parser.parse_args()
    settings = {"ns_coefficients": chosen.coefficients, "kernels": chosen.kernels}
    shapes = [(int(rows), int(cols)) for rows, cols in (shape.split("x") for shape in chosen.shapes)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with multiprocessing.Manager() as manager:
        shared = manager.list()
        multiprocessing.spawn(run, (chosen.ranks, port, shapes, chosen.rounds, settings, shared), nprocs=chosen.ranks)
        found = list(shared)
    rows = [
        [
            f["shape"],
            f"{f['ratio']:.2f}",
            f"{statistics.median(f['owner_seconds']):.2f}",
            f"{statistics.median(f['team_seconds']):.2f}",
            f"{f['waiting']:.0%}",
            str(f["products_gathered"]),
            f"{f['megabytes_gathered']:.0f}",
            "yes" if f["equal"] else "NO",
        ]
        for f in found
    ]
    header = ["matrix", "ratio", "owner s", "team s", "waiting", "gathers", "MB a rank", "same bits"]
    print_rows(f"A step by a team of {chosen.ranks} over one by an owner", header, rows)
    if chosen.json:
        write_json(chosen.json, "benchmarks/teams.py", Entries((), (), {}), {f["shape"]: f for f in found}, settings)
    if not all(f["equal"] for f in found):
        raise SystemExit("a team has other bits than one rank")


if __name__ == "__main__":
    main()
