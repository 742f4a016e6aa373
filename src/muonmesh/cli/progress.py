"""Progress: what rank 0 shows while it trains: one live line on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
from rich.table import Column

from muonmesh.cli.clock import StepTimes
from muonmesh.cli.terminal import make_console

PLAIN_SECONDS = 15.0  # without a terminal: the longest silence between two lines
ROOMY, WIDE = 90, 110  # columns of a terminal that has room for whole words, and for a bar
SMOOTHING = 0.9  # of the speeds and shares shown, so that they can be read


class ProgressLine:
    """Shows one training. Does nothing when not ``visible`` (every rank but the first)."""

    def __init__(self, name: str, *, steps: int, start: int, tokens_per_step: int, visible: bool) -> None:
        self.name, self.steps, self.tokens_per_step, self.visible = name, steps, tokens_per_step, visible
        self._console = make_console()
        self._live = visible and self._console.is_terminal
        fixed = Column(no_wrap=True, min_width=5)
        columns: list[ProgressColumn] = [TextColumn("[bold]{task.description:>5}", table_column=fixed)]
        if self._console.width >= WIDE:
            columns.append(BarColumn(bar_width=12))
        columns.append(TextColumn("{task.fields[status]}", table_column=Column(no_wrap=True, overflow="ellipsis")))
        self._bar = Progress(*columns, console=self._console, disable=not self._live)
        self._task = self._bar.add_task(name, total=steps, completed=start, status="starting")
        self._start = self._step = start
        self._loss = float("nan")
        self._validation: float | None = None
        self._times: StepTimes | None = None
        self._elapsed_per_step: float | None = None
        self._last_step = self._last_print = time.monotonic()

    def __enter__(self) -> ProgressLine:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def step(self, step: int, loss: float, times: StepTimes) -> None:
        """Show a finished step."""
        now = time.monotonic()
        elapsed, self._last_step = now - self._last_step, now
        self._elapsed_per_step = _smooth(self._elapsed_per_step, elapsed)  # evaluation and checkpoints included
        # The first step makes plans and allocations and says little of the others.
        self._times = _smooth_times(self._times if step > self._start + 2 else None, times)
        self._step, self._loss = step, loss
        self._show(last=False)

    def validation(self, step: int, loss: float) -> None:
        """Show a validation loss, from now on."""
        self._validation = loss
        self._show(last=step == self.steps)

    def _show(self, *, last: bool) -> None:
        if not self.visible or self._times is None:
            return
        now = time.monotonic()
        if self._live:
            self._bar.update(self._task, completed=self._step, status=self._status(self._times))
        elif last or now - self._last_print >= PLAIN_SECONDS:
            self._last_print = now
            self._console.print(f"{self.name:>5} {self._status(self._times)}", soft_wrap=True)

    def _status(self, times: StepTimes) -> str:
        left = int((self.steps - self._step) * (self._elapsed_per_step or 0.0))
        parts = [f"{self._step:>{len(str(self.steps))}}/{self.steps}", f"{left // 60}:{left % 60:02d} left"]
        parts.append(f"loss {self._loss:.3f}")
        if self._validation is not None:
            parts.append(f"val {self._validation:.3f}")
        parts.append(f"{_thousands(self.tokens_per_step / times.total)} tok/s")
        name = "fwd+bwd" if self._console.width >= ROOMY or not self._live else "f+b"
        parts.append(f"{name} {_percent(times.forward_backward, times)}")
        parts.append(f"opt {_percent(times.optimizer, times)}")
        if times.communication is not None:
            parts.append(f"comm {_percent(times.communication, times)}")
        return " ".join(parts)


def _percent(part: float, times: StepTimes) -> str:
    return f"{part / times.total:.0%}"


def _thousands(value: float) -> str:
    return f"{value / 1000:.1f}k" if value >= 1000 else f"{value:.0f}"


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else SMOOTHING * old + (1 - SMOOTHING) * new


def _smooth_times(old: StepTimes | None, new: StepTimes) -> StepTimes:
    if old is None:
        return new
    return StepTimes(
        total=_smooth(old.total, new.total),
        forward_backward=_smooth(old.forward_backward, new.forward_backward),
        optimizer=_smooth(old.optimizer, new.optimizer),
        communication=None if new.communication is None else _smooth(old.communication, new.communication),
    )
