"""The scripts in `examples/` run as they are, from an empty folder."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tests.hosts.world import launched

EXAMPLES = Path(__file__).parents[2] / "examples"


SAID = [
    ("trainer", "learning_rate/muon"),
    ("trl_sft", "muon/update_rms"),
    ("lightning_module", "muon/update_to_weight"),
    ("fabric_loop", "update to weight 0."),
]


@pytest.mark.parametrize(("name", "words"), SAID)
def test_a_script_trains(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = EXAMPLES / f"{name}.py"
    assert len(script.read_text().splitlines()) <= 60
    monkeypatch.chdir(tmp_path)
    with launched():
        runpy.run_path(str(script), run_name="__main__")
    logged = "".join(path.read_text() for path in tmp_path.rglob("metrics.csv"))  # Lightning's
    assert words in capsys.readouterr().out + logged


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
    words, output = TWO[name]
    assert f"torchrun --nproc-per-node 2 examples/{name}.py" in script.read_text()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*command, "--rdzv-endpoint", "127.0.0.1:0", str(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert words in run.stdout + run.stderr
    assert (tmp_path / output).exists()


def assets(folder: Path) -> None:
    """Write a tokenizer and a text where torchtitan's debug Llama looks for them: Python's own source, nothing else."""
    texts = [path.read_text() for path in sorted(Path(json.__file__).parent.glob("*.py"))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = pre_tokenizers.ByteLevel.alphabet()
    special = {"bos_token": "<bos>", "eos_token": "<eos>"}
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=list(special.values()), initial_alphabet=letters, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    for name in ("tokenizer", "c4_test"):
        (folder / "tests/assets" / name).mkdir(parents=True)
    tokenizer.save(str(folder / "tests/assets/tokenizer/tokenizer.json"))
    (folder / "tests/assets/tokenizer/tokenizer_config.json").write_text(json.dumps(special))
    (folder / "tests/assets/c4_test/text.json").write_text("\n".join(json.dumps({"text": text}) for text in texts))


TITAN = """--module llama3 --config llama3_debugmodel --training.seq_len 32 --training.local_batch_size 2
    --training.mixed_precision_param float32 --training.disable_cuda_graphs --parallelism.spmd_backend partial_dtensor
    --validator.no-enable --checkpoint.enable --checkpoint.interval 2 --metrics.enable_tensorboard"""


def titan(folder: Path, ranks: int, run: str, *arguments: str) -> str:
    """What torchtitan's command line prints, in processes that have imported `tests.hosts.titan`, as a CPU needs."""
    start = ["-c", f"import runpy, tests.hosts.titan; {run}", *TITAN.split(), *arguments]
    paths = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = [sys.executable, *start]
    if ranks > 1:
        launch = f"-m torch.distributed.run --nproc-per-node {ranks} --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0"
        command, world = [sys.executable, *launch.split(), "--no-python", sys.executable, *start], {}
    result = subprocess.run(
        command, cwd=folder, env=environment | world, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
    return result.stdout + result.stderr


def test_torchtitan_s_command_line_and_the_script_for_it(tmp_path: Path) -> None:
    """Two ranks train and save as docs/hosts.md says, and the script does in one process."""
    assets(tmp_path)
    module = "muonmesh.integrations.torchtitan"
    overrides = ["--override.imports", f'{module}.muon={{"lr": 8e-4, "weight_decay": 0.1}}', f"{module}.metrics"]
    run = "runpy.run_module('torchtitan.train', run_name='__main__')"
    printed = titan(tmp_path, 2, run, "--training.steps", "2", *overrides)
    assert "Loading tokenizer from tokenizer.json" in printed
    assert "Applying FSDP" in printed or "Applied FSDP" in printed
    script = EXAMPLES / "torchtitan_muon.py"
    assert len(script.read_text().splitlines()) <= 60
    run = f"runpy.run_path({str(script)!r}, run_name='__main__')"
    titan(tmp_path, 1, run, "--training.steps", "1", "--dump_folder", "one")
    assert (tmp_path / "outputs/checkpoint/step-2").is_dir()
    assert (tmp_path / "one/checkpoint/step-1").is_dir()
    for events in tmp_path.rglob("events.out.tfevents*"):
        assert b"muon/muon/momentum_rms" in events.read_bytes()
