"""What torch's profiler says of a step: its parts by name, and the bits of a step that nobody looks at."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

import muonmesh as mm
from muonmesh.comm.storage import local_of
from muonmesh.numerics.kernels.threads import run_all
from tests.support.meshes import mesh_of
from tests.support.on_ranks import on_ranks

COVERS = ("step.muon_step.Profiled",)


def stepped_under_profiler(sharded: bool, profiled: bool) -> tuple[list[Tensor], set[str]]:
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
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            step()
        rows = {event.key.removeprefix("muonmesh: ") for event in profiler.key_averages() if "muonmesh: " in event.key}
    else:
        step()
    return [local_of(parameter).detach() for parameter in model.parameters()], rows


ELEMENTWISE = "AdamW and other elementwise rules"


def check_profile(sharded: bool) -> None:
    """Two steps have the bits of two that nobody looks at, and rows of our names."""
    (plain, _), (named, rows) = stepped_under_profiler(sharded, False), stepped_under_profiler(sharded, True)
    names = {ELEMENTWISE, "gradients into matrices", "orthogonalization", "updates into weights"}
    assert names <= rows if sharded else names == rows
    assert all(map(torch.equal, plain, named))


@pytest.mark.own_ambient  # the profiler shows the thread of the caller alone
def test_a_step_on_one_rank_has_names_in_a_profile() -> None:
    check_profile(sharded=False)


@on_ranks(2)
def test_a_step_on_two_ranks_has_names_in_a_profile() -> None:
    check_profile(sharded=True)


@pytest.mark.own_ambient
def test_a_profile_says_that_the_caller_waits_for_other_threads() -> None:
    """Of several matrices on two threads; the profiler shows the caller alone."""
    before, caller, barrier = torch.get_num_threads(), threading.get_ident(), threading.Barrier(2)

    def task() -> None:
        barrier.wait(30)  # each thread has claimed one
        if threading.get_ident() != caller:
            time.sleep(0.1)

    torch.set_num_threads(2)
    try:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            run_all([task] * 2, device=torch.device("cpu"))
    finally:
        torch.set_num_threads(before)
    (row,) = [event for event in profiler.key_averages() if event.key == "muonmesh: waiting for other threads"]
    assert row.count == 1
    assert row.cpu_time_total > 50_000  # of 100,000 µs
