"""`muonmesh audit`: a script runs until its optimizer would step, which is watched; also on two ranks of torchrun."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from muonmesh.tools.cli.app import app

COVERS = (
    "tools.auditing.first_step.audit_script",
    "tools.cli.audit_command.audit",
)

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
import torch, muonmesh
from torch.distributed.fsdp import fully_shard
import helper

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.up, self.head = (
            torch.nn.MultiheadAttention(16, 2), torch.nn.Linear(16, 24), torch.nn.Linear(24, 8)
        )

    def forward(self, x):
        return self.head(self.up(self.attn(x, x, x)[0]))

class Trainer:
    def __init__(self, kind):
        torch.manual_seed(0)
        self.net = Net()
        if "sharded" in kind:
            torch.distributed.init_process_group("gloo")
            fully_shard(self.net)
        matrices = [self.net.up.weight, self.net.attn.in_proj_weight]
        rest = [p for p in self.net.parameters() if all(p is not matrix for matrix in matrices)]
        self.optimizers = {
            "ours": lambda: [muonmesh.from_model(self.net)],
            "adamw": lambda: [torch.optim.AdamW(self.net.parameters())],
            "sharded": lambda: [torch.optim.Muon(matrices)],
        }.get(kind, lambda: [torch.optim.AdamW(rest), torch.optim.Muon(matrices, lr=0.02)])()

    def train(self):
        for step in range(10**9):
            self.net(torch.randn(4, 3, 16)).square().mean().backward()
            for optimizer in self.optimizers:
                try:
                    optimizer.step()
                except Exception as error:
                    raise SystemExit(f"swallowed {error}")

if __name__ == "__main__":
    kind = sys.argv[-1]
    if kind == "fails":
        raise RuntimeError("of the script")
    if kind == "early":
        sys.exit(0)
    if kind == "loose":
        torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]).step()
    if kind == "without_numbers":
        net = Net().to("meta")
        muonmesh.from_model(net).step()
    print("arguments", sys.argv[1:])
    try:
        Trainer(kind).train()
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("")
    path = tmp_path / f"train_{tmp_path.name}.py"
    path.write_text(SCRIPT)
    return path


def run_audit(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["audit", *arguments])


def test_a_report_and_an_exit_code(script: Path) -> None:
    result = run_audit(str(script), "ours")
    assert result.exit_code == 0, result.output
    assert "Nothing to mend if the guesses are right." in result.stdout
    result = run_audit("--json", str(script), "adamw")
    assert result.exit_code == 1
    rows = {row["weight"]: row for row in json.loads(result.stdout)["rows"]}
    assert rows["up.weight"]["verdict"] == "elementwise"
    assert rows["up.weight"]["size"] is None


@pytest.mark.parametrize(("name", "message"), [("train.py", "found nothing there"), ("", "found a folder")])
def test_what_is_no_script_is_told(name: str, message: str, tmp_path: Path) -> None:
    result = run_audit(str(tmp_path / name))
    assert result.exit_code == 2
    assert f"muonmesh audit: {tmp_path / name}: {message}; needed a training script. Write muonmesh audit train.py" in (
        result.stderr.replace("\n", "")
    )


def test_options_after_the_script_are_the_scripts(script: Path) -> None:
    """--json, -m and --help were the command's wherever they stood, so a script with such options got none."""
    theirs = ["--lr", "1", "--json", "-m", "gpt", "--help"]
    result = run_audit(str(script), *theirs)
    assert f"arguments {theirs}" in result.stderr
    assert "what happens to it" in result.stdout
    refused = run_audit("--lr", "1", str(script))
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "--lr" in refused.stderr


