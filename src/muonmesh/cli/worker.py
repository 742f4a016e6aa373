"""Worker: what each rank runs, as ``python -m muonmesh.cli.worker RUN``. Started by :mod:`muonmesh.cli.launch`.

Or by torchrun, for restarts and for several hosts that share the run's folder. It goes on with a run that
``muonmesh train`` has begun::

    torchrun --nproc-per-node 2 --max-restarts 3 -m muonmesh.cli.worker RUN
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

from muonmesh.cli.failure import LAUNCHER, record_failure
from muonmesh.cli.terminal import print_plainly

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Do what one rank does of a run, and end the process at once. An error is written where the launcher finds it.

    At once, because a rank that unwinds slowly keeps its sockets open and leaves the others waiting.
    """
    end_with_launcher()
    print_plainly()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until there is a step to finish, Ctrl-C ends a rank at once
    run = Path(sys.argv[1])
    try:
        from muonmesh.cli.rank import work  # which takes seconds, in which a launcher may end, or a user

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
