"""Stop: a wish to end after the current step, made by Ctrl-C or by a terminal that was closed."""

from __future__ import annotations

import signal
from types import FrameType


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
