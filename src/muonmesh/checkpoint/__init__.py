"""Checkpoint: a model's and its optimizer's state, written so that any layout can read it and nothing can execute."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muonmesh.checkpoint.conversion import convert
    from muonmesh.checkpoint.save_load import load, save

__all__ = ["convert", "load", "save"]

_LATER = {"convert": "conversion", "load": "save_load", "save": "save_load"}
"""Public names by the file that has them, which is imported when they are asked for: the optimizer needs none."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
