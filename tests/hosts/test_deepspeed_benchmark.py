"""The DeepSpeed benchmark's promises: every engine computes the same update, and a refusal is a result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
ELEMENTS = 64 * 96 + 96 * 64 + 32 * 32


def benchmarked(file: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """One stage's figures by contender, of three tiny matrices, and what was printed."""
    command = [sys.executable, "-m", "benchmarks.deepspeed_step", "--shapes", "64x96,96x64,32x32", "--layers", "1"]
    command += ["--rounds", "1", "--warmup", "1", "--json", str(file), *arguments]
    # Compiling DeepSpeed's functions would take longer than everything else.
    env = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}
    run = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert str(file.parent) not in file.read_text()
    (table,) = json.loads(file.read_text())["tables"].values()
    return table["contenders"], run.stdout


@pytest.mark.slow
@pytest.mark.soak
def test_all_engines_make_the_same_update(tmp_path: Path) -> None:
    figures, _ = benchmarked(tmp_path / "deepspeed.json", "--stages", "2", "--contenders", "gram", "fp32")
    assert list(figures) == ["SGD", "muonmesh", "DeepSpeed gram", "muonmesh fp32"]
    for name, figure in figures.items():
        assert figure["problem"] == ""
        assert len(figure["milliseconds"]) == 1
        assert figure["milliseconds"][0] > 0.0
        assert figure["bytes_sent"] >= 2 * 4 * ELEMENTS  # gradients are reduced and weights gathered, whoever steps
        assert figure["bytes_kept"] <= figure["bytes_peak"]
        if name == "SGD":
            assert figure["distances"] == []
        else:
            assert figure["kept_added"] >= 4 * ELEMENTS // 2  # the momentum
            assert len(figure["distances"]) == 3
    for name in (
        "muonmesh",
        "muonmesh fp32",
    ):  # what it says that it sends is what the collectives are given, and flags
        assert 0 < figures[name]["bytes_counted"] <= figures[name]["sent_added"] <= figures[name]["bytes_counted"] + 200
    assert figures["muonmesh"]["ratio"] == 1.0
    assert max(figures["muonmesh"]["distances"]) < 3e-2
    assert max(figures["muonmesh fp32"]["distances"]) < 1e-5
    assert max(figures["DeepSpeed gram"]["distances"]) < 1e-3


@pytest.mark.slow
@pytest.mark.soak
def test_a_refusal_is_a_result(tmp_path: Path) -> None:
    options = ("--stages", "3", "--reduce-scatter", "--contenders", "gram")
    figures, printed = benchmarked(tmp_path / "deepspeed.json", *options)
    assert list(figures) == ["SGD", "muonmesh", "DeepSpeed gram"]
    refused = figures["DeepSpeed gram"]
    assert refused["problem"] == "ValueError: Muon and reduce scatter cannot be used together"
    assert refused["milliseconds"] == []
    assert f"DeepSpeed gram: {refused['problem']}" in printed
    assert max(figures["muonmesh"]["distances"]) < 3e-2
