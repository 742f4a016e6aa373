"""A checkpoint whose files change while ranks load it: every rank is told, and nothing of two checkpoints is mixed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import muonmesh as mm
from muonmesh.checkpoint.manifest import SavedTensor
from muonmesh.comm.storage import local_of
from muonmesh.errors import FileError
from tests.support.workers import Pool

COVERS = ("checkpoint.reader.CheckpointReader.check_unchanged",)


def filled(value: float) -> tuple[nn.Module, mm.Muon]:
    """A sharded model and an optimizer, all of whose numbers are ``value``; the files' lengths do not depend on it."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = mm.from_model(model)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    for tensor in numbers_of(model, optimizer):
        tensor.fill_(value)
    return model, optimizer


def numbers_of(model: nn.Module, optimizer: mm.Muon) -> list[torch.Tensor]:
    state = [tensor for entry in optimizer.state.values() for tensor in entry.values()]
    return [local_of(tensor.detach()) for tensor in (*model.parameters(), *state)]


def load_while(folder: str, change: str, at: int) -> str:
    """What a rank is told by a load during which files change, before rank 0 reads its piece number ``at``.

    The other rank reads afterwards: in the middle of a change it could find a file missing, or half of it.
    """
    path, other, changed = Path(folder) / "saved", Path(folder) / "other", Path(folder) / "changed"
    for value, target in ((1.0, path), (2.0, other)):
        mm.checkpoint.save(target, *filled(value))
    reads, read = [0], SavedTensor.read

    def changed_before(*arguments: Any) -> torch.Tensor:
        reads[0] += 1
        if dist.get_rank() == 0 and reads[0] == at:
            if change == "replaced":  # as another process that saves under the same name
                path.rename(path.with_name("before"))
                other.rename(path)
            elif change == "replaced by the same":  # as by a copy that somebody brought
                path.rename(path.with_name("before"))
                shutil.copytree(path.with_name("before"), path)
            else:
                shutil.copyfile(other / "__0_0.distcp", path / "__0_0.distcp")
            changed.touch()
        until = time.monotonic() + 30
        while dist.get_rank() and not changed.exists() and time.monotonic() < until:
            time.sleep(0.01)
        return read(*arguments)

    model, optimizer = filled(3.0)
    SavedTensor.read = changed_before  # type: ignore[method-assign]
    try:
        mm.checkpoint.load(path, model, optimizer)
    except FileError as error:
        message = str(error)
    else:
        message = ""
    finally:
        SavedTensor.read = read  # type: ignore[method-assign]
    expected = 3.0 if message else 1.0
    assert all(bool((tensor == expected).all()) for tensor in numbers_of(model, optimizer))
    return message


@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_checkpoint_that_is_replaced_while_ranks_read_is_refused(
    at: int, workers: Callable[[int], Pool], tmp_path: Path
) -> None:
    expected = f"{tmp_path / 'saved'}: found a checkpoint that another process replaced or removed meanwhile; needed"
    for message in workers(2).run(load_while, str(tmp_path), "replaced", at):
        assert message.startswith(expected)
        assert message.endswith("Load again")


def test_a_file_that_is_written_while_ranks_read_is_refused(workers: Callable[[int], Pool], tmp_path: Path) -> None:
    for message in workers(2).run(load_while, str(tmp_path), "written", 2):
        assert message.startswith(f"{tmp_path / 'saved' / '__0_0.distcp'}: its content has changed")


def test_files_that_are_replaced_by_equal_ones_are_taken(workers: Callable[[int], Pool], tmp_path: Path) -> None:
    assert workers(2).run(load_while, str(tmp_path), "replaced by the same", 2) == ["", ""]


def load_other(folder: str) -> str:
    """What a rank is told where rank 1 has another checkpoint at the path, as on a disk of its own."""
    for value, name in ((1.0, "0"), (2.0, "1")):
        mm.checkpoint.save(Path(folder) / name, *filled(value))
    with pytest.raises(FileError) as caught:
        mm.checkpoint.load(Path(folder) / str(dist.get_rank()), *filled(3.0))
    return str(caught.value)


def test_ranks_that_have_another_checkpoint_at_the_path_are_told(
    workers: Callable[[int], Pool], tmp_path: Path
) -> None:
    for rank, message in enumerate(workers(2).run(load_other, str(tmp_path))):
        assert message.startswith(f"{tmp_path / str(rank)}: found another checkpoint on rank 1 than on rank 0; needed")
