"""Launch: start the ranks with torchrun's own machinery, and say clearly how they ended."""

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

from muonmesh.cli.failure import FOLDER, LAUNCHER, first_failure, make_room
from muonmesh.files import writing

WORKER = "muonmesh.cli.worker"
SECONDS_TO_STOP = 600  # after Ctrl-C, for the step under way and its checkpoint; a second Ctrl-C does not wait


class RankFailed(Exception):
    """A rank ended with an error; the message is that rank's."""


class Interrupted(Exception):
    """The ranks were asked to stop and did."""


def launch(run: Path, *, ranks: int) -> None:
    """Run ``python -m muonmesh.cli.worker run`` as ``ranks`` processes on this machine and wait for all of them.

    SIGINT, SIGTERM and SIGHUP reach the ranks as SIGINT, once: they finish their step and leave a checkpoint. Should
    this process be killed, they end by themselves.

    Args:
        run: The run's directory.
        ranks: How many.

    Raises:
        RankFailed: a rank failed; the others were ended.
        Interrupted: a signal came.
        FileError: the run's directory cannot be written.
    """
    shutil.rmtree(run / FOLDER, ignore_errors=True)  # of a launcher that was killed
    with writing(run):
        (run / FOLDER).mkdir(parents=True)
        make_room(run, ranks)
    environment = dict(os.environ)
    os.environ[LAUNCHER] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks)))
    # The shared store keeps the addresses of dead processes, which hangs or fails gloo after a restart.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(SECONDS_TO_STOP)
    for name in ("agent.server.api", "multiprocessing.api"):  # what they have to say is said below
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
            signals_to_handle="",  # `_Signals` does
            # torch makes a folder there for logs that nobody asked for, and leaves it behind.
            logs_specs=DefaultLogsSpecs(log_dir=str(run / FOLDER)),
        )
        elastic_launch(config, sys.executable)("-m", WORKER, str(run))
    except ChildFailedError as error:
        raise RankFailed(_explain(run, error)) from error
    except SignalException as error:
        failure = first_failure(run)
        raise (Interrupted() if failure is None else RankFailed(failure)) from error
    finally:
        os.environ.clear()  # what starts next, a torchrun say, has another launcher
        os.environ.update(environment)
        signals.give_back()
        shutil.rmtree(run / FOLDER, ignore_errors=True)


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Signals:
    """What ends a run: Ctrl-C, SIGTERM, or a terminal that is closed. The second of them does not wait.

    A terminal that is closed does not count as the second, and the system may say it twice.
    """

    def __init__(self) -> None:
        self._asked = False
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        for number, handler in self._before.items():
            if number != signal.SIGHUP or handler is not signal.SIG_IGN:  # ignored, as under nohup, it stays so
                signal.signal(number, self._stop)

    def give_back(self) -> None:
        """Let them do again what they did."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP and self._asked:
            return
        self._asked = True
        raise SignalException(f"process {os.getpid()} got signal {number}", sigval=signal.SIGINT)


def _explain(run: Path, error: ChildFailedError) -> str:
    for rank, failure in sorted(error.failures.items()):
        if failure.exitcode < 0 and -failure.exitcode != signal.SIGTERM:  # SIGTERM is how the launcher ends the others
            name = signal.Signals(-failure.exitcode).name
            hint = " (out of memory?)" if name == "SIGKILL" else ""
            return f"rank {rank}: ended by {name}{hint}"
    rank, failure = error.get_first_failure()
    return first_failure(run) or f"rank {rank}: ended with exit code {failure.exitcode}; its own output is above"
