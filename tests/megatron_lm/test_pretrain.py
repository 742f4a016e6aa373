"""pretrain_gpt.py trains, saves, and resumes at another TP size, whose vocabulary is padded otherwise.

Megatron-LM's scripts are in no package: ``make test-megatron-lm MEGATRON_LM=/path/to/checkout`` (tag core_v0.16.1),
``make test-megatron-lm-next`` (core_v0.19.0, or main with its own megatron.core in ``PYTHONPATH``).
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

COMMON = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
    --position-embedding-type rope --normalization RMSNorm --hidden-dropout 0 --attention-dropout 0
    --transformer-impl local --attention-backend unfused --no-persist-layer-norm --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion
    --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --use-cpu-initialization
    --distributed-backend gloo --mock-data --tokenizer-type NullTokenizer --vocab-size 130 --split 100,0,0
    --num-workers 0 --make-vocab-size-divisible-by 9 --micro-batch-size 1 --global-batch-size 4
    --train-iters 5 --lr 0.01 --min-lr 0.001
    --lr-decay-style constant --optimizer adam --clip-grad 1.0 --eval-iters 0 --eval-interval 1000 --log-interval 1
    --seed 5 --no-one-logger"""
PADDED = {1: 135, 2: 144}
"""Rows of the output layer by TP size."""

FLAT = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable --bf16"


def pretrain(folder: Path, *runs: str) -> list[tuple[list[int], dict[int, float], str]]:
    """Exit codes, losses by iteration and what the last rank printed, of each run."""
    checkout = os.environ["MEGATRON_LM"]
    later = "async_strategy" in (Path(checkout) / "megatron/training/async_utils.py").read_text()  # than 0.16
    strategy = "--async-strategy mcore" if later else ""  # the other one is in a package for CUDA
    arguments = json.dumps([f"{COMMON} {run} {strategy}".split() for run in runs])
    command = [sys.executable, "-m", "tests.megatron_lm.pretrain", checkout, str(folder), arguments]
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr
    outputs = [(folder / f"{number}.1").read_text() for number in range(len(runs))]
    losses = [{int(i): float(x) for i, x in re.findall(r"iteration +(\d+)/.*?lm loss: (\S+)", log)} for log in outputs]
    return list(zip(json.loads(ran.stdout.splitlines()[-1]), losses, outputs, strict=True))


ASYNC = f"{FLAT} --async-save --use-persistent-ckpt-worker --ckpt-assume-constant-structure"


@pytest.mark.parametrize(
    "how",
    ["", FLAT, ASYNC, "--ckpt-format torch"],
    ids=["torch_dist", "distributed optimizer", "saved while it trains", "torch"],
)
def test_train_save_resume(tmp_path: Path, how: str) -> None:
    """Megatron logs at the second iteration after a resumption the mean of both, so the first is compared."""
    save = f"--tensor-model-parallel-size 2 --save {tmp_path}/saved --save-interval 3 {how}"
    load = f"--load {tmp_path}/saved --ckpt-step 3 {how}"
    others = [] if "ckpt-format" in how else [load]  # that format resumes at its own TP size only
    (codes, whole, log), *resumed = pretrain(
        tmp_path, f"{save} --exit-interval 4", f"{load} --tensor-model-parallel-size 2", *others
    )
    assert codes == [0, 0], log
    for (codes, losses, log), tp in zip(resumed, (2, 1), strict=False):
        assert codes == [0, 0], log
        assert losses.keys() == {4, 5}
        # Rows that nothing has trained have logits near 0, as those of most tokens at the beginning.
        expected = whole[4] + math.log(PADDED[tp] / PADDED[2])
        assert losses[4] == pytest.approx(expected, abs=0 if tp == 2 else 0.01)


def test_a_format_that_cannot_hold_the_state_is_refused_before_training(tmp_path: Path) -> None:
    ((codes, losses, log),) = pretrain(
        tmp_path, f"--ckpt-format torch --use-distributed-optimizer --save {tmp_path}/saved --save-interval 3"
    )
    assert 0 not in codes
    assert not losses
    assert "found ckpt_format='torch'; needed 'torch_dist'" in log


