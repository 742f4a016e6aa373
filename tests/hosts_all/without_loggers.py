"""Stand-ins for packages that RL frameworks import on every start and that no training step calls: loggers and servers.

They are dozens of heavy packages. What is asked of them is a mock; only what is not installed is replaced.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import ClassVar
from unittest.mock import MagicMock

PACKAGES = ("mlflow", "swanboard", "swanlab", "tensorboardX", "trackio", "wandb")


class _StandIn(ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> MagicMock:
        return MagicMock()


for package in PACKAGES:
    if importlib.util.find_spec(package) is None:
        sys.modules[package] = stand_in = _StandIn(package)
        stand_in.__spec__ = ModuleSpec(package, None)
