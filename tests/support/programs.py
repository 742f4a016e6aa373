"""Programs of a file: each a process that is copied from one which has imported torch, as that takes seconds."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

import tests.support.workers  # noqa: F401 - says what the process that is copied imports


def run_script(script: Path, *arguments: str, ranks: int = 1, timeout: float = 240.0) -> str:
    """Run a file in its folder, as ``python`` does, or on ranks as ``torchrun`` does; return what the first prints.

    What an interpreter does on its way out is not run: a copied process ends without it.
    """
    context = multiprocessing.get_context("forkserver")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if ranks > 1 else None
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(ranks):
            environment = {} if store is None else environment_of(rank, ranks, store.port)
            call = (str(script), arguments, environment, f"{folder}/{rank}")
            processes.append(context.Process(target=_run, args=call, daemon=True))
            processes[-1].start()
        running, deadline = {process.sentinel: process for process in processes}, time.monotonic() + timeout
        try:
            while running:
                ended = [running.pop(sentinel) for sentinel in wait(list(running), deadline - time.monotonic())]
                assert ended, f"{script.name} was still running after {timeout} s"
                for process in ended:
                    process.join()
                    errors = Path(f"{folder}/{processes.index(process)}.err")
                    assert process.exitcode == 0, f"{script.name}, rank {errors.stem}: {errors.read_text()}"
        finally:
            for process in processes:
                process.kill()
                process.join()
        return Path(folder, "0.out").read_text()


def environment_of(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return what torchrun tells a rank whose store it keeps, on one machine."""
    local = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "MASTER_PORT": str(port)}
    return {"RANK": str(rank), "WORLD_SIZE": str(ranks), **local, **agent}


def _run(script: str, arguments: tuple[str, ...], environment: dict[str, str], output: str) -> None:
    os.environ |= environment
    folder = str(Path(script).parent)
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.argv = [script, *arguments]
    with open(f"{output}.out", "w") as out, open(f"{output}.err", "w") as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
    runpy.run_path(script, run_name="__main__")
