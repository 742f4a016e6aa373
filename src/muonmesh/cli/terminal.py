"""Terminal: printing where not every character can be printed, and where nobody reads any more."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import IO, TYPE_CHECKING, Any, TextIO, cast

from muonmesh.files import FULL

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def print_plainly() -> None:
    """Let stdout and stderr print a question mark for what their encoding lacks, instead of raising.

    A stream that was closed before this process began becomes one that goes nowhere. A terminal that says it has no
    columns (``COLUMNS=0``) has rich's default, since rich would print nothing.
    """
    if os.environ.get("COLUMNS", "").isdigit() and int(os.environ["COLUMNS"]) == 0:
        del os.environ["COLUMNS"]
    streams = [stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr)]  # noqa: SIM115
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    sys.stdout, sys.stderr = (cast(TextIO, Lasting(stream)) for stream in streams)


def make_console(*, record: bool = False) -> Console:
    """Return what prints: nothing of it raises, whatever the terminal can print, and whether or not it is there."""
    from rich.console import Console

    return Console(file=cast(IO[str], Lasting(sys.stdout)), highlight=False, markup=False, record=record)


def table_of(headings: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[int] = (0,)) -> Table:
    """Return a table of plain text, whose columns end at the right but for those at ``left``."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def complain(command: str, message: str, *, code: int) -> int:
    """Say on stderr why a command ends, and return its exit code."""
    Lasting(sys.stderr).write(f"{f'muonmesh {command}'.rstrip()}: {message}\n")
    return code


def examples(*lines: str) -> str:
    """Return lines to write, as the end of a help text."""
    return "\n".join(("Examples:", *(f"  {line}" for line in lines)))


class Lasting:
    """A stream that goes on when nobody reads it any more: a terminal was closed, or ``head`` has seen enough.

    That is no reason to end a training. From then on what is written goes nowhere.

    Attributes:
        full: Whether something was lost that somebody will miss, since it went into a file and the disk is full.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream, self.full = stream, False

    def write(self, text: str) -> int:
        """Write, or forget."""
        self._last(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        """Flush, or forget."""
        self._last(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _last(self, call: Callable[..., object], *given: str) -> None:
        """Call, or send what the stream has not written yet and all that follows nowhere: Python flushes it at last."""
        try:
            call(*given)
        except OSError as error:
            self.full = error.errno in FULL
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)
