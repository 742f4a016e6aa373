"""Arguments: settings from files and command lines, which can give a dtype only by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_DTYPES = ("compute_dtype", "state_dtype", "master_dtype")


def with_dtypes(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in which each name of a dtype, such as "float32", is replaced by the torch dtype.

    A wrong name stays a string, so that the optimizer raises an error that names it. "int8" stays a string too: it is a
    storage format of momentum with scales, not a torch dtype.
    """
    named = {key: settings[key] for key in _DTYPES if settings.get(key, "int8") != "int8"}
    return {**settings, **{key: getattr(torch, str(value), value) for key, value in named.items()}}
