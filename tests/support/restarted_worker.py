"""A worker of which one rank is killed at the first attempt, and of which rank 0 comes late at the second."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from muonmesh.tools.cli.training import join

LATE = 3.0  # seconds


def main(folder: Path) -> None:
    rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    if (rank, attempt) == ("0", "1"):
        time.sleep(LATE)
    join("cpu", timeout=timedelta(seconds=30))
    total = torch.ones(1)
    dist.all_reduce(total)
    if attempt == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    if total.item() == 2:
        (folder / f"{rank}-{attempt}").touch()
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
