"""Ranks that leave as ordinary scripts do, by the interpreter's own end, end with 0."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack

import pytest


@pytest.mark.soak
def test_threads_of_gloo_let_go_before_the_end() -> None:
    """On CPython 3.11, 5 to 8 of 48 of plain torch's ranks abort: `python -m tests.support.exits torch 48 2,4 keep`."""
    ends_well("muonmesh", 9, "keep")


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "end"), [("torch", "destroy"), ("muonmesh", "keep"), ("muonmesh", "destroy")])
def test_200_ranks_leave_under_load(kind: str, end: str) -> None:
    """After a few steps of Muon, and after plain torch's collectives to compare: an abort of both would be torch's."""
    with ExitStack() as stack:
        for _ in range(2 * (os.cpu_count() or 1)):
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(busy.wait)
            stack.callback(busy.kill)
        ends_well(kind, 200, end)


def ends_well(kind: str, exits: int, end: str) -> None:
    command = [sys.executable, "-m", "tests.support.exits", kind, str(exits), "2,3,4", end]
    process = subprocess.run(command, capture_output=True, text=True, timeout=1800.0, check=False)
    print(process.stdout)
    assert process.returncode == 0, process.stdout + process.stderr
    assert " exits of [2, 3, 4] ranks" in process.stdout, process.stdout
    assert "ended with" not in process.stdout, process.stdout
