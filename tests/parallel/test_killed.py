"""A training is killed at random moments and goes on under another layout each time: no bit is lost."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import time
from collections import Counter
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import muonmesh as mm
import tests.workers  # noqa: F401 - says what the process that ranks are copies of imports
from tests import problem
from tests.parallel.test_any_to_any import LAYOUTS, build

# One training goes through these, one after the other and again.
ORDER = (
    "ddp 4 to owners",
    "one process",
    "hsdp to owners",
    "fsdp 2",
    "ddp on two machines",
    "ddp 2 to owners",
    "hsdp to owners",
    "fsdp 4",
)
KEPT = 3  # checkpoints


def newest(folder: Path) -> int:
    """The last step of which there is a whole checkpoint."""
    return max((int(path.name) for path in folder.iterdir() if path.name.isdecimal()), default=0)


def trained(folder: str, layout: str, last: int, rank: int, port: int) -> None:
    """What each rank does: go on from the newest checkpoint, and save after every step."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    ranks, place = LAYOUTS[layout][0], Path(folder)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    first = newest(place)
    case = build(layout, seed=7 if first else 0)
    if first:
        mm.checkpoint.load(place / str(first), case.model, case.optimizer)
    dist.barrier()  # none saves before all have looked
    for step in range(first, last):
        case.advance(step, step + 1)
        mm.checkpoint.save(place / str(step + 1), case.model, case.optimizer)
        if rank == 0 and step >= KEPT:
            shutil.rmtree(place / str(step + 1 - KEPT))
    os._exit(0)


def started(folder: Path, layout: str, last: int) -> tuple[list[BaseProcess], dist.TCPStore]:
    context = multiprocessing.get_context("forkserver")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes: list[BaseProcess] = []
    for rank in range(LAYOUTS[layout][0]):
        process = context.Process(target=trained, args=(str(folder), layout, last, rank, store.port), daemon=True)
        process.start()
        processes.append(process)
    return processes, store


def ended(processes: list[BaseProcess]) -> None:
    """As torchrun does once a rank is gone."""
    for process in processes:
        process.kill()
        process.join()


def killed_run(folder: Path, *, kills: int, seed: int, seconds: float) -> tuple[Counter[str], int]:
    """Kill a random rank at a random moment, again and again; how often which layout was, and the steps there are."""
    chance, counted, until = random.Random(seed), Counter[str](), time.monotonic() + seconds
    far, starts = 10**6, 0
    while sum(counted.values()) < kills and time.monotonic() < until:
        layout, before = ORDER[starts % len(ORDER)], newest(folder)
        processes, store = started(folder, layout, far)
        starts += 1
        while newest(folder) < before + 1 and all(process.is_alive() for process in processes):
            time.sleep(0.002)
        assert all(process.is_alive() for process in processes), f"{layout}: a rank ended by itself"
        time.sleep(chance.uniform(0.0, 0.3))
        victim = chance.choice(processes)
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        if chance.random() < 0.5:  # the others find out by themselves for a while
            time.sleep(chance.uniform(0.0, 0.3))
        ended(processes)
        del store
        counted[layout] += 1
    return counted, newest(folder)


@pytest.mark.slow
@pytest.mark.soak
def test_kills_and_other_layouts_change_no_bit(workers, tmp_path: Path) -> None:
    """About a minute. Gradients to owners and results passed on between machines are among the layouts."""
    counted, steps = killed_run(tmp_path, kills=40, seed=0, seconds=400)
    print(dict(counted), steps)
    assert sum(counted.values()) >= len(ORDER), "each layout was killed"
    alone = build("one process")
    alone.advance(0, steps)
    for layout in ORDER:
        for result in workers(LAYOUTS[layout][0]).run(read, layout, str(tmp_path / str(steps))):
            assert problem.differing(result, alone.whole()) == [], layout


def read(layout: str, path: str) -> dict[str, torch.Tensor]:
    case = build(layout, seed=7)
    mm.checkpoint.load(path, case.model, case.optimizer)
    return case.whole()
