"""Settings that a host hands on: checked against the function that takes them, before anything is built."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from muonmesh.errors import explain_error
from muonmesh.settings import TORCHS_NAMES

_DTYPES = ("compute_dtype", "state_dtype", "master_dtype")


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
    taken = inspect.signature(taken_by).parameters.values()
    known = [each.name for each in taken if each.kind is not each.VAR_KEYWORD and each.name not in decided]
    for name in settings:
        if name not in known and name not in TORCHS_NAMES:
            likely = difflib.get_close_matches(name, known, n=1)
            write = f"Write {likely[0]}=" if likely else "Remove it"
            needed = f"one of {', '.join(known)}"
            raise TypeError(explain_error(where, f"the setting {name!r}", needed, write))


def with_dtypes(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in which dtypes may stand by name, such as "float32", as those of a file or command line do.

    A wrong name stays what it is, and the optimizer tells of it; "int8" is no dtype but a way to keep momentum.
    """
    named = {key: settings[key] for key in _DTYPES if settings.get(key, "int8") != "int8"}
    return {**settings, **{key: getattr(torch, str(value), value) for key, value in named.items()}}
