"""Ranks in several machines: results are passed on, one copy enters each machine, and no bit changes."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import muonmesh as mm
from muonmesh.step.connection import placed_members
from muonmesh.tools.forecasts.forecast import Weight, forecast
from tests.support import layouts, problem
from tests.support.meshes import machines, mesh_of
from tests.support.on_ranks import on_ranks
from tests.support.samples import one_in
from tests.support.sent import Sent

COVERS = (
    "layout.relay.Relay",
    "comm.ranks.ranks_of_a_machine",
)

FP32: dict[str, Any] = {"compute_dtype": torch.float32}
BUCKETS = {"one exchange": None, "some": 0.32, "many": 0.016}


# ------------------------------------------------------------------ bits


def stepped_between_machines(layout: str, settings: dict[str, Any], machine: int) -> tuple[list[str], Any, Any, int]:
    holding = problem.holding(layout)
    with machines(machine):
        optimizer = problem.optimizer_of(holding, **{**FP32, **settings})
    for step in range(4):
        holding.give(problem.zeroed(step))
        optimizer.step()
    settings = {key: value for key, value in {**FP32, **settings}.items() if key != "shard_state"}
    differing = problem.differing(holding.whole(optimizer), problem.alone(4, problem.zeroed, **settings))
    explanation = optimizer.explain()
    assert ("enter each machine once" in str(explanation)) == bool(explanation.relayed)
    promised, did = problem.promised_and_counted(optimizer)  # matrices without a gradient are promised too
    return differing, promised[1:], did[1:], passes_on(optimizer)


def passes_on(optimizer: mm.Muon) -> bool:
    """Whether results reach this rank that it sends to other ranks."""
    plan, me = optimizer._runtime.connected.exchange.plan, dist.get_rank()
    back = [plan.routes(bucket, me, gather=False) for bucket in range(len(plan.buckets))]
    sent = [leg.assignment for routes in back for peer, legs in routes.assembled.items() if peer != me for leg in legs]
    return any(plan.assignments[number].owner != me for number in sent)


FOUR = ("hsdp", "replicate inside", "all replicated", "three axes", "experts")
EIGHT = [name for name in layouts.EIGHT if "replicas" in name or name == "hsdp over tp"]
SOME = {"memory_budget_mb": BUCKETS["some"]}
# All results in one exchange, and in many, are the ends; what lies between is theirs again.
BETWEEN = {name: [pytest.mark.soak] * (name == "some") for name in BUCKETS}


@pytest.mark.parametrize(
    ("ranks", "layout", "machine", "settings"),
    [
        *(
            pytest.param(4, name, 2, {"memory_budget_mb": BUCKETS[bucket]}, marks=BETWEEN[bucket])
            for name, bucket in itertools.product(FOUR, BUCKETS)
        ),
        (4, "all replicated", 2, {"compute_dtype": torch.bfloat16, **SOME}),
        (4, "all replicated", 2, {"shard_state": True, **SOME}),
        (4, "declared hsdp", 2, SOME),
        # Replicas that are cut at other places are sent results by owners.
        (4, "flat of tensor parallel", 2, SOME),
        *one_in(
            7,
            [
                (8, name, machine, {"memory_budget_mb": bucket})
                for name, machine, bucket in itertools.product(EIGHT, (2, 4, 1), BUCKETS.values())
            ],
        ),
    ],
)
def test_bit_for_bit(workers, ranks: int, layout: str, machine: int, settings: dict[str, Any]) -> None:
    outcomes = workers(ranks).run(stepped_between_machines, layout, settings, machine)
    for differing, promised, did, _ in outcomes:
        assert differing == []
        assert did == promised
    one_hop = machine == 1 and layout == "eight replicas" and settings["memory_budget_mb"] is None
    passes = not one_hop and not layout.startswith("flat")
    assert any(passed for *_, passed in outcomes) == passes, "nothing was passed on, so nothing is tested"


# ------------------------------------------------------------------ sums over matrices


@pytest.mark.parametrize("bucket", [pytest.param(BUCKETS[name], id=name, marks=BETWEEN[name]) for name in BUCKETS])
@pytest.mark.parametrize("name", ["hsdp", "all replicated"])
@on_ranks(4)
def test_bit_for_bit_where_sums_come_first(name: str, bucket: float | None) -> None:
    """AdaMuon adds up squares of each whole matrix before weights are written; compared with no machines."""
    results = []
    for ranks in (2, 0):
        holding = problem.holding(name)
        holding.groups[0]["algorithm"] = "adamuon"
        with machines(ranks):
            optimizer = mm.Muon(holding.groups, **holding.settings, lr=0.02, memory_budget_mb=bucket, **FP32)
        for step in range(3):
            holding.give(problem.gradients(step))
            optimizer.step()
        results.append(holding.whole(optimizer))
        assert optimizer._runtime.ranks.machine == ranks
    assert problem.differing(*results) == []


# ------------------------------------------------------------------ bytes


class SentTo(Sent):
    """Adds up the bytes of messages to ranks of other machines."""

    def __init__(self, ranks: int, machine: int) -> None:
        super().__init__(ranks)
        self.machine, self.far = machine, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sends = func.namespace == "c10d" and func.overloadpacket.__name__ == "send"
        if sends and args[2] // self.machine != dist.get_rank() // self.machine:
            self.far += sum(t.numel() * t.element_size() for t in args[0])
        return super().__torch_dispatch__(func, types, args, kwargs)


SHAPES = [(64, 96)] * 16 + [(120, 32)] * 8


def weights_on(sizes: tuple[int, ...], placements: list[Any]) -> dict[str, nn.Parameter]:
    weights = {}
    for number, shape in enumerate(SHAPES):
        value = torch.randn(shape, generator=torch.Generator().manual_seed(number))
        placed: Tensor = distribute_tensor(value, mesh_of(sizes), placements, src_data_rank=None)
        weights[f"w{number}"] = nn.Parameter(placed)
        weights[f"w{number}"].grad = weights[f"w{number}"].detach().clone()
    return weights


def far(
    sizes: tuple[int, ...], placements: list[Any], machine: int, declared: int, bucket: float
) -> tuple[float, int, int]:
    """Bytes that this rank sends to other machines in a step; the bytes it counts, and those of a forecast."""
    weights = weights_on(sizes, placements)
    with machines(declared):
        optimizer = mm.Muon(list(weights.items()), memory_budget_mb=bucket)
    optimizer.step()
    with SentTo(dist.get_world_size(), machine) as sent:
        optimizer.step()
    storages = {member.name: member.storage.layout for member in placed_members(optimizer)}
    places = [Weight(name, layout, "whole") for name, layout in storages.items() if layout is not None]
    on_device = bucket / (2 if len(sizes) > 1 else 4)  # where the same buckets take so much less than on a CPU
    forecasted = forecast(places, rank=dist.get_rank(), memory_budget_mb=on_device, machine=declared)
    assert forecasted.collectives == optimizer.counts.collectives
    return sent.far, optimizer.counts.bytes_sent, forecasted.bytes_sent


@pytest.mark.parametrize(
    "bucket",
    [
        pytest.param(size, id=name, marks=BETWEEN[name])
        for name, size in {"one exchange": 256.0, "some": 0.8, "many": 0.16}.items()
    ],
)
@pytest.mark.parametrize(
    ("sizes", "placements", "machine"),
    [
        ((4,), [Replicate()], 2),
        ((8,), [Replicate()], 2),
        ((8,), [Replicate()], 4),
        ((4, 2), [Replicate(), Shard(0)], 4),
        ((4, 2), [Replicate(), Shard(0)], 2),
    ],
    ids=["ddp, 2 of 2", "ddp, 4 of 2", "ddp, 2 of 4", "hsdp, 2 of 4", "hsdp, 4 of 2"],
)
def test_one_copy_enters_each_other_machine(workers, sizes: Any, placements: Any, machine: int, bucket: float) -> None:
    """And without machines one copy for each replica."""
    ranks = sizes[0] * (sizes[1] if len(sizes) > 1 else 1)
    result = 2 * sum(rows * cols for rows, cols in SHAPES)  # bytes of all results in bf16
    pool = workers(ranks)
    outcomes = pool.run(far, sizes, placements, machine, machine, bucket)
    assert all(counted == foretold for _, counted, foretold in outcomes)
    one_copy = (ranks // machine - 1) * result
    sent = sum(bytes_ for bytes_, _, _ in outcomes)
    assert one_copy <= sent <= 1.05 * one_copy
    assert max(bytes_ for bytes_, _, _ in outcomes) <= 1.5 * one_copy / ranks, "all ranks share the way out"
    plain = sum(bytes_ for bytes_, _, _ in pool.run(far, sizes, placements, machine, 0, bucket))
    assert plain == pytest.approx(one_copy * machine * sizes[0] / ranks, rel=0.01)


# ------------------------------------------------------------------ what ranks agree on


@pytest.mark.parametrize(
    ("local_ranks", "machine"),
    [
        ([(2, 0), (2, 1), (2, 0), (2, 1)], 2),
        ([(1, 0), (3, 0), (3, 1), (3, 2)], 0),
        ([(2, 0), (2, 0), (2, 1), (2, 1)], 0),
    ],
    ids=["equal machines", "unequal machines", "ranks that are not numbered machine by machine"],
)
@on_ranks(4)
def test_something_is_passed_on_among_equal_machines_alone(local_ranks: list[tuple[int, int]], machine: int) -> None:
    """Each rank is told how many ranks its machine has, and which of them it is."""
    weights, (ranks, local_rank) = weights_on((4,), [Replicate()]), local_ranks[dist.get_rank()]
    with machines(ranks):
        os.environ["LOCAL_RANK"] = str(local_rank)
        optimizer = mm.Muon(list(weights.items()))
    optimizer.step()
    assert optimizer._runtime.ranks.machine == machine
    assert passes_on(optimizer) == bool(machine)


# ------------------------------------------------------------------ overlap


@pytest.mark.parametrize("bucket", [0.24, 0.12])
@on_ranks(4)
def test_results_travel_while_the_next_bucket_is_computed(bucket: float) -> None:
    """Counted are the transfers of results that are under way while a stage is computed."""
    weights = weights_on((4,), [Replicate()])
    with machines(2):
        optimizer = mm.Muon(list(weights.items()), memory_budget_mb=bucket)
    optimizer.step()
    owners = optimizer._runtime.connected.exchange
    communicator, compute = owners.communicator, owners._compute
    all_to_all, finish = communicator.start, communicator.finish
    going: set[int] = set()
    counts: list[int] = []

    def begun(moved: Any) -> Any:
        transfer = all_to_all(moved)
        if "scatter" in moved.name:
            going.add(id(transfer))
        return transfer

    def ended(transfer: Any) -> None:
        finish(transfer)
        going.discard(id(transfer))

    def computed(*arguments: Any) -> None:
        counts.append(len(going))
        compute(*arguments)

    communicator.start, communicator.finish, owners._compute = begun, ended, computed
    optimizer.step()
    assert not going
    stages = len(owners.schedule.stages)
    assert stages > 2
    assert counts == [0, *[1] * (stages - 1)]
