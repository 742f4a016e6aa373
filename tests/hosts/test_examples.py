"""The scripts in `examples/` run as they are, from an empty folder."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts.world import launched

EXAMPLES = Path(__file__).parents[2] / "examples"


SAID = [
    ("trainer", "learning_rate/muon"),
    ("trl_sft", "muon/update_rms"),
    ("lightning_module", "muon/update_to_weight"),
    ("fabric_loop", "update to weight 0."),
]


@pytest.mark.parametrize(("name", "said"), SAID)
def test_a_script_trains(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = EXAMPLES / f"{name}.py"
    assert len(script.read_text().splitlines()) <= 60
    monkeypatch.chdir(tmp_path)
    with launched():
        runpy.run_path(str(script), run_name="__main__")
    logged = "".join(path.read_text() for path in tmp_path.rglob("metrics.csv"))  # Lightning's
    assert said in capsys.readouterr().out + logged


def test_a_script_under_accelerates_launcher(tmp_path: Path) -> None:
    script = EXAMPLES / "accelerate_loop.py"
    assert len(script.read_text().splitlines()) <= 60
    launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes=2", "--num_machines=1"]
    command = [sys.executable, *launch, "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    found = subprocess.run(
        [*command, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 0, found.stderr[-3000:]
    assert "skipped False" in found.stdout
    assert (tmp_path / "saved" / "optimizer.bin").exists()
