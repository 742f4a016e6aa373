"""Rank: what one rank does of a run, from joining the others to its last training."""

from __future__ import annotations

import contextlib
import gc
import os
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from muonmesh.checkpoint.ranks import insist_on_the_same, on_first_rank
from muonmesh.cli.corpus import Corpus, load_corpus_of
from muonmesh.cli.failure import LAUNCHER
from muonmesh.cli.lock import locked
from muonmesh.cli.metrics_log import cut_metrics
from muonmesh.cli.run_settings import Optimizer, Settings, load_settings
from muonmesh.cli.training import StopRequest, Training
from muonmesh.errors import FileError
from muonmesh.files import write_text


def work(run: Path) -> None:
    """Train what the run's settings ask for, going on from its checkpoints where there are any.

    Raises:
        FileError: the ranks were given different texts or settings, they are not as many as the run has, another
            process trains there, or what the run left is damaged.
    """
    settings = load_settings(run)
    corpus = load_corpus_of(run)
    device = join(settings.device, timeout=timedelta(seconds=settings.timeout) if settings.timeout else None)
    if dist.get_world_size() != settings.ranks:
        raise FileError(
            f"{run}: found --nproc-per-node {dist.get_world_size()}; needed the {settings.ranks} of the run. "
            f"Write: --nproc-per-node {settings.ranks}, or change them: muonmesh train --resume {run} --ranks N"
        )
    lock = contextlib.ExitStack()
    if LAUNCHER not in os.environ:  # which holds it already
        on_first_rank(lambda: lock.enter_context(locked(run, option="torchrun")))
    insist_on_the_same(run, {**asdict(settings), "text": corpus.digest, "vocabulary": corpus.vocab})
    settings = replace(settings, out=str(run))  # wherever it lies now
    stop = StopRequest()
    for name in settings.optimizers:
        if not train(name, settings, corpus, device, stop):
            break
        gc.collect()  # sharded models are full of cycles, and the next one needs the room
    dist.destroy_process_group()
    lock.close()


def join(kind: str, *, timeout: timedelta | None = None) -> torch.device:
    """Make the default process group of ranks that torchrun or `muonmesh.cli.launch` has started; return the device.

    Torchrun gives all attempts one store. What an attempt finds there of the one before it are addresses of processes
    that are gone, and gloo would wait for them. So on one host each attempt has a name of its own in the store. The
    agents of several hosts count attempts differently: there torchrun must not share its store, see docs/training.md.

    Args:
        kind: ``"cpu"``, over gloo, or ``"cuda"``, over NCCL.
        timeout: How long a collective waits; None for torch's own limit.
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
    """One of a run's trainings, from its checkpoint if it has one; False when it was stopped."""
    run = settings.directory
    training = Training(name, settings, corpus, device)
    training.restore()
    explanation = training.engine.explain()

    def write() -> None:
        training.seconds = cut_metrics(run, name, training.start if training.start else -1)
        write_text(run / f"explain-{name}.txt", f"{explanation}\n")

    on_first_rank(write)  # and no rank may die of the Ctrl-C that another one takes as a wish
    stop.install()
    return training.run(stop)
