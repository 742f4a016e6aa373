"""Version: what ``muonmesh --version`` prints."""

from __future__ import annotations

import platform
from importlib.metadata import version


def versions() -> str:
    """Return the versions of the package and of what decides its bits, without importing torch."""
    return f"muonmesh {version('muonmesh')} (torch {version('torch')}, Python {platform.python_version()})"
