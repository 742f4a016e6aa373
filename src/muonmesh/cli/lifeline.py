"""Lifeline: how a rank ends: with its launcher, however that ended, or after its step when somebody wishes so."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from types import FrameType

LAUNCHER = "MUONMESH_LAUNCHER"  # environment variable: the process that started the ranks
SECONDS = 1.0  # between two looks
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_launcher() -> None:
    """End this process at once when the one that started it is gone, torchrun too; nothing where nobody said which did.

    A launcher that is killed cannot tell its ranks. They have sessions of their own, so no signal of a terminal reaches
    them either, and they would train on with nobody to stop them. Linux sends a signal; elsewhere, and should that
    fail, a thread looks.
    """
    launcher = int(os.environ.get(LAUNCHER, "0")) or ("TORCHELASTIC_RUN_ID" in os.environ and os.getppid())
    if not launcher:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != launcher:  # it went before the line above
        os._exit(1)
    threading.Thread(target=_watch, args=(launcher,), name="lifeline", daemon=True).start()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(SECONDS)
    os._exit(1)


class StopRequest:
    """Set by SIGINT or SIGHUP on any rank; the training ends when all ranks have heard of it."""

    def __init__(self) -> None:
        self.requested = False

    def install(self) -> None:
        """Take SIGINT and SIGHUP over, the latter unless it is ignored, as under nohup.

        SIGTERM keeps ending the process: so a rank left waiting for a dead one goes at once.
        """
        signal.signal(signal.SIGINT, self._on_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
