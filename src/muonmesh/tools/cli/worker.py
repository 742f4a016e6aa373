"""Worker: the program of each rank, ``python -m muonmesh.tools.cli.worker RUN``, which `launch` starts.

torchrun can start it too, for automatic restarts, or on several machines that share the run's folder. It continues a
run that ``muonmesh train`` has begun::

    torchrun --nproc-per-node 2 --max-restarts 3 -m muonmesh.tools.cli.worker RUN
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

from muonmesh.tools.cli.run_files import LAUNCHER, record_failure
from muonmesh.tools.cli.terminal import print_plainly

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Do the work of one rank, and end the process at once. An error is written to a file for the launcher.

    A rank that ends slowly would keep its sockets open, and the other ranks would wait for it.
    """
    end_with_launcher()
    print_plainly()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # before the first step, Ctrl-C ends a rank at once
    if "RANK" not in os.environ:
        sys.exit("muonmesh.tools.cli.worker: found no RANK; needed torchrun. Or write: muonmesh train --resume RUN")
    run, code = Path(sys.argv[1]), 0
    try:
        from muonmesh.tools.cli.training import work  # takes seconds, so the signals are set up before

        work(run)
    except BaseException as error:
        record_failure(run, int(os.environ["RANK"]), error)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    # Everything has been written and closed. A normal exit of the interpreter, while threads of torch still run, once
    # aborted a rank ("terminate called without an active exception").
    os._exit(code)


def end_with_launcher() -> None:
    """Make Linux end this process when its launcher (`muonmesh.tools.cli.launch` or torchrun) has ended.

    A killed launcher cannot stop its ranks. The ranks have their own sessions, so a terminal's signals do not reach
    them either. Without this function, they would train on without control.
    """
    launcher = int(os.environ.get(LAUNCHER, "0")) or ("TORCHELASTIC_RUN_ID" in os.environ and os.getppid())
    if launcher and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != launcher:  # the launcher ended before the line above
            os._exit(1)


if __name__ == "__main__":
    main()
