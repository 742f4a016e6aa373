"""Arguments of clip_grad_norm_: each that is wrong is one clear error, before anything is sent or written."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import muonmesh as mm
from tests.support.workers import Pool

COVERS = ("clip.limits.scale_groups",)


def build() -> tuple[list[nn.Parameter], mm.Muon]:
    """One stage: rank r's matrix has gradients of r + 1, its vector of 2 (r + 1)."""
    factor = 1 + (dist.get_rank() if dist.is_initialized() else 0)
    matrix, vector = nn.Parameter(torch.ones(4, 9)), nn.Parameter(torch.ones(16))
    groups = [{"params": [matrix], "name": "m"}, {"params": [vector], "algorithm": "adamw", "name": "v"}]
    optimizer = mm.Muon(groups, lr=0.1, process_group="local")
    matrix.grad, vector.grad = torch.full((4, 9), 1.0 * factor), torch.full((16,), 2.0 * factor)
    return [matrix, vector], optimizer


WRONG: list[tuple[str, Any]] = [
    *(("process_group", value) for value in ("all", "World", 3, ["world"], ..., True)),
    *(("max_norm", value) for value in (math.nan, -1, -0.5, "1", None, True, 1j, [1.0])),
    ("max_norm", torch.tensor(1.0)),
    *(("skip_above", value) for value in (math.nan, -1.0, "1", None, False)),
    *(("policy", value) for value in ("none", None, 3, ["all"])),
    *(("norms", value) for value in (1, "yes", None)),
    *(("norm_type", value) for value in (1, "2", math.inf, None)),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=[f"{name}={value!r}"[:40] for name, value in WRONG])
def test_a_wrong_argument_is_one_error_that_names_it(name: str, value: Any) -> None:
    parameters, optimizer = build()
    before = [p.grad.clone() for p in parameters if p.grad is not None]
    with pytest.raises(ValueError, match=rf"^{name}: found .*; needed "):
        optimizer.clip_grad_norm_(**{"max_norm": 1.0, name: value})
    assert all(torch.equal(p.grad, old) for p, old in zip(parameters, before, strict=True))
    optimizer.step()  # and the next step is not skipped
    assert (parameters[0] != 1).any()


@pytest.mark.parametrize("group", ["world", "local", None])
def test_in_one_process_every_group_is_this_one(group: Any) -> None:
    _, optimizer = build()
    assert float(optimizer.clip_grad_norm_(1.0, process_group=group)) == pytest.approx(10.0)


def _measured() -> list[tuple[float, float]]:
    """The total norm and the largest gradient of the vector afterwards, for each way to say the group."""
    rank, world = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
    figures = []
    for group in ("world", dist.group.WORLD, "local", None, pairs[rank // 2]):
        parameters, optimizer = build()
        norms = optimizer.clip_grad_norm_(1.0, policy="all", process_group=group)
        assert parameters[1].grad is not None
        figures.append((float(norms), float(parameters[1].grad.max())))
    return figures


def test_world_and_local_mean_what_they_mean_to_the_constructor(workers: Callable[[int], Pool]) -> None:
    for rank, figures in enumerate(workers(4).run(_measured)):
        local_norms = [10.0 * (r + 1) for r in range(4)]  # sqrt(36 + 16·4) = 10
        world, pair = math.hypot(*local_norms), math.hypot(*local_norms[rank // 2 * 2 :][:2])
        for (norm, largest), needed in zip(
            figures, (world, world, local_norms[rank], local_norms[rank], pair), strict=True
        ):
            assert norm == pytest.approx(needed)
            assert largest == pytest.approx(2.0 * (rank + 1) / needed, rel=1e-5)


def _refused(value: Any) -> str:
    _, optimizer = build()
    others = dist.new_group([0])
    try:
        optimizer.clip_grad_norm_(1.0, process_group=others if value == "not a member" else value)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("value", ["all", 7])
def test_every_rank_refuses_before_any_waits(workers: Callable[[int], Pool], value: Any) -> None:
    for message in workers(2).run(_refused, value, timeout=60):
        assert message.startswith(f"process_group: found {value!r}; needed ")


def test_a_group_without_this_rank_is_refused(workers: Callable[[int], Pool]) -> None:
    member, stranger = workers(2).run(_refused, "not a member", timeout=60)
    assert member == ""
    assert stranger.startswith("process_group: found a group without this rank")


def kept_norms() -> list[str]:
    """Norms of three clipped steps, read when they were measured and after all steps; return what differs."""
    weight, bias = nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(5))
    groups = [{"params": [weight], "name": "muon"}, {"params": [bias], "name": "adamw", "algorithm": "adamw"}]
    optimizer = mm.Muon(groups, lr=0.1, process_group="world")
    measured, read = [], []
    for step in range(3):
        weight.grad, bias.grad = torch.full((4, 6), 3.0 + step), torch.full((5,), 2.0 - step)
        norms = optimizer.clip_grad_norm_(1.0, policy="all", skip_above=18.0)
        measured.append(norms)
        read.append([float(norms), *map(float, (norms.muon, norms.adamw, norms.skipped))])
        optimizer.step()
        optimizer.zero_grad()
    again = [[float(norms), *map(float, (norms.muon, norms.adamw, norms.skipped))] for norms in measured]
    assert [figures[-1] for figures in read] == [0.0, 1.0, 1.0]
    return [f"{first} {other}" for first, other in zip(read, again, strict=True) if first != other]


def test_norms_that_are_kept_over_steps_stay_as_they_were_measured(workers: Callable[[int], Pool]) -> None:
    """Loops log them later: no step may write into the tensors of an earlier one."""
    assert workers(2).run(kept_norms) == [[], []]
