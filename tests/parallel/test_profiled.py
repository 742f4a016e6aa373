"""What torch's profiler says of a step: its parts by name, and the bits of a step that nobody looks at."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

import muonmesh as mm
from muonmesh.comm.storage import local_of
from tests.meshes import mesh_of


def stepped(sharded: bool, profiled: bool) -> tuple[list[Tensor], set[str]]:
    """Two steps, the second of which may be profiled; weights, and the rows of ours."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 4))
    if sharded:
        fully_shard(model, mesh=mesh_of((2,)))
    optimizer = mm.from_model(model, lr=0.05, overrides={"2.weight": "adamw"}, compute_dtype=torch.float32)

    def step() -> None:
        model(torch.ones(8, 12)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    rows = set()
    if profiled:
        with profile(activities=[ProfilerActivity.CPU]) as found:
            step()
        rows = {event.key.removeprefix("muonmesh: ") for event in found.key_averages() if "muonmesh: " in event.key}
    else:
        step()
    return [local_of(parameter).detach() for parameter in model.parameters()], rows


ELEMENTWISE = "AdamW and other elementwise rules"


def test_a_step_on_one_rank_has_names_in_a_profile() -> None:
    plain, _ = stepped(False, False)
    named, rows = stepped(False, True)
    assert rows == {ELEMENTWISE, "gradients into matrices", "orthogonalization", "updates into weights"}
    assert all(map(torch.equal, plain, named))


def test_a_step_on_two_ranks_has_names_in_a_profile(workers: Any) -> None:
    told = zip(workers(2).run(stepped, True, False), workers(2).run(stepped, True, True), strict=True)
    for (plain, _), (named, rows) in told:
        assert {ELEMENTWISE, "gradients into matrices", "orthogonalization", "updates into weights"} <= rows
        assert all(map(torch.equal, plain, named))
