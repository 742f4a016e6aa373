"""`muonmesh train` and a checkpoint that is damaged, acts, or cannot be written: every rank says the same sentence."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from typer.testing import CliRunner

import muonmesh as mm
from muonmesh.checkpoint.manifest import MANIFEST_FILE, read_manifest
from muonmesh.errors import FileError
from muonmesh.tools.cli.app import app
from muonmesh.tools.cli.checkpoints import Checkpoints, checkpoints_of
from muonmesh.tools.cli.corpus import load_corpus_of
from muonmesh.tools.cli.model import check_parameters, parallelise
from muonmesh.tools.cli.run_settings import Settings, load_settings
from muonmesh.tools.cli.training import StopRequest, Training, require_equal_values
from tests.support.folders import forge
from tests.support.workers import Pool

COVERS = ("tools.cli.checkpoints.Checkpoints",)

RANKS = 2
STEP = 4
SETTINGS = {"optimizer": "muon", "ranks": RANKS, "steps": STEP, "vocab": 300, "eval_every": 2, "checkpoint_every": 2}


def sharded_after_step(value: float) -> tuple[torch.nn.Module, mm.Muon]:
    """A model and its optimizer after a step; each rank holds a part, in a file of its own."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64, bias=False))
    for number, parameter in enumerate(model.parameters()):
        torch.nn.init.constant_(parameter, value + number)
        fully_shard(model[number])
    fully_shard(model)
    optimizer = mm.Muon(mm.split_params(model, overrides={"1.weight": "adamw", "0.weight": "muon"}))
    model(torch.arange(64.0)).sum().backward()
    optimizer.step()
    return model, optimizer


def save_small(directory: Path) -> None:
    Checkpoints(directory).save(STEP, *sharded_after_step(1.0))


def load_small(directory: Path) -> tuple[str, bool]:
    """What this rank says when it loads, and whether what it loads into is as it was."""
    (model, optimizer), message = sharded_after_step(0.0), ""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    try:
        Checkpoints(directory).load(STEP, model, optimizer)
    except FileError as error:
        message = str(error)
    return message, all(map(_equal, before, model.parameters()))


def training_of(run: Path) -> Training:
    return Training("muon", load_settings(run), load_corpus_of(run), torch.device("cpu"))


def run_training(run: Path) -> None:
    training_of(run).run(StopRequest())


def restore(run: Path) -> tuple[str, bool]:
    """What this rank says when it goes to its checkpoint, and whether its weights are those it began with."""
    training = training_of(run)
    before = [parameter.detach().clone() for parameter in training.model.parameters()]
    message = ""
    try:
        training.restore()
    except FileError as error:
        message = str(error)
    return message, all(map(_equal, before, training.model.parameters()))


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    pair = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in (first, second)]
    return torch.equal(*pair)


def nan_in_a_file(checkpoint: Path) -> None:
    file = checkpoint / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    tensors = read_manifest(checkpoint).tensors.values()
    pieces = (piece for tensor in tensors if tensor.name.endswith("momentum_buffer") for piece in tensor.pieces)
    start = next(piece.start for piece in pieces if piece.file == file.name)
    content[start : start + 64] = torch.full((16,), float("nan")).numpy().tobytes()
    file.write_bytes(bytes(content))
    forge(checkpoint)


@pytest.fixture(scope="module")
def saved(pool: Pool, prepare: Callable[..., Path]) -> Path:
    """A run with a checkpoint of its last step."""
    run = prepare("saved", parallel="fsdp")
    pool.run(run_training, run, timeout=120)
    return run


@pytest.fixture(scope="module")
def saved_small(pool: Pool, folder: Path) -> Path:
    pool.run(save_small, folder / "small")
    return folder / "small"


def test_what_is_saved_is_loaded(saved_small: Path, pool: Pool) -> None:
    assert pool.run(load_small, saved_small) == [("", False)] * RANKS
    checkpoint = saved_small / f"step-{STEP:08d}"
    assert {path.name for path in checkpoint.iterdir()} == {
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        MANIFEST_FILE,
        "settings.json",
    }


def test_numbers_that_no_step_leaves_are_one_sentence_on_every_rank_before_anything_changes(
    saved_small: Path, pool: Pool, tmp_path: Path
) -> None:
    shutil.copytree(saved_small, tmp_path / "muon")
    nan_in_a_file(tmp_path / "muon" / f"step-{STEP:08d}")
    for message, same in pool.run(load_small, tmp_path / "muon"):
        assert message.startswith(str(tmp_path))
        assert ": found infinity or NaN in " in message
        assert "\n" not in message
        assert same


@pytest.mark.slow
def test_a_checkpoint_of_a_step_beyond_the_last_is_refused(saved: Path, pool: Pool, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "run")
    shutil.copy(tmp_path / "run" / "config.json", tmp_path / "config.json")
    settings = replace(load_settings(tmp_path), out=str(tmp_path / "run"))
    checkpoints = checkpoints_of(tmp_path / "run", "muon")
    (checkpoints / f"step-{settings.steps:08d}").rename(checkpoints / f"step-{settings.steps + 5:08d}")
    settings.save({})
    for message, same in pool.run(restore, tmp_path / "run"):
        assert f"found a checkpoint of step {settings.steps + 5}; needed none above step {settings.steps}" in message
        assert same


