"""A worker of which one rank fails as the run's directory asks for, while the other waits in a collective."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch.distributed as dist

from muonmesh.tools.cli import training, worker


def work(run: Path) -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        if (run / "how").read_text() == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("the third layer is on fire")
    dist.barrier()


if __name__ == "__main__":
    training.work = work
    worker.main()
