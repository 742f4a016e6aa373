"""Rank: the work of one rank in a run, from joining the process group to its last training."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from muonmesh.checkpoint.ranks import on_first_rank
from muonmesh.comm.telling import tell_all
from muonmesh.errors import FileError
from muonmesh.files import write_text
from muonmesh.tools.cli.corpus import Corpus, load_corpus_of
from muonmesh.tools.cli.failure import LAUNCHER
from muonmesh.tools.cli.lock import locked
from muonmesh.tools.cli.metrics_log import cut_metrics
from muonmesh.tools.cli.run_settings import Optimizer, Settings, load_settings
from muonmesh.tools.cli.terminal import shell_line
from muonmesh.tools.cli.training import StopRequest, Training


def work(run: Path) -> None:
    """Run all trainings of a run's settings, from their checkpoints if there are any.

    Raises:
        FileError: ranks have different texts or settings, the number of ranks differs from the run's, another process
            trains in this directory, or files of the run are damaged.
    """
    settings = load_settings(run)
    corpus = load_corpus_of(run)
    device = join(settings.device, timeout=timedelta(seconds=settings.timeout) if settings.timeout else None)
    if dist.get_world_size() != settings.ranks:
        raise FileError(
            f"{run}: found --nproc-per-node {dist.get_world_size()}; needed the {settings.ranks} of the run. "
            f"Write: --nproc-per-node {settings.ranks}, or change them: "
            f"{shell_line('train', '--resume', run)} --ranks N"
        )
    lock = contextlib.ExitStack()
    if LAUNCHER not in os.environ:  # the launcher holds the lock already
        on_first_rank(lambda: lock.enter_context(locked(run, option="torchrun")))
    insist_on_the_same(run, {**asdict(settings), "text": corpus.digest, "vocabulary": corpus.vocab})
    settings = replace(settings, out=str(run))  # the directory may have moved
    stop = StopRequest()
    for name in settings.optimizers:
        if not train(name, settings, corpus, device, stop):
            break
        gc.collect()  # sharded models have many reference cycles, and the next model needs the memory
    dist.destroy_process_group()
    lock.close()


def insist_on_the_same(run: Path, given: Mapping[str, Any]) -> None:
    """Check that all ranks have the same values. Called on all ranks.

    Raises:
        FileError: on every rank: values differ; the message names the first.
    """
    everyone = tell_all(given)
    for name in sorted({name for other in everyone for name in other}):
        found = [other.get(name) for other in everyone]
        if any(value != found[0] for value in found):
            values = ", ".join(map(repr, found))
            raise FileError(f"{run}: the ranks were given different {name}: {values}; needed the same on each of them")


def join(kind: str, *, timeout: timedelta | None = None) -> torch.device:
    """Make the default process group of ranks that torchrun or `launch` has started; return the device.

    torchrun gives all attempts of a run the same store. There, a restarted attempt would find the addresses of ended
    processes, and gloo would wait for them. So on one machine, each attempt has its own prefix in the store. On several
    machines, torchrun's agents count attempts differently, so torchrun must not share its store: see docs/training.md.

    Args:
        kind: ``"cpu"``, over gloo, or ``"cuda"``, over NCCL.
        timeout: The longest time that a collective waits; None means torch's default.
    """
    settings: dict[str, Any] = {"backend": "gloo", "timeout": timeout}
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        settings |= {"backend": "nccl", "device_id": device}
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("GROUP_WORLD_SIZE") == "1":
        store, rank, ranks = next(rendezvous("env://"))
        attempt = PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
        settings |= {"store": attempt, "rank": rank, "world_size": ranks}
    dist.init_process_group(**settings)
    return device


def train(name: Optimizer, settings: Settings, corpus: Corpus, device: torch.device, stop: StopRequest) -> bool:
    """Run one training, from its checkpoint if it has one; return False if it was stopped."""
    run = settings.directory
    training = Training(name, settings, corpus, device)
    training.restore()
    explanation = training.explain()

    def write() -> None:
        training.seconds = cut_metrics(run, name, training.start if training.start else -1)
        write_text(run / f"explain-{name}.txt", f"{explanation}\n")

    # All ranks meet here. Ctrl-C must not kill one rank while another already takes it as a request to stop.
    on_first_rank(write)
    stop.install()
    return training.run(stop)
