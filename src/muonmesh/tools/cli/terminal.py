"""Terminal: prints without raising, also if the terminal lacks characters or has been closed."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import sys
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any, TextIO, cast

from muonmesh.errors import escaped
from muonmesh.files import FULL

if TYPE_CHECKING:
    from rich.console import Console


def print_plainly() -> None:
    """Make stdout and stderr print a question mark for characters that their encoding lacks, instead of raising.

    A stream that was closed before this process began is replaced by os.devnull. With ``COLUMNS=0``, rich would print
    nothing, so the variable is removed and rich uses its default width.
    """
    if os.environ.get("COLUMNS", "").isdigit() and int(os.environ["COLUMNS"]) == 0:
        del os.environ["COLUMNS"]
    streams = [stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr)]  # noqa: SIM115
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    sys.stdout, sys.stderr = (cast(TextIO, Lasting(stream)) for stream in streams)


def make_console() -> Console:
    """Return a console for stdout that never raises, also if the terminal lacks characters or has been closed."""
    from rich.console import Console

    return Console(file=cast(IO[str], Lasting(sys.stdout)), highlight=False, markup=False)


def say(*lines: str, style: str = "") -> None:
    """Print lines without wrapping them. Control characters and line breaks inside a line are escaped."""
    make_console().print("\n".join(map(escaped, lines)), style=style, soft_wrap=True)


def say_json(value: Any) -> None:
    """Print plain data as JSON."""
    say(*json.dumps(value, indent=1).split("\n"))


def complain(command: str, *lines: str, code: int) -> int:
    """Print on stderr why a command ends, as `say` does, and return its exit code."""
    note(f"{f'muonmesh {command}'.rstrip()}: {lines[0]}", *lines[1:])
    return code


def note(*lines: str) -> None:
    """Print lines on stderr, as `say` does."""
    Lasting(sys.stderr).write("\n".join((*map(escaped, lines), "")))


def shell_line(*words: object) -> str:
    """Return a command of muonmesh as a line to write in a shell: paths with spaces or quotes are quoted."""
    return shlex.join(["muonmesh", *map(str, words)])


def examples(*lines: str) -> str:
    """Return command lines as a section of examples, for the end of a help text."""
    return "\n".join(("Examples:", *(f"  {line}" for line in lines)))


class Lasting:
    """A stream that never raises if its reader is gone, for example a closed terminal or an ended ``head``.

    A training must not end for this reason. After such an error, further output is discarded.

    Attributes:
        full: Whether output was lost because the stream is a file and the disk is full.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream, self.full = stream, False

    def write(self, text: str) -> int:
        """Write the text, or discard it."""
        self._last(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream, or discard its buffer."""
        self._last(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _last(self, call: Callable[..., object], *arguments: str) -> None:
        """Call a method of the stream; on an OSError, redirect the stream's file descriptor to os.devnull.

        The redirection also discards the buffer that Python flushes at its end.
        """
        try:
            call(*arguments)
        except OSError as error:
            self.full = error.errno in FULL
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)
