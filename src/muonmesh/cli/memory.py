"""Memory: whether a machine can hold what its ranks have to hold."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from muonmesh.cli.failure import RunError
from muonmesh.cli.settings import Settings

WEIGHT = 4  # bytes: weights, gradients and state are fp32
HELD = 3  # weights, gradients and momentum; AdamW's second moment comes on top
PROCESS = 150 * 10**6  # bytes: Python and torch in each rank, at the very least
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def least_memory(parameters: int, settings: Settings) -> int:
    """Bytes of host memory that the ranks need together, at the least: activations are not counted.

    Each rank builds the whole model before it keeps its part. On GPUs what it keeps is elsewhere.
    """
    copies = settings.ranks
    if settings.device == "cpu":
        copies = max(copies, HELD * (settings.ranks if settings.parallel == "ddp" else 1))
    return copies * WEIGHT * parameters + settings.ranks * PROCESS


def check_memory(parameters: int, settings: Settings, memory: int | None = None) -> None:
    """Make sure that the machine has the memory, its host's or ``memory`` bytes.

    Raises:
        RunError: it has less than the least; the message says how much.
    """
    available = host_memory() if memory is None else memory
    needed = least_memory(parameters, settings)
    if available is not None and needed > available:
        raise RunError(
            f"--model {settings.model}: {parameters / 1e6:,.1f}M parameters on {settings.ranks} ranks need at least "
            f"{needed / 1e9:,.1f} GB; found {available / 1e9:,.1f} GB of memory. "
            "Choose a smaller --model or fewer --ranks"
        )


def host_memory() -> int | None:
    """Bytes of memory that this machine or this container has; None where nobody says."""
    found = []
    with contextlib.suppress(ValueError, OSError, AttributeError):
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for limit in LIMITS:
        with contextlib.suppress(ValueError, OSError):
            found.append(int(Path(limit).read_text()))
    return min((size for size in found if size > 0), default=None)
