"""Stop: a wish to end after the current step, made by Ctrl-C."""

from __future__ import annotations

import signal
from types import FrameType


class StopRequest:
    """Set by SIGINT on any rank; the training ends when all ranks have heard of it."""

    def __init__(self) -> None:
        self.requested = False

    def install(self) -> None:
        """Take SIGINT over. SIGTERM keeps ending the process: so a rank left waiting for a dead one goes at once."""
        signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
