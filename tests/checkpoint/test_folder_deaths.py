"""A save that is cut off, wherever: the old checkpoint is there, or the new one, and the next save works."""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from muonmesh.checkpoint.folder import folder_at
from muonmesh.checkpoint.manifest import MANIFEST_FILE
from muonmesh.checkpoint.reader import open_checkpoint
from muonmesh.errors import FileError
from muonmesh.tools.cli.checkpoints import forget_others, is_complete, numbered
from tests.support.alone import DEAD, Point, alone, die, files_of_at_most, in_child, refuse
from tests.support.folders import read, write

COVERS = (
    "checkpoint.reader.open_checkpoint",
    "checkpoint.folder.move_into_place",
)

OLD, NEW, NEXT = 1, 2, 3
FAMILY = "step-"


def tensors_of_generation(generation: int) -> dict[str, Any]:
    return {"weight": torch.full((6, 5), float(generation)), "bias": torch.full((3,), generation, dtype=torch.bfloat16)}


def write_generation(path: Path, generation: int) -> None:
    write(path, tensors_of_generation(generation), {"generation": generation})
    forget_others(path)


def generation_at(path: Path) -> int:
    """Which one is there, all of it; 0 where there is none."""
    if not os.path.lexists(folder_at(path)):
        with pytest.raises(FileError, match="found nothing there; needed the folder of a checkpoint"):
            open_checkpoint(path)
        return 0
    read_tensors = tensors_of_generation(0)
    generation = int(read(path, read_tensors)["generation"])
    assert all(torch.equal(read_tensors[name], tensor) for name, tensor in tensors_of_generation(generation).items())
    return generation


def newest_generation(folder: Path) -> int:
    """The generation that a run would go on from."""
    whole = [path for _, path in numbered(folder) if is_complete(folder_at(path))]
    return generation_at(whole[0]) if whole else 0


def place_of(folder: Path, how: str, generation: int) -> Path:
    return folder / (f"{FAMILY}{generation}" if how == "one after the other" else "state")


def survivors(root: Path, how: str, cut: Callable[[Path, int], Callable[[], None]], points: Iterable[int]) -> list[Any]:
    """For each point: how the child that saved `NEW` ended, and what is found then; to the first that is not cut off.

    After each, `NEXT` is saved by somebody else, and nothing but it must be left.
    """
    outcomes: list[Any] = []
    for point in points:
        folder = root / f"{point:04d}"
        folder.mkdir()
        if how != "the first":
            write_generation(place_of(folder, how, OLD), OLD)
        ended = in_child(cut(folder, point))
        generation = (
            newest_generation(folder) if how == "one after the other" else generation_at(place_of(folder, how, NEW))
        )
        write_generation(place_of(folder, how, NEXT), NEXT)
        assert os.listdir(folder) == [place_of(folder, how, NEXT).name], point
        assert generation_at(place_of(folder, how, NEXT)) == NEXT
        outcomes.append((ended, generation))
        if ended == 0:
            break
    return outcomes


def dies_at_an_operation(root: Path, how: str) -> list[Any]:
    def cut(folder: Path, point: int) -> Callable[[], None]:
        def work() -> None:
            Point(folder, point, die)
            write_generation(place_of(folder, how, NEW), NEW)

        return work

    return survivors(root, how, cut, itertools.count())


def dies_at_a_byte(root: Path, how: str, points: list[int]) -> list[Any]:
    def cut(folder: Path, point: int) -> Callable[[], None]:
        def work() -> None:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            with files_of_at_most(point, deadly=True):
                write_generation(place_of(folder, how, NEW), NEW)

        return work

    return survivors(root, how, cut, points)


@pytest.mark.parametrize(
    "how",
    [
        "another of the same name",
        "one after the other",
        pytest.param("the first", marks=pytest.mark.soak),
    ],
)
def test_a_process_that_ends_before_any_operation_on_files_leaves_the_old_or_the_new(how: str, tmp_path: Path) -> None:
    outcomes = alone(dies_at_an_operation, tmp_path, how)
    old = 0 if how == "the first" else OLD
    assert [ended for ended, _ in outcomes] == [DEAD] * (len(outcomes) - 1) + [0]
    numbers = [generation for _, generation in outcomes]
    assert len(numbers) > 15
    assert numbers == sorted(numbers), "never back from the new to the old"
    assert set(numbers) == {old, NEW}
    print(f"{how}: ended before each of {len(numbers) - 1} operations; {numbers.count(old)} times the old was there")