def test_a_module_runs_as_python_m_runs_it(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script with relative imports cannot be run as a file."""
    package = script.parent / f"package_{script.stem}"
    package.mkdir()
    for name, text in {
        "__init__": "",
        "helper": "",
        "train": SCRIPT.replace("import helper", "from . import helper"),
    }.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.chdir(script.parent)
    result = run_audit("--json", "-m", f"{package.name}.train", "--lr", "1", "ours")
    assert "arguments ['--lr', '1', 'ours']" in result.stderr
    assert json.loads(result.stdout)["ok"]
    assert run_audit(str(package / "train.py"), "ours").exit_code == 2
    missing = run_audit("-m", f"{package.name}.missing")
    assert (missing.exit_code, missing.stdout) == (2, "")
    assert f"No module named {package.name}.missing" in missing.stderr


def test_a_script_runs_until_its_first_step(script: Path) -> None:
    result = run_audit("--json", str(script), "--lr", "1")
    assert "arguments ['--lr', '1']" in result.stderr
    report = json.loads(result.stdout)
    assert report["optimizer"] == "torch.optim.adamw.AdamW and torch.optim.Muon"
    by_weight = {row["weight"]: (row["verdict"], row["gradient"] > 0) for row in report["rows"]}
    assert by_weight["up.weight"] == ("orthogonalized", True)
    assert by_weight["up.bias"] == ("elementwise", True)
    assert len(by_weight) == 8


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("early", r"the script called sys.exit\(0\) before a torch.optim.Optimizer stepped"),
        ("loose", "SGD: no torch.nn.Module holds its parameters"),
    ],
)
def test_scripts_that_show_no_step(script: Path, kind: str, message: str) -> None:
    result = run_audit(str(script), kind)
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.search(rf"{message}.*Write print\(muonmesh\.audit\(optimizer, model\)\)", result.stderr)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("fails", "Traceback .*RuntimeError: of the script"),
        ("without_numbers", "^muonmesh audit: .* on the meta device"),
    ],
)
def test_an_error_has_not_the_exit_code_of_something_to_mend(script: Path, kind: str, message: str) -> None:
    result = run_audit(str(script), kind)
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.search(message, result.stderr, re.DOTALL)


SMALL = """
import sys, torch
net, probe = torch.nn.Sequential(torch.nn.Linear(8, 6)), torch.nn.Linear(6, 4)
optimizer = torch.optim.AdamW([*net.parameters(), *probe.parameters()])
def step():
    probe(net(torch.randn(4, 8))).square().mean().backward()
    optimizer.step()
    print("trained")
"""
ENDINGS = {
    "goes on": "for _ in range(2):\n    try:\n        step()\n    except:\n        pass",
    "exits": "try:\n    step()\nexcept BaseException:\n    sys.exit(3)",
    "raises": "try:\n    step()\nfinally:\n    print(loss)",
    "compiles its step": "torch.compile(step, backend='eager')()",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_however_a_script_ends_after_its_first_step_there_is_a_report(ending: str, tmp_path: Path) -> None:
    """Scripts that caught the exception trained on, or were said to have taken no step, or ended in a traceback."""
    path = tmp_path / "train.py"
    path.write_text(SMALL + ENDINGS[ending])
    result = run_audit("--json", str(path))
    assert result.exit_code == 1, result.stderr
    assert json.loads(result.stdout)["optimizer"] == "torch.optim.adamw.AdamW"
    assert "trained" not in result.stderr


def test_each_of_several_models_of_an_optimizer_is_in_the_report(tmp_path: Path) -> None:
    """Only the model with the most weights was, and nothing said so."""
    path = tmp_path / "train.py"
    path.write_text(SMALL + "step()")
    names = [row["weight"] for row in json.loads(run_audit("--json", str(path)).stdout)["rows"]]
    assert names == ["Sequential.0.weight", "Sequential.0.bias", "Linear.weight", "Linear.bias"]


def on_two_ranks(*target: str) -> subprocess.CompletedProcess[str]:
    code = "from muonmesh.tools.cli import main; main()"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [*torchrun, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", sys.executable, "-c", code]
    return subprocess.run([*command, "audit", *target], capture_output=True, text=True, timeout=240, env=environment)


@pytest.mark.slow
def test_two_ranks_of_torchrun_print_one_report(script: Path) -> None:
    run = on_two_ranks(str(script), "sharded")
    assert run.stdout.count("torch.optim.Muon, 2 ranks") == 1, run.stderr
    assert "as one matrix" in run.stdout
    assert "not in the optimizer" in run.stdout
    assert "found no process group on 2 ranks" in on_two_ranks(str(script), "ours").stderr
    run = on_two_ranks(str(script), "both sharded")
    assert run.stdout.count("AdamW and torch.optim.Muon, 2 ranks") == 1, run.stderr
    assert re.search(r"\nup\.weight +24x16  orthogonalized", run.stdout), run.stdout
