"""Launch: starts the ranks with torchrun's machinery, and reports how they ended."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import uuid
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from muonmesh.files import writing
from muonmesh.tools.cli.run_files import FOLDER, LAUNCHER, first_failure, make_room

WORKER = "muonmesh.tools.cli.worker"
SECONDS_TO_STOP = 600  # after Ctrl-C, for the current step and its checkpoint; a second Ctrl-C stops at once


class RankFailed(Exception):
    """A rank ended with an error, whose message this error has."""


class RankKilled(RankFailed):
    """A signal ended a rank, so the run may continue from its last checkpoint."""


def launch(run: Path, *, ranks: int) -> None:
    """Run ``python -m muonmesh.tools.cli.worker run`` as ``ranks`` processes on this machine and wait for all of them.

    On SIGINT, SIGTERM or SIGHUP, this process sends SIGINT to the ranks once. They finish their step and write a
    checkpoint. If this process is killed, the ranks end by themselves.

    Args:
        run: The run's directory.
        ranks: The number of ranks.

    Raises:
        RankFailed: a rank failed; the other ranks were ended.
        RankKilled: as RankFailed, because of a signal.
        KeyboardInterrupt: a signal stopped the ranks.
        FileError: the run's directory cannot be written.
    """
    shutil.rmtree(run / FOLDER, ignore_errors=True)  # left by a launcher that was killed
    with writing(run):
        (run / FOLDER).mkdir(parents=True)
        make_room(run, ranks)
    environment = dict(os.environ)
    os.environ[LAUNCHER] = str(os.getpid())
    # Ranks import as this process does. With -m alone, a file in the current folder would replace a library's module.
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks)))
    # The shared store keeps the addresses of dead processes; with them, gloo hangs or fails after a restart.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(SECONDS_TO_STOP)
    for name in ("agent.server.api", "multiprocessing.api"):  # the code below reports the same errors
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    signals = _Signals()
    try:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            signals_to_handle="",  # `_Signals` handles them
            # torch always creates a folder for logs there, and does not remove it.
            logs_specs=DefaultLogsSpecs(log_dir=str(run / FOLDER)),
        )
        elastic_launch(config, sys.executable)("-P", "-m", WORKER, str(run))
    except ChildFailedError as error:
        raise _failed(run, error) from error
    except SignalException as error:
        failure = first_failure(run)
        raise (KeyboardInterrupt() if failure is None else RankFailed(failure)) from error
    finally:
        os.environ.clear()  # a process started later, such as torchrun, has another launcher
        os.environ.update(environment)
        signals.give_back()
        shutil.rmtree(run / FOLDER, ignore_errors=True)


def usable_cores() -> int:
    """Return the number of cores on which this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Signals:
    """Handlers of the signals that end a run: SIGINT (Ctrl-C), SIGTERM, and SIGHUP (a closed terminal).

    A second signal ends the run without waiting. SIGHUP never counts as a second signal, since the system may send it
    twice.
    """

    def __init__(self) -> None:
        self._stopping = False
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        for number, handler in self._before.items():
            if number != signal.SIGHUP or handler is not signal.SIG_IGN:  # under nohup it stays ignored
                signal.signal(number, self._stop)

    def give_back(self) -> None:
        """Restore the earlier handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP and self._stopping:
            return
        self._stopping = True
        raise SignalException(f"process {os.getpid()} got signal {number}", sigval=signal.SIGINT)


def _failed(run: Path, error: ChildFailedError) -> RankFailed:
    for rank, failure in sorted(error.failures.items()):
        if failure.exitcode < 0 and -failure.exitcode != signal.SIGTERM:  # the launcher ends the others with SIGTERM
            name = signal.Signals(-failure.exitcode).name
            hint = " (out of memory?)" if name == "SIGKILL" else ""
            return RankKilled(f"rank {rank}: ended by {name}{hint}")
    rank, failure = error.get_first_failure()
    unknown = f"rank {rank}: ended with exit code {failure.exitcode}; its own output is above"
    return RankFailed(first_failure(run) or unknown)
