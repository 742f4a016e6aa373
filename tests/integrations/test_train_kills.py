"""`muonmesh train` and kill -9: what goes on is what would have been, and nothing is left behind."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from muonmesh.cli.corpus import standard_library


def killed(folder: Path, *options: object) -> dict[str, Any]:
    (folder / "text").mkdir()
    for file in sorted(standard_library(), key=lambda path: path.name)[:24:2]:
        shutil.copy(file, folder / "text" / f"{file.parent.name}-{file.name}")
    command = [sys.executable, "-m", "tests.kills", str(folder), *map(str, options)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3600)
    assert result.returncode == 0, result.stderr[-4000:]
    outcome: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    print(json.dumps(outcome, indent=2))
    return outcome


NOTHING = {"processes": 0, "zombies": 0, "ports": 0, "locks": 0, "files": [], "temporary": []}


@pytest.mark.slow
@pytest.mark.soak
def test_a_hundred_kills_change_no_bit_and_leave_nothing(tmp_path: Path) -> None:
    outcome = killed(tmp_path, "--kills", 100)
    assert outcome["exit"] == 0
    assert outcome["left"] == NOTHING
    assert outcome["apart"] == 0.0, "bit for bit, at the same number of ranks"
    assert outcome["kills"] == 100
    assert any("while saving" in what for what in outcome["killed"])
    assert outcome["slowest_end"] < 30


@pytest.mark.slow
@pytest.mark.soak
def test_restarts_with_other_numbers_of_ranks_lose_nothing(tmp_path: Path) -> None:
    outcome = killed(tmp_path, "--kills", 12, "--steps", 60, "--ranks", 2, 1, 4)
    assert outcome["exit"] == 0
    assert outcome["left"] == NOTHING
    assert outcome["apart"] < 1e-3, "sums over other numbers of ranks round otherwise"
