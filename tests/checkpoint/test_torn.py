"""A load or a save that one rank cannot finish: every rank raises, and none steps or saves what is half loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import muonmesh as mm
from muonmesh.checkpoint import record
from muonmesh.checkpoint.manifest import REMEDY, unreadable
from tests.support.workers import Pool

COVERS = (
    "comm.gather_objects.settled",
    "comm.gather_objects.first_difference",
    "checkpoint.state.refuse_torn",
)


def ddp_after_step() -> tuple[nn.Module, mm.Muon]:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)))
    optimizer = mm.from_model(model, lr=0.1)
    step_on_ones(model, optimizer)
    return model, optimizer


def step_on_ones(model: nn.Module, optimizer: mm.Muon) -> None:
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def torn(path: str) -> list[str]:
    """What this rank is told by a load that rank 1 cannot finish, and by what it does then."""
    model, optimizer = ddp_after_step()
    mm.checkpoint.save(path, model, optimizer)
    step_on_ones(model, optimizer)

    def refuse(*_: Any) -> None:
        raise MemoryError("no room for a copy")

    fill = record.fill
    record.fill = refuse if dist.get_rank() == 1 else fill  # type: ignore[assignment]
    messages = []
    for call in (
        lambda: mm.checkpoint.load(path, model, optimizer),
        lambda: mm.checkpoint.save(path, model, optimizer),
        lambda: step_on_ones(model, optimizer),
        optimizer.state_dict,
    ):
        try:
            call()
            messages.append("")
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    record.fill = fill
    mm.checkpoint.load(path, model, optimizer)
    step_on_ones(model, optimizer)
    return messages


def test_a_load_that_one_rank_cannot_finish_is_told_on_all_and_marks_all(workers: Any, tmp_path: Path) -> None:
    pool: Pool = workers(2)
    first, second = pool.run(torn, str(tmp_path / "saved"))
    assert second[0] == "MemoryError: no room for a copy"
    assert first[0] == "StateError: rank 1: MemoryError: no room for a copy"
    for messages in (first, second):
        for message in messages[1:]:
            assert "a load of a checkpoint that was interrupted while it wrote" in message


def save_without_memory(path: str) -> str:
    """What this rank is told by a save for which rank 1 has no memory."""

    def refuse(*_: Any) -> None:
        raise MemoryError("no room for a copy")

    model, optimizer = ddp_after_step()
    written = record._written
    record._written = refuse if dist.get_rank() == 1 else written  # type: ignore[assignment]
    try:
        mm.checkpoint.save(path, model, optimizer)
    except Exception as error:
        return str(error)
    finally:
        record._written = written
    return ""


def test_a_save_for_which_one_rank_has_no_memory_is_told_on_all(workers: Any, tmp_path: Path) -> None:
    messages = workers(2).run(save_without_memory, str(tmp_path / "saved"))
    assert messages == ["rank 1: MemoryError: no room for a copy", "no room for a copy"]
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("error")
def test_a_warning_that_is_made_an_error_comes_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(4, 6)
    optimizer = mm.from_model(model, lr=0.1)
    step_on_ones(model, optimizer)
    with monkeypatch.context() as patch:
        patch.setattr("muonmesh.checkpoint.record.told_products", lambda *_, **__: "others")
        mm.checkpoint.save(tmp_path / "saved", model, optimizer)
    step_on_ones(model, optimizer)
    before = [tensor.clone() for tensor in model.parameters()]
    with pytest.raises(UserWarning, match="by the products 'others"):
        mm.checkpoint.load(tmp_path / "saved", model, optimizer)
    assert all(map(torch.equal, before, model.parameters()))
    step_on_ones(model, optimizer)


def with_another_optimizer(path: str) -> list[str]:
    """What this rank is told where rank 1 gives an optimizer that cannot be saved, and loaded."""
    model, optimizer = ddp_after_step()
    mm.checkpoint.save(path, model, optimizer)
    saved_optimizer: Any = torch.optim.SGD(model.parameters()) if dist.get_rank() == 1 else optimizer
    messages = []
    for call in (mm.checkpoint.save, mm.checkpoint.load):
        with pytest.raises((mm.StateError, TypeError)) as caught:
            call(path, model, saved_optimizer)
        messages.append(str(caught.value))
    mm.checkpoint.load(path, model, optimizer)
    return messages


def test_an_optimizer_that_is_wrong_on_one_rank_is_told_on_all(workers: Any, tmp_path: Path) -> None:
    first, second = workers(2).run(with_another_optimizer, str(tmp_path / "saved"))
    assert all("SGD" in message for message in second)
    assert first == [f"rank 1: {message}" for message in second]


def test_what_another_user_may_read_is_not_called_damaged() -> None:
    denied = str(unreadable("weights.distcp:", PermissionError(13, "Permission denied")))
    assert denied == "weights.distcp: could not be read: Permission denied. Let the user of this process read it"
    for short in (MemoryError("no room"), RuntimeError("DefaultCPUAllocator: can't allocate memory")):
        assert str(unreadable("weights.distcp:", short)).endswith(". Free some memory and load again")
    assert str(unreadable("weights.distcp:", OSError(5, "Input/output error"))).endswith(REMEDY)