@pytest.mark.parametrize("step", [331, pytest.param(13, marks=pytest.mark.soak)])
def test_a_process_that_is_killed_at_any_byte_leaves_the_old(step: int, tmp_path: Path) -> None:
    """By the system, when it writes that byte of any file: files of tensors, metadata, settings or manifest."""
    write_generation(tmp_path / "state", OLD)
    longest = max(file.stat().st_size for file in (tmp_path / "state").iterdir())
    points = [*range(0, longest, step), longest]
    outcomes = alone(dies_at_a_byte, tmp_path, "another of the same name", points)
    assert outcomes == [(-signal.SIGXFSZ, OLD)] * (len(points) - 1) + [(0, NEW)]
    print(f"killed at each of {len(points) - 1} bytes; each time the old was there")


def goes_on(root: Path, cut: str, points: Iterable[int]) -> list[Any]:
    """What is refused at each point, what is there then, and that the same process saves once it is not refused."""
    outcomes: list[Any] = []

    def save_twice(folder: Path, point: int) -> None:
        path, message = folder / "state", ""
        refused = None if cut == "byte" else Point(folder, point, refuse)
        try:
            with files_of_at_most(point, deadly=False) if cut == "byte" else nullcontext():
                write_generation(path, NEW)
        except FileError as error:
            message = str(error)
        reached = bool(message) if refused is None else not refused.armed
        if refused is not None:
            refused.armed = False
        generation = generation_at(path)
        if message and cut == "byte":  # an operation may be the one that removes what was there before
            assert os.listdir(folder) == ["state"]
        write_generation(path, NEXT)
        assert generation_at(path) == NEXT
        assert os.listdir(folder) == ["state"]
        (folder.parent / "told.json").write_text(json.dumps([message, generation, reached]))

    for point in points:
        folder = root / f"{point:04d}"
        folder.mkdir()
        write_generation(folder / "state", OLD)
        assert in_child(lambda folder=folder, point=point: save_twice(folder, point)) == 0, point
        last_message, last_generation, reached = json.loads((root / "told.json").read_text())
        outcomes.append((last_message, last_generation))
        if not reached:
            break
    return outcomes


@pytest.mark.parametrize("cut", ["operation", "byte"])
def test_what_cannot_be_written_is_one_sentence_and_the_process_goes_on(cut: str, tmp_path: Path) -> None:
    """An operation on files that fails, or a limit on their size (a quota is one), at each point."""
    write_generation(tmp_path / "state", OLD)
    longest = max(file.stat().st_size for file in (tmp_path / "state").iterdir())
    points = itertools.count() if cut == "operation" else [*range(0, longest, 700), longest]
    outcomes = alone(goes_on, tmp_path, cut, points)
    assert len(outcomes) > (15 if cut == "operation" else 3)
    assert outcomes[-1] == ("", NEW)
    assert sum(bool(message) for message, _ in outcomes) >= len(outcomes) // 2
    harmless = sum(not message for message, _ in outcomes[:-1])
    print(f"refused at each of {len(outcomes) - 1} points ({cut}); {harmless} times it did not matter")
    for message, generation in outcomes[:-1]:
        if message:
            assert generation == OLD, message
            assert ": could not be written: " in message
            assert message.endswith("Free some space there, then save again")
        else:
            assert generation == NEW, "what failed was the removal of the old"


def test_no_name_is_given_before_all_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file and its folder have been waited for before the renaming, and the folder around it after that."""
    operations: list[tuple[str, str]] = []
    really = os.fsync

    def note(descriptor: int) -> None:
        operations.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        really(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    rename = Path.rename

    def renamed(self: Path, target: Path) -> Path:
        operations.append(("rename", str(target)))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", renamed)
    path = tmp_path / "state"
    write_generation(path, OLD)
    at = operations.index(("rename", str(path)))
    scratch = str(tmp_path / ".state.writing")
    waited = [name for operation, name in operations[:at] if operation == "fsync"]
    assert {Path(name).name.removesuffix(".writing").strip(".") for name in waited} >= {
        "__0_0.distcp",
        "metadata",
        "settings.json",
        "state",
    }
    assert waited[-1] == scratch
    assert MANIFEST_FILE in waited[-2]
    assert ("fsync", str(tmp_path)) in operations[at:]
