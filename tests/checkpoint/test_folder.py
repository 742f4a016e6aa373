"""A checkpoint's folder, written and read by ranks: it comes back as it was, or every rank says the same sentence."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from muonmesh.checkpoint.folder import previous_at, scratch_at
from muonmesh.checkpoint.manifest import REMEDY
from muonmesh.checkpoint.reader import open_checkpoint
from muonmesh.errors import FileError
from tests.support.alone import files_of_at_most
from tests.support.disks import read_only, small_disk
from tests.support.folders import read, write
from tests.support.workers import Pool

COVERS = (
    "checkpoint.reader.CheckpointReader",
    "checkpoint.folder.write",
    "files.write_text",
)

RANKS = 2
SETTINGS = {"groups": [{"lr": 0.1, "rule": "muon"}], "step": 7}


@pytest.fixture(scope="module")
def pool(workers: Callable[[int], Pool]) -> Pool:
    return workers(RANKS)


def shared_tensors(factor: float) -> dict[str, Any]:
    """One whose rows the ranks share unevenly, one that each has, a number, and one of another dtype."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "model.weight": distribute_tensor(torch.arange(35.0).view(7, 5) * factor, mesh, [Shard(0)]),
        "model.bias": torch.full((5,), 3.0 * factor, dtype=torch.bfloat16),
        "state.weight.step": torch.tensor(2.0 * factor),
    }


def whole_tensors(local_tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: getattr(tensor, "full_tensor", tensor.clone)() for name, tensor in local_tensors.items()}


def write_shared(path: Path, factor: float = 1.0) -> None:
    write(path, shared_tensors(factor), SETTINGS)


def read_back(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor], bool]:
    """What a rank reads, and whether what it reads into is as it was where that was refused."""
    read_tensors = shared_tensors(0.0)
    try:
        settings = read(path, read_tensors)
    except FileError as error:
        settings = {"error": str(error)}
    wholes = whole_tensors(read_tensors)
    return settings, wholes, all(not tensor.any() for tensor in wholes.values())


