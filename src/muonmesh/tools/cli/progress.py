"""Progress: shows the progress of a training on rank 0: a live line on a terminal, else a line every 15 seconds."""

from __future__ import annotations

import time

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from muonmesh.tools.cli.run_settings import Settings
from muonmesh.tools.cli.terminal import make_console, say

PLAIN_SECONDS = 15.0  # without a terminal: the longest silence between two lines


class ProgressLine(Progress):
    """Shows the progress of one training within a ``with`` block; shows nothing unless ``visible`` (rank 0 only)."""

    def __init__(self, name: str, settings: Settings, *, start: int, visible: bool) -> None:
        self.name, self.settings = name, settings
        console = make_console()
        self._plain = visible and not console.is_terminal
        texts = TextColumn("[bold]{task.description:>5}"), TextColumn("{task.fields[said]}")
        columns = (texts[0], BarColumn(12), MofNCompleteColumn(), TimeRemainingColumn(compact=True), texts[1])
        super().__init__(*columns, console=console, disable=not visible or self._plain)
        self._task = self.add_task(name, total=settings.steps, completed=start, said="")
        self._validation = ""
        self._last_print = time.monotonic()

    def step(self, step: int, loss: float, seconds: float) -> None:
        """Show a finished step, its loss and its speed."""
        said = f"loss {loss:.3f}{self._validation}, {self.settings.tokens_per_step / seconds:,.0f} tok/s"
        self.update(self._task, completed=step, said=said)
        now = time.monotonic()
        if self._plain and (step == self.settings.steps or now - self._last_print >= PLAIN_SECONDS):
            self._last_print = now
            say(f"{self.name:>5} {step}/{self.settings.steps} {said}")

    def validation(self, loss: float) -> None:
        """Set the validation loss to show from the next step on."""
        self._validation = f", validation {loss:.3f}"
