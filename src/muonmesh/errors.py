"""The errors and warnings a user can meet.

A message says what it is about (a parameter, group, argument or file), what was found, what is needed and what to
write. `explain_error` composes these four parts; `about` takes full sentences instead.
"""

from __future__ import annotations

import contextlib
import re
import sys
import warnings
from collections.abc import Iterator
from contextvars import ContextVar

_CONTROLS = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)
"""What a terminal obeys instead of showing it: control characters, line breaks, direction marks, characters without a
width, and what is no character. Names in files and models may have them."""

_calling: ContextVar[str | None] = ContextVar("calling", default=None)


class MuonMeshError(Exception):
    """Base class of the errors that muonmesh defines. Wrong arguments raise a plain ValueError or TypeError."""

    def __str__(self) -> str:
        """Return the message with control characters escaped."""
        return escaped(super().__str__())


class LayoutError(MuonMeshError, ValueError):
    """A parameter or gradient is held in a way that cannot be mapped to whole matrices."""


class PlanError(MuonMeshError, RuntimeError):
    """The ranks disagree about which rank orthogonalizes which matrix, or another rank found an error."""


class StateError(MuonMeshError, RuntimeError):
    """Optimizer state does not fit the parameters or the settings it is loaded into."""


class NotCovered(LayoutError):
    """Elements are held twice or by no rank. The message is what was found; the caller adds the parameter's name."""


class FileError(MuonMeshError, ValueError):
    """A file or a folder that could not be read or written, or that holds something else than is needed."""


def escaped(text: str) -> str:
    r"""Return a text with escapes such as ``\x1b`` in place of all characters that a terminal would obey.

    Of a text of more than 4,000 characters, the middle is left out: files may have names and values of any length.
    """
    if len(text) > 4000:
        text = f"{text[:2000]} ... {text[-1000:]}"
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


@contextlib.contextmanager
def calling(function: str) -> Iterator[None]:
    """Return a context in which `called` returns the name of the function that the user called, the outermost one."""
    token = _calling.set(_calling.get() or function)
    try:
        yield
    finally:
        _calling.reset(token)


def called(function: str) -> str:
    """Return the name of the public function that the user called, for messages; ``function`` if no other called it."""
    return _calling.get() or function


def explain_error(parameter: str, fault: str, needed: str, write: str | None = None) -> str:
    """Compose a message of four parts; no part ends in a full stop.

    Args:
        parameter: The parameter, group or argument that the message is about.
        fault: The value or state that was found.
        needed: The value or state that is needed.
        write: The line to write, a sentence; None if ``needed`` already says it.
    """
    return escaped(f"{parameter}: found {fault}; needed {needed}" + ("" if write is None else f". {write}"))


def about(subject: str, error: Exception | str) -> str:
    """Return a message or another error with its subject (parameter, group, argument or file) in front."""
    return escaped(f"{subject}: {error}")


def warn(message: str) -> None:
    """Warn at the line of the user's program from which this package was called.

    Torch wraps `step`, and schedulers wrap it once more, so the number of calls in between is unknown. All calls of
    torch, of this package and of decorators are skipped.
    """
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in ("muonmesh", "torch", "contextlib"):
            break
        level, frame = level + 1, frame.f_back
    warnings.warn(escaped(message), stacklevel=level + 1)
