"""Integrations: muonmesh inside other training frameworks, one module or folder for each framework, and QK-clip."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any


def __getattr__(name: str) -> Any:
    """Import an integration at its first use: messages say what to write as ``muonmesh.integrations.fsdp1...``."""
    if name.startswith("_") or importlib.util.find_spec(f"{__name__}.{name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
