"""What each rank of two machines runs: steps of matrices that all ranks hold; rank 0 writes what has left its machine.

torchrun --nnodes 2 --nproc-per-node 2 … two_levels_worker.py FILE INTERFACE MACHINE
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import muonmesh as mm

STEPS, SHAPES = 4, [(512, 1024)] * 8


def main(file: Path, interface: str, machine: str) -> None:
    """Step, count, and write the bytes of a step and the weights' fingerprint."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if machine == "0":
        del os.environ["LOCAL_WORLD_SIZE"]  # as launchers that do not tell
    weights = []
    for number, shape in enumerate(SHAPES):
        weights.append(nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(number))))
        weights[-1].grad = weights[-1].detach().clone()
    optimizer = mm.Muon(weights, process_group="world", lr=0.02, memory_budget_mb=32.0)
    optimizer.step()
    counter = Path(f"/sys/class/net/{interface}/statistics/tx_bytes")
    dist.barrier()
    before = int(counter.read_text())
    for _ in range(STEPS):
        optimizer.step()
    dist.barrier()
    traffic = (int(counter.read_text()) - before) / STEPS
    print_ = [hash(w.detach().numpy().tobytes()) for w in weights]
    report = {"left": traffic, "machine": optimizer._runtime.ranks.machine, "weights": print_}
    file.with_suffix(f".{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