def whole_saves() -> str:
    """Return the option by which one rank of each replica writes a checkpoint; 0.19 has renamed it."""
    settings = Path(os.environ["MEGATRON_LM"]) / "megatron/training/config/training_config.py"
    renamed = settings.is_file() and "--no-ckpt-fully-parallel-save" in settings.read_text()
    return "--no-ckpt-fully-parallel-save" if renamed else "--disable-ckpt-fully-parallel-save"


def test_arguments_about_resuming(tmp_path: Path) -> None:
    """Rates of the checkpoint or of this run, with and without the optimizer's state, and ways to read and write it.

    From 0.19 on Megatron writes a state of its rerun engine that it does not read, which ``raise_all`` forbids.
    """
    load = f"--load {tmp_path}/saved --ckpt-step 3 --lr 0.005 --min-lr 0.0005"
    files = f"--ckpt-fully-parallel-load {whole_saves()} --dist-ckpt-strictness raise_all --disable-gloo-process-groups"
    (codes, whole, log), overridden, kept_run, new, finetuned, read = pretrain(
        tmp_path,
        f"--save {tmp_path}/saved --save-interval 3 --exit-interval 4 --rerun-mode disabled",
        f"{load} --override-opt-param-scheduler",
        f"{load} --use-checkpoint-opt-param-scheduler",
        f"{load} --no-load-optim",
        f"{load} --finetune --no-save-optim --save {tmp_path}/models --save-interval 5",
        f"--load {tmp_path}/saved --ckpt-step 3 {files} --save {tmp_path}/again --save-interval 5",
    )
    assert codes == [0, 0], log
    runs = {"override": (overridden, 0.005), "checkpoint": (kept_run, 0.01), "no optimizer": (new, 0.005)}
    for name, ((codes, losses, log), rate) in {**runs, "read": (read, 0.01)}.items():
        assert codes == [0, 0], log
        assert losses[4] == whole[4], name
        assert {float(rate_text) for rate_text in re.findall(r"learning rate: (\S+)", log)} == {rate}, name
    codes, losses, log = finetuned
    assert codes == [0, 0], log
    assert min(losses) == 1
    assert "learning rate: 5.0" in log


LISTED = "regularization, learning rate and weight decay, checkpointing, mixed precision, distributed, training"
OPTIONS = """
import argparse, json, sys, megatron, megatron.core
from megatron.core.package_info import MAJOR, MINOR
megatron.__path__ = [*megatron.__path__, sys.argv[1] + "/megatron"]
from megatron.training.arguments import add_megatron_arguments
parser = argparse.ArgumentParser(allow_abbrev=False)
add_megatron_arguments(parser)
groups = {g.title: [a.option_strings for a in g._group_actions if a.option_strings] for g in parser._action_groups}
print(json.dumps([(MAJOR, MINOR) > (0, 16), groups]))
"""


def test_every_argument_is_on_the_page() -> None:
    """Of groups that have to do with the optimizer all, of others some, and none that there is not."""
    command = [sys.executable, "-c", OPTIONS, os.environ["MEGATRON_LM"]]
    help_text = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    groups: dict[str, list[list[str]]]
    later, groups = json.loads(help_text.splitlines()[-1])
    page = (Path(__file__).parents[2] / "tests/megatron/arguments.md").read_text()
    absent = "until 0.16" if later else "after 0.16"
    rows = [[cell.strip() for cell in line.split("|")] for line in page.splitlines() if line.startswith("| `--")]
    on_page = {name for row in rows if not row[3].startswith(absent) for name in re.findall(r"`(--[\w-]+)`", row[1])}
    listed = {title.removesuffix(" init"): options for title, options in groups.items()}  # "distributed init" in 0.19
    for title in LISTED.split(", "):
        missing = [names for names in listed[title] if on_page.isdisjoint(names)]
        assert missing == [], title
    assert on_page <= {name for options in groups.values() for names in options for name in names}
