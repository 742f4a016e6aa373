"""Zero: a DeepSpeed checkpoint's optimizer state, put together from the files of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_zero(folder: Path) -> tuple[list[Mapping[str, Any]], dict[Any, Mapping[str, Any]]]:
    """Not yet."""
    raise NotImplementedError(folder)
