"""A checkpoint's folder, written and read by ranks: it comes back as it was, or every rank says the same sentence."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from muonmesh.checkpoint.folder import look, write
from muonmesh.checkpoint.place import writing_at
from muonmesh.errors import FileError
from tests.folders import read
from tests.workers import Pool

RANKS = 2
SETTINGS = {"groups": [{"lr": 0.1, "rule": "muon"}], "step": 7}


@pytest.fixture(scope="module")
def pool(workers: Callable[[int], Pool]) -> Pool:
    return workers(RANKS)


def tensors(factor: float) -> dict[str, Any]:
    """One whose rows the ranks share unevenly, one that each has, a number, and one of another dtype."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "model.weight": distribute_tensor(torch.arange(35.0).view(7, 5) * factor, mesh, [Shard(0)]),
        "model.bias": torch.full((5,), 3.0 * factor, dtype=torch.bfloat16),
        "state.weight.step": torch.tensor(2.0 * factor),
    }


def whole(held: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: getattr(tensor, "full_tensor", tensor.clone)() for name, tensor in held.items()}


def written(path: Path, factor: float = 1.0) -> None:
    write(path, tensors(factor), SETTINGS)


def read_back(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor], bool]:
    """What a rank reads, and whether what it reads into is as it was where that was refused."""
    held = tensors(0.0)
    try:
        settings = read(path, held)
    except FileError as error:
        settings = {"error": str(error)}
    found = whole(held)
    return settings, found, all(not tensor.any() for tensor in found.values())


def test_what_is_written_comes_back_and_replaces_what_was_there(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "made" / "state"
    for factor in (1.0, 2.0):
        pool.run(written, path, factor)
        for settings, found, _ in pool.run(read_back, path):
            assert settings == SETTINGS
            assert torch.equal(found["model.weight"], torch.arange(35.0).view(7, 5) * factor)
            assert torch.equal(found["model.bias"], torch.full((5,), 3.0 * factor, dtype=torch.bfloat16))
            assert float(found["state.weight.step"]) == 2.0 * factor
        assert [entry.name for entry in path.parent.iterdir()] == ["state"]
    # By one process alone, which is no rank, and by nobody's world size.
    held = {name: torch.zeros_like(tensor) for name, tensor in found.items()}
    assert read(path, held) == SETTINGS
    assert all(torch.equal(held[name], tensor) for name, tensor in found.items())
    assert look(path).held.keys() == held.keys()


def held_by_another(path: Path) -> str:
    import fcntl

    held = os.open(writing_at(path), os.O_RDONLY)
    if dist.get_rank() == 1:
        fcntl.flock(held, fcntl.LOCK_EX)
    dist.barrier()
    try:
        with pytest.raises(FileError) as caught:
            written(path, 5.0)
    finally:
        os.close(held)
    return str(caught.value)


def refused(path: Path) -> str:
    with pytest.raises(FileError) as caught:
        written(path, 5.0)
    return str(caught.value)


def test_what_somebody_else_has_there_stays(pool: Pool, tmp_path: Path) -> None:
    """Another process that writes, a run's own directory, a file, a link: one sentence on every rank, and no change."""
    path = tmp_path / "state"
    pool.run(written, path)
    writing_at(path).mkdir()
    for message in pool.run(held_by_another, path):
        assert message.startswith(f"{path}: found another process that is writing it; needed one writer at a time. ")
    assert writing_at(path).is_dir()
    run, link, file = tmp_path / "run", tmp_path / "link", tmp_path / "file"
    shutil.copytree(path, run)
    (run / "config.json").write_text("{}")
    link.symlink_to(path, target_is_directory=True)
    file.write_text("mine")
    for place, found in ((run, "'config.json' in it"), (link, "a link"), (file, "a file")):
        for message in pool.run(refused, place):
            assert message.startswith(f"{place}: found {found}"), message
            assert message.endswith("needed nothing there, or a checkpoint to replace. Save under another name")
    assert (run / "config.json").exists()
    assert link.is_symlink()
    assert file.read_text() == "mine"
    pool.run(written, path, 2.0)  # the other is gone
    assert not writing_at(path).exists()
    assert pool.run(read_back, path)[0][0] == SETTINGS
