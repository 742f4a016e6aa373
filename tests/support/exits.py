"""A process that forks ranks which leave as an ordinary script does, by the interpreter's own end; it prints how.

`python -m tests.support.exits KIND EXITS RANKS END`: KIND "muonmesh" takes three steps of Muon; "torch" does
collectives, and does not import muonmesh. RANKS such as 2,3,4. END "destroy" or "keep": whether ranks call
destroy_process_group.
"""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

KIND, EXITS, RANKS, END = sys.argv[1], int(sys.argv[2]), list(map(int, sys.argv[3].split(","))), sys.argv[4]
if KIND == "muonmesh":
    import muonmesh as mm


def steps() -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(16, 16, bias=False) for _ in range(3)])
    optimizer = mm.Muon(list(model.named_parameters()), lr=0.02, process_group="world")
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return model, optimizer


def collectives() -> Any:
    sent = torch.arange(4.0 * dist.get_world_size())
    received = torch.empty_like(sent)
    for _ in range(3):
        dist.all_to_all_single(received, sent, async_op=True).wait()  # type: ignore[union-attr]
        dist.all_reduce(sent)
    return sent, received


def rank_of_many(rank: int, world: int, folder: Path) -> Any:
    out = os.open(folder / str(rank), os.O_CREAT | os.O_WRONLY)
    os.dup2(out, 1)
    os.dup2(out, 2)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    held_alive = steps() if KIND == "muonmesh" else collectives()
    assert KIND == "muonmesh" or "muonmesh" not in sys.modules
    print("done", flush=True)
    last = torch.ones(2)
    sys.setswitchinterval(0.1)  # a thread of gloo that is late stays so until the interpreter shuts down
    dist.all_reduce(last)
    if END == "destroy":
        dist.destroy_process_group()
    return held_alive


def begin(world: int, folder: Path) -> list[int] | None:
    """Fork the ranks; None in a rank, which then leaves by the end of this script, with all that it has alive."""
    global held_alive
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            held_alive = rank_of_many(rank, world, folder)
            return None
        pids.append(pid)
    return pids


gc.collect()
gc.freeze()
held_alive: Any = None
ends: Counter[int] = Counter()
worlds = itertools.cycle(RANKS)
while ends.total() < EXITS:
    folder = Path(tempfile.mkdtemp(prefix="muonmesh-exits-"))
    pids = begin(next(worlds), folder)
    if pids is None:
        break
    for rank, pid in enumerate(pids):
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        ends[code] += 1
        if code:
            print(
                f"rank {rank} of {len(pids)} ended with {code}:", (folder / str(rank)).read_text()[-2000:], flush=True
            )
    shutil.rmtree(folder)
else:
    print(f"{KIND}, {END}: {ends.total()} exits of {RANKS} ranks, {dict(ends)}", flush=True)