@pytest.mark.slow
@pytest.mark.soak
def test_a_training_keeps_the_newest_checkpoint(pool: Pool, prepare: Callable[..., Path]) -> None:
    run = prepare("kept", checkpoint_every=1)
    pool.run(run_training, run, timeout=120)
    directory = checkpoints_of(run, "muon")
    assert [path.name for path in directory.iterdir()] == ["step-00000004"]
    older = shutil.copytree(directory / "step-00000004", directory / "step-00000003")
    (directory / "step-00000004" / "__1_0.distcp").unlink()
    assert pool.run(restore, run) == [("", False)] * RANKS, "from the older one"
    (older / ".metadata").unlink()
    for message, same in pool.run(restore, run):
        assert "step-00000004: found files missing or cut off, and no whole checkpoint beside it" in message
        assert same


@pytest.mark.slow
def test_the_doctor_tells_of_a_run_and_its_checkpoints(saved: Path, tmp_path: Path) -> None:
    run = shutil.copytree(saved, tmp_path / "run")

    def doctor(*options: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["doctor", str(run), *options])
        return result.exit_code, result.output.replace("\n", " ")

    code, text = doctor()
    assert code == 0, text
    assert f"{run}: a run of muonmesh train, whole" in text
    assert f"goes on with: muonmesh train --resume {run}" in text
    assert f"step-{STEP:08d}: a checkpoint of muonmesh.checkpoint.save, whole" in text
    metrics = run / "metrics.jsonl"
    before = metrics.read_text() if metrics.exists() else ""
    metrics.write_text(before + "{oops\n")
    code, text = doctor()
    assert code == 1, text
    assert "metrics.jsonl: line" in text
    assert "goes on with" not in text
    metrics.write_text(before)
    (checkpoints_of(run, "muon") / ".step-00000009.writing").mkdir()
    code, text = doctor("--json")
    assert code == 0, text
    assert any(".step-00000009.writing: left by a save that was cut off" in note for note in json.loads(text)["notes"])


def save_poisoned(directory: Path) -> list[str]:
    """Save a state, then one of which only rank 1 holds a NaN, then one that does not fit on the disk."""
    messages = []
    checkpoints = Checkpoints(directory)
    checkpoints.save(1, *sharded_after_step(1.0))
    poisoned = sharded_after_step(1.0)
    if dist.get_rank() == 1:
        with torch.no_grad():
            poisoned[0][0].weight.to_local()[3, 3] = float("nan")
    for step, state in ((2, poisoned), (3, sharded_after_step(1.0))):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if step == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, limits[1]))
        try:
            checkpoints.save(step, *state)
        except FileError as error:
            messages.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    back = sharded_after_step(0.0)
    checkpoints.load(1, *back)
    assert all(map(_equal, sharded_after_step(1.0)[0].parameters(), back[0].parameters()))
    return messages


def test_what_is_not_finite_or_does_not_fit_is_not_saved_and_the_last_checkpoint_stays(
    pool: Pool, tmp_path: Path
) -> None:
    for messages in pool.run(save_poisoned, tmp_path):
        assert len(messages) == 2
        assert "model.0.weight: not finite, so it is not saved. The checkpoint of step 1 is kept." in messages[0]
        assert f"could not be written: {os.strerror(errno.EFBIG)}" in messages[1]
        assert "The checkpoint of step 1 is kept" in messages[1]
        assert "\n" not in "".join(messages)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001"]


def insist_apart(name: str, run: Path) -> str:
    values: dict[str, Any] = {**asdict(Settings(out="x")), "text": "ab"}
    if dist.get_rank() == 1:
        values[name] = "other"
    with pytest.raises(FileError) as caught:
        require_equal_values(run, values)
    return str(caught.value)


class Scaled(torch.nn.Module):
    """What FSDP2 cannot shard."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.0))


def shard_a_number() -> str:
    with pytest.raises(FileError) as caught:
        parallelise(Scaled(), parallel="fsdp", dtype="fp32", device=torch.device("cpu"))
    return str(caught.value)


def test_a_parameter_that_cannot_be_sharded_is_one_sentence_before_and_on_the_ranks(pool: Pool) -> None:
    with pytest.raises(FileError, match=r"--model own: scale is a single number.* Write: --parallel ddp"):
        check_parameters(Scaled(), name="own", parallel="hsdp")
    check_parameters(Scaled(), name="own", parallel="ddp")
    for message in pool.run(shard_a_number):
        assert "--parallel fsdp: FSDP2 cannot shard this model: " in message
        assert message.endswith("Write: --parallel ddp")


@pytest.mark.parametrize("name", ["steps", "data", "lr", "text"])
def test_what_differs_on_one_rank_is_said_by_all(name: str, pool: Pool, tmp_path: Path) -> None:
    messages = pool.run(insist_apart, name, tmp_path)
    assert messages[0] == messages[1]
    assert f"{tmp_path}: the ranks were given different {name}: " in messages[0]
