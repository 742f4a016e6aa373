"""Disks: file systems that are full or cannot be written, real ones, made and removed by a test."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(mount_point: Path, *, megabytes: int = 4) -> Iterator[Path]:
    """A file system of that size; where mounting is not permitted, the test says so and is skipped."""
    mount_point.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", mount_point], check=False, capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"mounting is not permitted here: {mounted.stderr.decode().strip()}")
    try:
        yield mount_point
    finally:
        subprocess.run(["umount", mount_point], check=True)


@contextmanager
def read_only(disk: Path) -> Iterator[None]:
    """A mounted file system that nobody can write for a while, root neither."""
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)


@contextmanager
def read_only_for_new_files(disk: Path) -> Iterator[None]:
    """A mounted file system in which nothing is opened for writing for a while, though files are open for it now."""
    subprocess.run(["mount", "--bind", disk, disk], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", disk], check=True)
        yield
    finally:
        subprocess.run(["umount", disk], check=True)
