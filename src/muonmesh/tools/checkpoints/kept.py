"""Kept checkpoints: the order of several checkpoints in one folder, and which of them stay.

The order follows from the numbers in their names, never from clocks.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from pathlib import Path

from muonmesh.checkpoint.manifest import read_manifest
from muonmesh.checkpoint.place import before_at, check_replaceable, foreign_at, found_at, lock_folder, remove_folder
from muonmesh.errors import FileError

NUMBERED = re.compile(r"(?P<family>.*?)(?P<number>\d+)", re.DOTALL)


def numbered(directory: Path, family: str) -> list[tuple[int, Path]]:
    """Return number and path of all entries named ``family`` plus a number, the highest number first.

    Checkpoints whose replacement was interrupted are included.
    """
    found: dict[int, Path] = {}
    for name in os.listdir(directory) if directory.is_dir() else ():
        inner = name.removeprefix(".").removesuffix(".before") if name.endswith(".before") else name
        match = NUMBERED.fullmatch(inner)
        if match is not None and match["family"] == family:
            found[int(match["number"])] = directory / inner
    return sorted(found.items(), reverse=True)


def is_whole(folder: Path) -> bool:
    """Return whether every file of the manifest exists with its full size; contents are not read."""
    try:
        entries = read_manifest(folder)
        found = {name: os.stat(folder / name, follow_symlinks=False) for name in entries}
    except (OSError, FileError):
        return False
    return all(stat.S_ISREG(one.st_mode) and one.st_size == entries[name][0] for name, one in found.items())


def forget_older(path: Path, keep: int) -> None:
    """Remove old checkpoints whose names differ from ``path`` only in the final number; keep the newest ones.

    Only complete checkpoints count for ``keep``. Checkpoints with a higher number are removed: they belong to an
    abandoned continuation of the run. Folders with other files in them stay, and folders that cannot be removed.

    Args:
        path: The checkpoint that has just been written; it always stays.
        keep: The number of checkpoints to keep, ``path`` included.
    """
    own = NUMBERED.fullmatch(path.name)
    if own is None:
        return
    kept = 1
    for number, other in numbered(path.parent, own["family"]):
        if other == path or found_at(other).is_symlink():
            continue
        if number < int(own["number"]) and kept < keep and is_whole(found_at(other)):
            kept += 1
            continue
        with contextlib.suppress(OSError, FileError):
            check_replaceable(other)
            for folder in (other, before_at(other)):
                remove_folder(folder)
    for scratch in sorted(path.parent.glob(".*.writing")):
        inner = NUMBERED.fullmatch(scratch.name.removeprefix(".").removesuffix(".writing"))
        if inner is not None and inner["family"] == own["family"]:
            with contextlib.suppress(OSError):
                if not foreign_at(scratch) and (held := lock_folder(scratch, make=False)) is not None:
                    shutil.rmtree(scratch, ignore_errors=True)
                    os.close(held)
