"""Arguments of clip_grad_norm_: each that is wrong is one clear error, before anything is sent or written."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import muonmesh as mm
from muonmesh.clip.limits import Limits
from tests.support.on_ranks import on_ranks

COVERS = ("clip.limits.scale_groups",)


def build_of_rank() -> tuple[list[nn.Parameter], mm.Muon]:
    """One stage: rank r's matrix has gradients of r + 1, its vector of 2 (r + 1)."""
    factor = 1 + (dist.get_rank() if dist.is_initialized() else 0)
    matrix, vector = nn.Parameter(torch.ones(4, 9)), nn.Parameter(torch.ones(16))
    groups = [{"params": [matrix], "name": "m"}, {"params": [vector], "algorithm": "adamw", "name": "v"}]
    optimizer = mm.Muon(groups, lr=0.1, process_group="local")
    matrix.grad, vector.grad = torch.full((4, 9), 1.0 * factor), torch.full((16,), 2.0 * factor)
    return [matrix, vector], optimizer


MULTIPLES = ["4", "x", "-4x", "0x", "0.0x", "infx", "nanx", "4xx", " 4x", "4x ", "4 x", "1e999x", "1_0x", "4X", ""]
WRONG: list[tuple[str, Any]] = [
    *(("process_group", value) for value in ("all", "World", 3, ["world"], ..., True)),
    *(("max_norm", value) for value in (math.nan, -1, -0.5, "1", None, True, 1j, [1.0])),
    ("max_norm", torch.tensor(1.0)),
    *(("skip_above", value) for value in (math.nan, -1.0, "1", None, False, *MULTIPLES)),
    *(("policy", value) for value in ("none", None, 3, ["all"])),
    *(("norms", value) for value in (1, "yes", None)),
    *(("norm_type", value) for value in (1, "2", math.inf, None)),
]
WRITE = {"policy": 'one of "adamw_only", "all"', "norm_type": "2"}


@pytest.mark.parametrize(("name", "value"), WRONG, ids=[f"{name}={value!r}"[:40] for name, value in WRONG])
def test_a_wrong_argument_is_one_error_that_names_it(name: str, value: Any) -> None:
    parameters, optimizer = build_of_rank()
    before = [p.grad.clone() for p in parameters if p.grad is not None]
    with pytest.raises(ValueError, match=rf"^{name}: found .*; needed {WRITE.get(name, '')}") as error:
        optimizer.clip_grad_norm_(**{"max_norm": 1.0, name: value})
    assert value not in MULTIPLES or 'Write skip_above="4x"' in str(error.value)
    assert all(torch.equal(p.grad, old) for p, old in zip(parameters, before, strict=True))
    optimizer.step()  # and the next step is not skipped
    assert (parameters[0] != 1).any()


@pytest.mark.parametrize("text", ["4x", "4.x", "4.0x", "0.4e1x", ".4e+1x", "40e-1x"])
def test_a_multiple_may_be_written_as_any_number(text: str) -> None:
    assert Limits(skip_above=text).bits == Limits(skip_above="4x").bits != Limits(skip_above=4.0).bits


@pytest.mark.parametrize("group", ["world", "local", None])
def test_in_one_process_every_group_is_this_one(group: Any) -> None:
    _, optimizer = build_of_rank()
    assert float(optimizer.clip_grad_norm_(1.0, process_group=group)) == pytest.approx(10.0)


@on_ranks(4)
def test_world_and_local_mean_what_they_mean_to_the_constructor() -> None:
    rank = dist.get_rank()
    pairs = [dist.new_group([first, first + 1]) for first in (0, 2)]
    local_norms = [10.0 * (r + 1) for r in range(4)]  # sqrt(36 + 16·4) = 10
    world, pair = math.hypot(*local_norms), math.hypot(*local_norms[rank // 2 * 2 :][:2])
    needed = {"world": world, dist.group.WORLD: world, "local": local_norms[rank], None: local_norms[rank]}
    for group, norm in {**needed, pairs[rank // 2]: pair}.items():
        parameters, optimizer = build_of_rank()
        norms = optimizer.clip_grad_norm_(1.0, policy="all", process_group=group)
        assert float(norms) == pytest.approx(norm)
        assert float(parameters[1].grad.max()) == pytest.approx(2.0 * (rank + 1) / norm, rel=1e-5)


@pytest.mark.parametrize("value", ["all", 7])
@on_ranks(2)
def test_every_rank_refuses_before_any_waits(value: Any) -> None:
    with pytest.raises(ValueError, match=f"^process_group: found {value!r}; needed "):
        build_of_rank()[1].clip_grad_norm_(1.0, process_group=value)


@on_ranks(2)
def test_a_group_without_this_rank_is_refused() -> None:
    group, (_, optimizer) = dist.new_group([0]), build_of_rank()
    if dist.get_rank() == 0:
        optimizer.clip_grad_norm_(1.0, process_group=group)
        return
    with pytest.raises(ValueError, match=r"^process_group: found a group without this rank"):
        optimizer.clip_grad_norm_(1.0, process_group=group)


@on_ranks(2)
def test_norms_that_are_kept_over_steps_stay_as_they_were_measured() -> None:
    """Loops log them later: no step may write into the tensors of an earlier one."""
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
    assert read == again