def test_what_is_written_comes_back_and_replaces_what_was_there(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "made" / "state"
    for factor in (1.0, 2.0):
        pool.run(write_shared, path, factor)
        for settings, wholes, _ in pool.run(read_back, path):
            assert settings == SETTINGS
            assert torch.equal(wholes["model.weight"], torch.arange(35.0).view(7, 5) * factor)
            assert torch.equal(wholes["model.bias"], torch.full((5,), 3.0 * factor, dtype=torch.bfloat16))
            assert float(wholes["state.weight.step"]) == 2.0 * factor
        assert [entry.name for entry in path.parent.iterdir()] == ["state"]
    # By one process alone, which is no rank, and by nobody's world size.
    by_torch = {name: torch.zeros_like(tensor) for name, tensor in wholes.items()}
    assert read(path, by_torch) == SETTINGS
    assert all(torch.equal(by_torch[name], tensor) for name, tensor in wholes.items())
    assert open_checkpoint(path).tensors.keys() == by_torch.keys()


def held_by_another(path: Path) -> str:
    import fcntl

    descriptor = os.open(scratch_at(path), os.O_RDONLY)
    if dist.get_rank() == 1:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    dist.barrier()
    try:
        with pytest.raises(FileError) as caught:
            write_shared(path, 5.0)
    finally:
        os.close(descriptor)
    return str(caught.value)


def write_refused(path: Path) -> str:
    with pytest.raises(FileError) as caught:
        write_shared(path, 5.0)
    return str(caught.value)


def test_what_somebody_else_has_there_stays(pool: Pool, tmp_path: Path) -> None:
    """Another process that writes, a run's own directory, a file, a link: one sentence on every rank, and no change."""
    path = tmp_path / "state"
    pool.run(write_shared, path)
    scratch_at(path).mkdir()
    for message in pool.run(held_by_another, path):
        assert message.startswith(f"{path}: found another process that is writing it; needed one writer at a time. ")
    assert scratch_at(path).is_dir()
    run, link, file = tmp_path / "run", tmp_path / "link", tmp_path / "file"
    shutil.copytree(path, run)
    (run / "config.json").write_text("{}")
    link.symlink_to(path, target_is_directory=True)
    file.write_text("mine")
    folder = tmp_path / "folder"
    (folder / "settings.json").mkdir(parents=True)
    (folder / "settings.json" / "notes.txt").write_text("mine")  # the name is a checkpoint's, the folder is not
    occupied_paths = (
        (run, "'config.json' in it"),
        (folder, "'settings.json' in it"),
        (link, "a link"),
        (file, "a file"),
    )
    for occupied, kind in occupied_paths:
        for message in pool.run(write_refused, occupied):
            assert message.startswith(f"{occupied}: found {kind}"), message
            assert message.endswith("needed nothing there, or a checkpoint to replace. Save under another name")
    assert (run / "config.json").exists()
    assert (folder / "settings.json" / "notes.txt").exists()
    assert link.is_symlink()
    assert file.read_text() == "mine"
    pool.run(write_shared, path, 2.0)  # the other is gone
    assert not scratch_at(path).exists()
    assert pool.run(read_back, path)[0][0] == SETTINGS


LEFT = {"a link": Path.symlink_to, "a file": Path.hardlink_to, "'notes.txt' in it": None}


@pytest.mark.parametrize("beside", [scratch_at, previous_at])
@pytest.mark.parametrize("kind", LEFT)
def test_what_somebody_else_has_at_a_temporary_path_stays(
    beside: Callable[[Path], Path], kind: str, pool: Pool, tmp_path: Path
) -> None:
    """A save ended in "Not a directory" there, or removed the files of somebody else."""
    path, notes = tmp_path / "state", tmp_path / "notes.txt"
    occupied = beside(path)
    pool.run(write_shared, path)
    notes.write_text("mine")
    if (make := LEFT[kind]) is None:
        occupied.mkdir()
        shutil.copy(notes, occupied)
    else:
        make(occupied, tmp_path if kind == "a link" else notes)
    needed = "nothing there, or the rest of an interrupted save. Move it away, or save under another name"
    for message in pool.run(write_refused, path):
        assert message.startswith(f"{occupied}: found {kind}"), message
        assert message.endswith(f"needed {needed}"), message
    assert os.path.lexists(occupied)
    assert (occupied / "notes.txt").exists() or occupied.read_text() == "mine"
    assert pool.run(read_back, path)[0][0] == SETTINGS


def tried(path: Path, factor: float) -> str:
    """The sentence of a save that could not be done, empty for one that was."""
    try:
        write_shared(path, factor)
    except FileError as error:
        return str(error)
    return ""


def test_a_disk_that_is_full_anywhere_or_read_only_is_one_sentence_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    """Whichever file of whichever rank is the first without room: the old checkpoint is there, then the new one."""
    page = os.sysconf("SC_PAGESIZE")
    with small_disk(tmp_path / "disk", megabytes=1) as disk:
        path, ballast = disk / "state", disk / "ballast"
        pool.run(write_shared, path)
        refusals = 0
        for pages in range(40):
            ballast.write_bytes(b"")
            ballast.write_bytes(bytes(shutil.disk_usage(disk).free - pages * page))
            first, *others = pool.run(tried, path, 2.0)
            assert others == [first] * (RANKS - 1)
            assert pool.run(read_back, path)[0][1]["state.weight.step"] == (2.0 if first else 4.0)
            if not first:
                break
            refusals += 1
            assert (
                first
                == f"{path}: could not be written: No space left on device. Free some space there, then save again"
            )
            assert sorted(os.listdir(disk)) == ["ballast", "state"]
        assert not first
        assert refusals >= 5  # one for each file that a save writes
        ballast.unlink()
        with read_only(disk):
            assert set(pool.run(tried, path, 3.0)) == {
                f"{path}: could not be written: Read-only file system. Choose a place that can be written, then save "
                "again"
            }
            assert pool.run(read_back, path)[0][1]["state.weight.step"] == 4.0
        assert pool.run(tried, path, 3.0) == [""] * RANKS


def tried_on_disks_of_their_own(path: Path) -> str:
    (disk := path / f"disk of rank {dist.get_rank()}").mkdir()
    return tried(disk / "state", 1.0)


def test_a_disk_that_ranks_do_not_share_is_said_before_anything_is_written(pool: Pool, tmp_path: Path) -> None:
    first, *others = pool.run(tried_on_disks_of_their_own, tmp_path)
    assert others == [first] * (RANKS - 1)
    assert "disk of rank 1/.state.writing: found no folder on rank 1 that rank 0 has made" in first
    assert "needed a folder that all ranks share. Pass the same path on every rank" in first
    assert [file for file in tmp_path.rglob("*") if not file.name.startswith("disk")] == []


def test_an_old_checkpoint_that_cannot_be_removed_is_named(pool: Pool, tmp_path: Path) -> None:
    """That of another user, for example: every later save told of the new folder, which could be written."""
    path = tmp_path / "state"
    pool.run(write_shared, path)
    with small_disk(previous_at(path)):
        for message in pool.run(write_refused, path):
            assert message.startswith(f"{previous_at(path)}: could not be removed: ")
            assert message.endswith(". Remove it, then save again")
        assert not scratch_at(path).exists()
    assert pool.run(read_back, path)[0][1]["state.weight.step"] == 2.0


def tried_on_bad_paths(folder: Path) -> list[str]:
    """What this rank is told where only rank 1 cannot look at a folder, and where it may open no more files."""
    path = folder / ("n" * 300 if dist.get_rank() == 1 else "state")
    with pytest.raises(FileError) as unseen:
        open_checkpoint(path)
    files, limit = [], resource.getrlimit(resource.RLIMIT_NOFILE)
    if dist.get_rank() == 1:
        files = [os.open(folder, os.O_RDONLY)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (files[0] + 1, limit[1]))
    try:
        message = write_refused(folder / "state")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        for file in files:
            os.close(file)
    return [str(unseen.value), message]


def test_what_the_system_refuses_is_one_sentence_with_what_helps(pool: Pool, tmp_path: Path) -> None:
    """Ranks that were not refused were told of a PermissionError, or of "[Errno 13]" and a hidden folder."""
    pool.run(write_shared, tmp_path / "state")
    for unseen, message in pool.run(tried_on_bad_paths, tmp_path):
        assert unseen == f"{tmp_path / ('n' * 300)}: could not be read: File name too long. {REMEDY}"
        assert message.endswith(
            "could not be written: Too many open files. Allow more open files (ulimit -n), then save again"
        )


def tried_by_a_limited_rank(limited: int, path: Path) -> str:
    """Save a tensor so large that torch's writer, and not Python's buffer, is refused, which does not say why."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    large = {"model.weight": distribute_tensor(torch.ones(256, 256), mesh, [Shard(0)])}
    may = files_of_at_most(50_000, deadly=False) if dist.get_rank() == limited else contextlib.nullcontext()
    with may, pytest.raises(FileError) as caught:
        write(path, large, SETTINGS)
    return str(caught.value)


@pytest.mark.parametrize("limited", range(RANKS))
def test_a_limit_of_one_rank_is_the_cause_that_every_rank_tells(limited: int, pool: Pool, tmp_path: Path) -> None:
    """Rank 0 guessed at the cause, which only the other knew, and told of a full disk."""
    path = tmp_path / "state"
    pool.run(write_shared, path)
    for message in pool.run(tried_by_a_limited_rank, limited, path):
        assert message.startswith(f"{path}: could not be written: File too large. Free some space there, then "), (
            message
        )
    assert pool.run(read_back, path)[0][1]["state.weight.step"] == 2.0
    assert os.listdir(tmp_path) == ["state"]
