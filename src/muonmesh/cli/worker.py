"""Worker: what each rank runs, as ``python -m muonmesh.cli.worker RUN``. Started by :mod:`muonmesh.cli.launch`.

Or by torchrun, for restarts and for several hosts that share the run's folder. It goes on with a run that
``muonmesh train`` has begun::

    torchrun --nproc-per-node 2 --max-restarts 3 -m muonmesh.cli.worker RUN
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muonmesh.cli.failure import record_failure
from muonmesh.cli.terminal import print_plainly
from muonmesh.errors import FileError

if TYPE_CHECKING:  # main comes first, what takes seconds to import after it
    import torch

    from muonmesh.cli.corpus import Corpus
    from muonmesh.cli.metrics_log import MetricsLog
    from muonmesh.cli.run_settings import Optimizer, Settings
    from muonmesh.cli.training import StopRequest

EXPLANATION_FILE = "explain.txt"
LAUNCHER = "MUONMESH_LAUNCHER"  # environment variable: the process that started the ranks
PR_SET_PDEATHSIG = 1  # linux/prctl.h
TIMEOUT = (
    "MUONMESH_TIMEOUT"  # environment variable: seconds that a collective waits for the others; torch's own if unset
)


def work(run: Path) -> None:
    """Train what the run's settings ask for, going on from its checkpoints where there are any.

    Raises:
        FileError: the ranks were given different texts or settings, they are not as many as the run has, another
            process trains there, or what the run left is damaged.
    """
    import torch
    import torch.distributed as dist

    from muonmesh.checkpoint.ranks import insist_on_the_same, on_first_rank
    from muonmesh.cli.corpus import load_corpus_of
    from muonmesh.cli.lock import RunLock
    from muonmesh.cli.metrics_log import MetricsLog
    from muonmesh.cli.run_settings import load_settings
    from muonmesh.cli.training import StopRequest

    settings = load_settings(run)
    corpus = load_corpus_of(run)
    if settings.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        join("nccl", timeout=seconds_to_wait(), device_id=device)
    else:
        device = torch.device("cpu")
        join("gloo", timeout=seconds_to_wait())
    if dist.get_world_size() != settings.ranks:
        raise FileError(
            f"{run}: found {dist.get_world_size()} ranks, started by torchrun; needed the {settings.ranks} of the run. "
            f"Write: --nproc-per-node {settings.ranks}, or change them: muonmesh train --resume {run} --ranks N"
        )
    lock = RunLock(run, option="torchrun")
    if LAUNCHER not in os.environ:  # which holds it already
        on_first_rank(lock.take)
    insist_on_the_same(run, {**asdict(settings), "text": corpus.digest, "vocabulary": corpus.vocab})
    stop = StopRequest()
    log = MetricsLog(run) if dist.get_rank() == 0 else None
    for name in settings.optimizers:
        if not train(name, run, settings, corpus, device, log, stop):
            break
        gc.collect()  # sharded models are full of cycles, and the next one needs the room
    dist.destroy_process_group()
    lock.release()


def join(backend: str, *, timeout: timedelta | None, device_id: torch.device | None = None) -> None:
    """Make the default process group of ranks that torchrun or `muonmesh.cli.launch` has started.

    Torchrun gives all attempts one store. What an attempt finds there of the one before it are addresses of processes
    that are gone, and gloo would wait for them. So on one host each attempt has a name of its own in the store. The
    agents of several hosts count attempts differently: there torchrun must not share its store, see docs/training.md.

    Args:
        backend: ``"gloo"`` or ``"nccl"``.
        timeout: How long a collective waits; None for torch's own limit.
        device_id: This rank's device, for NCCL.
    """
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    settings: dict[str, Any] = {"timeout": timeout, "device_id": device_id}
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("GROUP_WORLD_SIZE") == "1":
        store, rank, ranks = next(rendezvous("env://"))
        attempt = PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
        settings |= {"store": attempt, "rank": rank, "world_size": ranks}
    dist.init_process_group(backend, **settings)


def seconds_to_wait() -> timedelta | None:
    """How long collectives wait, None for torch's own limit.

    Raises:
        FileError: the environment says something else than a number of seconds.
    """
    text = os.environ.get(TIMEOUT)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < math.inf:
        raise FileError(f"{TIMEOUT}: found {text!r}; needed a number of seconds above 0. Write: {TIMEOUT}=600")
    return timedelta(seconds=seconds)


def train(
    name: Optimizer,
    run: Path,
    settings: Settings,
    corpus: Corpus,
    device: torch.device,
    log: MetricsLog | None,
    stop: StopRequest,
) -> bool:
    """One of a run's trainings, from its checkpoint if it has one; False when it was stopped."""
    from muonmesh.checkpoint.ranks import on_first_rank
    from muonmesh.checkpoint.record import MODEL
    from muonmesh.cli.export import export, export_of
    from muonmesh.cli.training import Training
    from muonmesh.files import writing

    training = Training(name, settings, corpus, device)
    training.restore()
    explanation = training.engine.explain()

    def write() -> None:
        assert log is not None
        training.seconds = log.cut(name, training.start if training.start else -1)
        with (
            writing(run / EXPLANATION_FILE),
            (run / EXPLANATION_FILE).open(
                "w" if name == settings.optimizers[0] else "a", encoding="utf-8", errors="replace"
            ) as file,
        ):
            file.write(f"{name}\n\n{explanation}\n\n")

    on_first_rank(write)  # and no rank may die of the Ctrl-C that another one takes as a wish
    stop.install()
    finished = training.run(log, stop)

    def leave() -> None:
        weights, text = training.checkpoints.whole(f"{MODEL}."), Path(corpus.directory)
        export(export_of(run, name), training.config, weights, tokenizer=text, init=settings.init)

    if finished and settings.export:
        on_first_rank(leave)
    return finished


def main(work: Callable[[Path], None] = work) -> None:
    """Run ``work`` as one rank, and end the process at once. An error is written where the launcher finds it.

    At once, because a rank that unwinds slowly keeps its sockets open and leaves the others waiting.
    """
    end_with_launcher()
    print_plainly()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until there is a step to finish, Ctrl-C ends a rank at once
    run = Path(sys.argv[1])
    try:
        work(run)
    except BaseException as error:
        record_failure(run, int(os.environ["RANK"]), error)
        _end(1)
    # Everything has been written and closed. What would come now is the interpreter's end under threads of torch's, in
    # which a rank was once aborted ("terminate called without an active exception").
    _end(0)


def end_with_launcher() -> None:
    """Let Linux end this process when the one that started it is gone, torchrun too.

    A launcher that is killed cannot tell its ranks. They have sessions of their own, so no signal of a terminal reaches
    them either, and they would train on with nobody to stop them.
    """
    launcher = int(os.environ.get(LAUNCHER, "0")) or ("TORCHELASTIC_RUN_ID" in os.environ and os.getppid())
    if launcher and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != launcher:  # it went before the line above
            os._exit(1)


def _end(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
