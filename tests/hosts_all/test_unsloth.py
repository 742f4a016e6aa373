"""unsloth's own CPU backend: its model, its LoRA and its trainer, with MuonFactory, have the bits of a plain loop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(("kind", "matrices", "trained"), [([], 14, 21), (["lora"], 12, 12)], ids=["whole", "lora"])
def test_its_trainer_is_a_plain_loop(tmp_path: Path, kind: list[str], matrices: int, trained: int) -> None:
    environment = {"UNSLOTH_FORCE_CPU": "1", "UNSLOTH_DISABLE_STATISTICS": "1", "HF_HUB_OFFLINE": "1"}
    folders = str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    process = subprocess.run(
        [sys.executable, "-m", "tests.hosts_all.unsloth_run", str(tmp_path), *kind],
        env=os.environ | environment,
        cwd=tmp_path,  # unsloth writes its trainers into the current folder
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    result = json.loads(process.stdout.splitlines()[-1])
    assert result["muon"]
    assert (result["matrices"], result["steps"]) == (matrices, 3)
    assert result["moved"] == result["of"] == trained
    assert result["plain loop"] == []
