"""Which checkpoints stay, and which is gone on from: numbers in names decide, and whether one is whole; no clock."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from muonmesh.checkpoint.folder import previous_at, scratch_at
from muonmesh.checkpoint.manifest import MANIFEST_FILE
from muonmesh.tools.cli.checkpoints import forget_others, latest_step
from tests.support.folders import read, write

COVERS = ("tools.cli.checkpoints.forget_others",)


def save_step(folder: Path, step: int, *, forget: bool = False) -> Path:
    path = folder / f"step-{step:08d}"
    write(path, {"weight": torch.full((4,), float(step))}, {"step": step})
    if forget:
        forget_others(path)
    return path


def steps(folder: Path) -> list[int]:
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    return sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir() if path.name[-8:].isdigit())


def cut_last_byte(path: Path) -> None:
    (path / "__0_0.distcp").write_bytes((path / "__0_0.distcp").read_bytes()[:-1])


def lose(path: Path) -> None:
    (path / ".metadata").unlink()


def break_manifest(path: Path) -> None:
    (path / MANIFEST_FILE).write_text("{")


@pytest.mark.parametrize("damage", [cut_last_byte, lose, break_manifest], ids=["cut", "file gone", "manifest"])
def test_it_goes_on_from_the_newest_that_is_whole_and_the_next_one_replaces_all(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    for step in (3, 4, 5):
        save_step(tmp_path, step)
    for age, step in enumerate((4, 3, 5)):  # a clock that jumped: the newest looks oldest
        os.utime(tmp_path / f"step-{step:08d}", (age, age))
    damage(tmp_path / "step-00000005")
    damage(tmp_path / "step-00000004")
    assert latest_step(tmp_path) == 3
    save_step(tmp_path, 4, forget=True)  # a run that went on from 3
    assert steps(tmp_path) == [4]
    assert read(tmp_path / "step-00000004", {"weight": torch.zeros(4)}) == {"step": 4}


def test_what_is_somebody_elses_is_not_removed(tmp_path: Path) -> None:
    others = ["step-00000001", "other-2", "step-best", "step-00000003"]
    for name in others:
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.txt").write_text("mine")
    link = tmp_path / "step-00000002"
    link.symlink_to(tmp_path / "other-2", target_is_directory=True)
    save_step(tmp_path, 4, forget=True)
    assert latest_step(tmp_path) == 4
    assert all((tmp_path / name / "mine.txt").exists() for name in others)
    assert link.is_symlink()


def test_leftovers_of_saves_that_were_cut_off_go_with_the_next_one(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    scratch_at(tmp_path / "step-00000002").mkdir()
    (scratch_at(tmp_path / "step-00000002") / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / "step-00000001").rename(previous_at(tmp_path / "step-00000001"))  # between two renames
    assert latest_step(tmp_path) == 1
    assert read(tmp_path / "step-00000001", {"weight": torch.zeros(4)}) == {"step": 1}
    save_step(tmp_path, 3, forget=True)
    assert steps(tmp_path) == [3]
