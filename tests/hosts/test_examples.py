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


TWO = {
    "accelerate_loop": ("trained by 2 processes", "saved/optimizer.bin"),
    "trainer": ("trained by 2 processes", "trained/checkpoint-8/optimizer.pt"),
    "lightning_module": ("Starting with 2 processes", "logs/lightning_logs/version_0/metrics.csv"),
    "fabric_loop": ("Starting with 2 processes", "saved.ckpt"),
}


@pytest.mark.parametrize("name", TWO)
def test_a_script_that_says_two_processes_runs_two(name: str, tmp_path: Path) -> None:
    """As its first lines say."""
    script = EXAMPLES / f"{name}.py"
    assert len(script.read_text().splitlines()) <= 60
    said, left = TWO[name]
    assert f"torchrun --nproc-per-node 2 examples/{name}.py" in script.read_text()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [*command, "--rdzv-endpoint", "127.0.0.1:0", str(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    assert said in found.stdout + found.stderr
    assert (tmp_path / left).exists()


def test_the_script_for_torchtitan_on_its_command_line(tmp_path: Path) -> None:
    """In a process that has imported `tests.hosts.titan` first, which says what a CPU needs."""
    script = EXAMPLES / "torchtitan_muon.py"
    assert len(script.read_text().splitlines()) <= 60
    start = f"import runpy, tests.hosts.titan; runpy.run_path({str(script)!r}, run_name='__main__')"
    command = [sys.executable, "-c", start, "--module", "tests.hosts.titan", "--config", "small"]
    paths = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    environment = os.environ | world | {"PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo"}
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr[-3000:]
    (events,) = tmp_path.rglob("events.out.tfevents*")
    assert b"muon/muon/update_to_weight" in events.read_bytes()
    assert (tmp_path / "checkpoint" / "step-6").is_dir()
