"""Settings that a host hands on: checked against the function that takes them, before anything is built."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from muonmesh.errors import explain_error


def check_settings(
    where: str, settings: Mapping[str, Any], taken_by: Callable[..., Any], *, decided: Collection[str]
) -> None:
    """Check the names of settings that are handed on.

    Args:
        where: What takes them, as messages name it.
        settings: By name.
        taken_by: What they are handed on to.
        decided: Those of its arguments that the host gives.

    Raises:
        TypeError: one is unknown, or the host gives it.
    """
    known = [name for name in inspect.signature(taken_by).parameters if name not in decided]
    for name in settings:
        if name not in known:
            likely = difflib.get_close_matches(name, known, n=1)
            write = f"Write {likely[0]}=" if likely else "Remove it"
            needed = f"one of {', '.join(known)}"
            raise TypeError(explain_error(where, f"the setting {name!r}", needed, write))
