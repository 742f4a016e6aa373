"""Settings of files and command lines, in which a dtype can only be its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_DTYPES = ("compute_dtype", "state_dtype", "master_dtype")


def with_dtypes(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in which dtypes may stand by name, such as "float32", as those of a file or command line do.

    A wrong name stays what it is, and the optimizer tells of it; "int8" is no dtype but a way to keep momentum.
    """
    named = {key: settings[key] for key in _DTYPES if settings.get(key, "int8") != "int8"}
    return {**settings, **{key: getattr(torch, str(value), value) for key, value in named.items()}}
