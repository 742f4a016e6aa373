"""Checkpoint: saves and loads a model and its optimizer, between any layouts, without executing code from files."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muonmesh.checkpoint.save_load import load, save
    from muonmesh.tools.checkpoints.conversion import convert

__all__ = ["convert", "load", "save"]

_LATER = {
    "convert": "muonmesh.tools.checkpoints.conversion",
    "load": "muonmesh.checkpoint.save_load",
    "save": "muonmesh.checkpoint.save_load",
}
"""Public names, each with its module, which is imported at the first use of the name; the optimizer needs none."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)
