"""Ranks that leave as ordinary scripts do, by the interpreter's own end, end with 0."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack

import pytest


@pytest.mark.soak
@pytest.mark.parametrize("end", ["keep", "destroy"])
@pytest.mark.parametrize("kind", ["torch", "muonmesh"])
def test_200_ranks_leave_under_load(kind: str, end: str) -> None:
    """After a few steps of Muon, and after plain torch's collectives to compare: an abort of both would be torch's."""
    with ExitStack() as stack:
        for _ in range(2 * (os.cpu_count() or 1)):
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(busy.wait)
            stack.callback(busy.kill)
        command = [sys.executable, "-m", "tests.exits", kind, "200", "2,3,4", end]
        found = subprocess.run(command, capture_output=True, text=True, timeout=1800.0, check=False)
    print(found.stdout)
    assert found.returncode == 0, found.stdout + found.stderr
    assert ": 200 exits" in found.stdout, found.stdout
    assert "ended with" not in found.stdout, found.stdout
