"""Ranks are forked from a process that has imported Megatron-Core, which takes ten seconds of a core."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import tests.support.workers

# Megatron compiles small functions of its layers, and all ranks would wait for one compiler of C++.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

# Replaces what tests/support/workers.py asks for, before the first ranks are started.
multiprocessing.set_forkserver_preload(
    [tests.support.workers.__name__, "muonmesh.build", "muonmesh.integrations.qk_clip", "tests.megatron.host"]
)


def spawned() -> set[int]:
    """Processes of this run's group that somebody spawned; ranks are forked, so they are none of them."""
    pids = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"multiprocessing.spawn" in (folder / "cmdline").read_bytes() and os.getpgid(int(folder.name)) == GROUP:
                pids.add(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
    return pids


GROUP = os.getpgid(0)


@pytest.fixture(scope="module", autouse=True)
def nothing_left() -> Iterator[None]:
    """A file of tests leaves no process behind, not even one whose parent has gone."""
    before = spawned()
    yield
    assert spawned() - before == set()
