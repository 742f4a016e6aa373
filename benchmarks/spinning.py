"""When the threads of a pool begin after an operation of torch, whose own threads go on spinning for a while.

    python benchmarks/spinning.py --json benchmarks/results/spinning.json
    python benchmarks/spinning.py --openmp libiomp5.so       # with Intel's OpenMP as well, preloaded

Each way has a process of its own, with as many threads as cores, and they take turns. In a process, 40 times: an
operation of torch on all threads, as the end of backward is, then one task of 3 ms for each thread of a pool. Reported
are the milliseconds from there until the last task has begun, and until all have ended, in the median and the quarters.
Pools: "ours" is that of a step (`numerics.kernels.threads`), "pinned" has each thread on a core of its own, "caller"
has one thread less and the caller does a task itself, and "team" gives the tasks to OpenMP's own threads, those that
spin (`GOMP_parallel`). "woken" are microseconds of an operation of torch on all threads, 2 ms after the one before:
what waking its threads up costs.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

WAYS: dict[str, dict[str, str]] = {
    "default": {},
    "GOMP_SPINCOUNT=0": {"GOMP_SPINCOUNT": "0"},
    "GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
    "GOMP_SPINCOUNT=10000": {"GOMP_SPINCOUNT": "10000"},
    "OMP_WAIT_POLICY=passive": {"OMP_WAIT_POLICY": "passive"},
    "OMP_WAIT_POLICY=active": {"OMP_WAIT_POLICY": "active"},
}
TASK, TIMES = 3e-3, 40


def quarters(values: list[float]) -> list[float]:
    """The median, and the first and third quarter."""
    first, middle, third = statistics.quantiles(values, n=4)
    return [round(value, 3) for value in (middle, first, third)]


def pools(threads: int) -> dict[str, Callable[[list[Callable[[], None]]], object]]:
    """Ways to run one task for each thread."""
    import torch

    from muonmesh.numerics.kernels.threads import run_all

    others = ThreadPoolExecutor(threads - 1)

    def caller(tasks: list[Callable[[], None]]) -> None:
        waiting = [others.submit(task) for task in tasks[1:]]
        tasks[0]()
        for one in waiting:
            one.result()

    cores = iter(sorted(os.sched_getaffinity(0)))
    each = ThreadPoolExecutor(threads, initializer=lambda: os.sched_setaffinity(0, {next(cores)}))

    def pinned(tasks: list[Callable[[], None]]) -> None:
        for one in [each.submit(task) for task in tasks]:
            one.result()

    found: dict[str, Callable[[list[Callable[[], None]]], object]] = {
        "ours": lambda tasks: run_all(tasks, device=torch.device("cpu")),
        "pinned": pinned,
        "caller": caller,
    }
    gomp = next((Path(torch.__file__).parent / "lib").glob("libgomp*"), None)
    if gomp is not None and "LD_PRELOAD" not in os.environ:
        library = ctypes.CDLL(str(gomp))

        def team(tasks: list[Callable[[], None]]) -> None:
            function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: tasks[library.omp_get_thread_num()]())
            library.GOMP_parallel(function, None, len(tasks), 0)

        found["team"] = team
    return found


def child() -> None:
    """Measure in this process, whose environment says how threads wait."""
    import torch

    threads = torch.get_num_threads()
    x, small = torch.randn(1 << 20), torch.ones(1 << 12)
    found: dict[str, Any] = {}
    for name, run in pools(threads).items():
        begun, ended = list[float](), list[float]()
        for _ in range(TIMES):
            starts: list[float] = []

            def task(starts: list[float] = starts) -> None:
                starts.append(time.perf_counter())
                own = time.thread_time()
                while time.thread_time() - own < TASK:
                    torch.lgamma(small)  # on one thread, and gives the interpreter's lock away

            for _ in range(3):
                x.mul_(1.0)
            start = time.perf_counter()
            run([task] * threads)
            ended.append(1e3 * (time.perf_counter() - start))
            begun.append(1e3 * (max(starts) - start))
            time.sleep(0.02)
        found[name] = {"begun": quarters(begun), "ended": quarters(ended)}
    woken = []
    y = torch.randn(1 << 16)
    for _ in range(300):
        time.sleep(2e-3)
        start = time.perf_counter()
        y.mul_(1.0)
        woken.append(1e6 * (time.perf_counter() - start))
    print(json.dumps(found | {"woken": quarters(woken)}))


def main() -> None:
    """Measure each way in turns, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--openmp", type=Path, help="libiomp5.so of Intel's OpenMP, tried with KMP_BLOCKTIME too")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child()
        return
    ways = dict(WAYS)
    if options.openmp is not None:
        for told in ("200", "1", "0"):
            preloaded = {"LD_PRELOAD": str(options.openmp), "KMP_BLOCKTIME": told}
            ways[f"Intel's OpenMP, KMP_BLOCKTIME={told}"] = preloaded
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    load = round(os.getloadavg()[0], 1)
    for _ in range(options.rounds):
        for name, environment in ways.items():
            command = [sys.executable, __file__, "--child"]
            run = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
            rounds[name].append(json.loads(run.stdout))
    middle = {}
    for name, runs in rounds.items():
        told = {pool: statistics.median(run[pool]["begun"][0] for run in runs) for pool in runs[0] if pool != "woken"}
        ended = {pool: statistics.median(run[pool]["ended"][0] for run in runs) for pool in told}
        middle[name] = {"begun": told, "ended": ended, "woken": statistics.median(run["woken"][0] for run in runs)}
        print(name, middle[name], flush=True)
    if options.json is not None:
        facts = {
            "command": "python benchmarks/spinning.py --openmp FILE --json FILE",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "load": load,
            "cores": os.cpu_count(),
            "units": "ms from handing the tasks over until the last began and all ended; woken: us",
        }
        options.json.write_text(json.dumps(facts | {"middle of rounds": middle, "rounds": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
