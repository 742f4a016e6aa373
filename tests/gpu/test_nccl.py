"""Ranks of NCCL that share one GPU: what `tests.gpu.ranks` does together, each against one process on that GPU.

What passes here is right in streams, events, uneven all-to-alls, groups and faults. It says nothing about speed, NVLink
or InfiniBand: the ranks look like hosts to NCCL and talk over sockets (`tests.support.workers.nccl_environment`). Every
case runs on a CPU over gloo too, in `make soak`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import muonmesh as mm
from muonmesh.numerics.rules import RULES, is_matrix_rule
from tests.gpu import pytestmark as gpu
from tests.gpu import ranks as on_ranks
from tests.support import deaths, layouts, problem
from tests.support.workers import Pool

DEVICES = [pytest.param("cuda", marks=gpu), pytest.param("cpu", marks=pytest.mark.soak)]
on_devices = pytest.mark.parametrize("device", DEVICES)
SECONDS = 60.0  # of a case
LAYOUTS = [
    *((2, layout) for layout in problem.LAYOUTS),
    *((4, layout) for layout in ("ddp", "fsdp", "shard1")),
    *((4, layout) for layout in layouts.MESHES),
]
HELD_OTHERWISE: dict[str, dict[str, Any]] = {
    "state shared by replicas": {"shard_state": True},
    "a bucket at a time": {"memory_budget_mb": 0},
    "int8": {"state_dtype": "int8"},
    "state on the host": {"state_device": "cpu"},
}


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable[[str, int], Pool]]:
    """`pools(device, n)`: one pool at a time, since each rank holds a context of the device."""
    open_pools: dict[tuple[str, int], Pool] = {}

    def pool(device: str, ranks: int) -> Pool:
        if (device, ranks) not in open_pools:
            for other in open_pools.values():
                other.close()
            open_pools.clear()
            open_pools[device, ranks] = Pool(ranks, programs=device == "cuda", device=device)
        return open_pools[device, ranks]

    yield pool
    for open_pool in open_pools.values():
        open_pool.close()


Pools = Callable[[str, int], Pool]


def same(pools: Pools, device: str, ranks: int, case: Callable[..., Any], *arguments: Any, **settings: Any) -> None:
    """No rank finds a difference."""
    outcomes = pools(device, ranks).run(case, device, *arguments, timeout=SECONDS, **settings)
    assert [outcome or {} for outcome in outcomes] == [{}] * ranks


@on_devices
@pytest.mark.parametrize(("ranks", "layout"), sorted(LAYOUTS))
def test_every_layout(pools: Pools, device: str, ranks: int, layout: str) -> None:
    same(pools, device, ranks, on_ranks.of_layout, layout)


@on_devices
@pytest.mark.parametrize("how", HELD_OTHERWISE)
def test_what_is_held_otherwise(pools: Pools, device: str, how: str) -> None:
    same(pools, device, 4, on_ranks.of_layout, "hsdp", **HELD_OTHERWISE[how])


@on_devices
@pytest.mark.parametrize("rule", [name for name in RULES if is_matrix_rule(name)])
def test_every_rule(pools: Pools, device: str, rule: str) -> None:
    same(pools, device, 4, on_ranks.of_layout, "rows by cols", rule)


@on_devices
@pytest.mark.parametrize("policy", ["all", "separate", "adamw_only"])
def test_clipping(pools: Pools, device: str, policy: str) -> None:
    same(pools, device, 4, on_ranks.clipped, "fsdp", policy)


@on_devices
def test_an_overflow_on_one_rank(pools: Pools, device: str) -> None:
    same(pools, device, 4, on_ranks.overflow, "fsdp")


@on_devices
def test_checkpoints_from_any_layout_to_any(pools: Pools, device: str, tmp_path: Path) -> None:
    """From 2 ranks to 4 and back."""
    for ranks, layout in ((2, "fsdp"), (2, "ddp")):
        pools(device, ranks).run(on_ranks.saved, device, layout, str(tmp_path / layout), timeout=SECONDS)
    for layout in ("fsdp", "ddp"):
        same(pools, device, 4, on_ranks.loaded, "rows by cols", str(tmp_path / layout))
    pools(device, 4).run(on_ranks.saved, device, "experts", str(tmp_path / "experts"), timeout=SECONDS)
    for layout in ("shard1", "replicate"):
        same(pools, device, 2, on_ranks.loaded, layout, str(tmp_path / "experts"))


@on_devices
@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_straight_to_owners(pools: Pools, device: str, ranks: int) -> None:
    same(pools, device, ranks, on_ranks.straight_to_owners)


@on_devices
@pytest.mark.parametrize("how", ["fsdp", "tp", "fsdp of tp"])
def test_real_passes(pools: Pools, device: str, how: str) -> None:
    same(pools, device, 4, on_ranks.trained, how)


@on_devices
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed(pools: Pools, device: str, stage: int) -> None:
    pytest.importorskip("deepspeed")
    assert pools(device, 2).run(on_ranks.deepspeed_engine, device, stage, timeout=120.0) == [[], []]


# ---------------------------------------------------------------- faults


@on_devices
def test_a_rank_that_is_late(pools: Pools, device: str) -> None:
    same(pools, device, 4, on_ranks.one_rank_late)


@on_devices
def test_a_small_timeout(pools: Pools, device: str) -> None:
    same(pools, device, 2, on_ranks.small_timeout)


@on_devices
@pytest.mark.parametrize("mistake", ["setting", "gradient"])
def test_what_is_wrong_on_one_rank_raises_on_all(pools: Pools, device: str, mistake: str) -> None:
    outcomes = pools(device, 4).run_expecting_errors(on_ranks.raises, device, mistake, timeout=SECONDS)
    for outcome in outcomes:
        assert outcome.error in (mm.PlanError, TypeError), outcome
        assert "rank 3" in outcome.message or outcome.rank == 3, outcome.message


@on_devices
@pytest.mark.parametrize("moment", ["before the flags", "before the gather"])
def test_a_rank_that_dies_keeps_nobody_waiting(device: str, moment: deaths.Moment) -> None:
    """On a GPU torch's watchdog ends the others, or their step raises; nobody finishes the run without the rank."""
    reports = deaths.left_behind(moment, "killed", device=device, seconds=90.0)
    assert sorted(reports) == [0, 2]
    for rank, report in reports.items():
        assert report.error, f"rank {rank} finished its steps without rank 1"
        assert report.whole <= deaths.LAST_WHOLE + (moment != "before the flags")
