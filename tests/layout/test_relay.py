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
from tests.support.samples import one_in
from tests.support.sent import Sent

COVERS = (
    "layout.relay.Relay",
    "comm.ranks.ranks_of_a_machine",
)

FP32: dict[str, Any] = {"compute_dtype": torch.float32}
EIGHT: dict[str, tuple[tuple[int, ...], Any]] = {
    "eight replicas": ((8,), lambda n: [layouts.R]),
    "four replicas of pairs": ((4, 2), lambda n: [layouts.R, layouts.S(0)]),
    "two replicas of four": ((2, 4), lambda n: [layouts.R, layouts.S(0)]),
    "pairs of four replicas": ((2, 4), lambda n: [layouts.S(0), layouts.R]),
    "hsdp over tp": ((2, 2, 2), lambda n: [layouts.R, layouts.strided(0, 2), layouts.S(0)]),
}
BUCKETS = {"one exchange": None, "some": 0.32, "many": 0.016}


# ------------------------------------------------------------------ bits


def stepped(holding: layouts.Held, settings: dict[str, Any], machine: int) -> tuple[list[str], Any, Any, int]:
    with machines(machine):
        optimizer = mm.Muon(holding.groups, **holding.settings, **{**problem.SETTINGS, **settings})
    for step in range(4):
        holding.give(problem.zeroed(step))
        optimizer.step()
    settings = {key: value for key, value in settings.items() if key != "shard_state"}
    differing = problem.differing(holding.whole(optimizer), problem.alone(4, problem.zeroed, **settings))
    explanation, did = optimizer.explain(), optimizer.counts
    promised = explanation.collectives, explanation.bytes_sent, explanation.bytes_received
    passes = passes_on(optimizer)
    assert ("enter each machine once" in str(explanation)) == bool(explanation.relayed)
    return differing, promised, (did.collectives, did.bytes_sent, did.bytes_received), passes


def passes_on(optimizer: mm.Muon) -> bool:
    """Whether results reach this rank that it sends to other ranks."""
    plan, me = optimizer._runtime.connected.exchange.plan, dist.get_rank()
    back = [plan.routes(bucket, me, gather=False) for bucket in range(len(plan.buckets))]
    sent = [leg.assignment for routes in back for peer, legs in routes.assembled.items() if peer != me for leg in legs]
    return any(plan.assignments[number].owner != me for number in sent)


def on_mesh(name: str, settings: dict[str, Any], machine: int, hold: str = "dtensors") -> Any:
    sizes, placements = {**layouts.MESHES, **EIGHT}[name]
    placed = lambda _, shape: placements(len(shape))  # noqa: E731
    holding = getattr(layouts, hold)(problem.PARAMETERS, problem.initial(), mesh_of(sizes), placed)
    return stepped(holding, settings, machine)


def in_flat_buffers(settings: dict[str, Any], machine: int) -> Any:
    return stepped(layouts.flat(problem.PARAMETERS, problem.initial(), tensor_parallel=2), settings, machine)


def check(outcomes: list[Any], *, passes: bool = True) -> None:
    for differing, promised, did, _ in outcomes:
        assert differing == []
        assert did == promised
    assert any(passed for *_, passed in outcomes) == passes, "nothing was passed on, so nothing is tested"


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("name", ["hsdp", "replicate inside", "all replicated", "three axes", "experts"])
def test_bit_for_bit_on_four_ranks(workers, name: str, bucket: str) -> None:
    check(workers(4).run(on_mesh, name, {**FP32, "memory_budget_mb": BUCKETS[bucket]}, 2))


@pytest.mark.parametrize(
    ("name", "machine", "bucket"),
    one_in(7, itertools.product(EIGHT, (2, 4, 1), BUCKETS)),
)
def test_bit_for_bit_on_eight_ranks(workers, name: str, machine: int, bucket: str) -> None:
    one_hop = machine == 1 and name == "eight replicas" and bucket == "one exchange"
    check(workers(8).run(on_mesh, name, {**FP32, "memory_budget_mb": BUCKETS[bucket]}, machine), passes=not one_hop)


@pytest.mark.parametrize(
    "settings",
    [{"compute_dtype": torch.bfloat16}, {"compute_dtype": torch.float32, "shard_state": True}],
    ids=["bf16", "shared state"],
)
def test_bit_for_bit_with_other_settings(workers, settings: dict[str, Any]) -> None:
    check(workers(4).run(on_mesh, "all replicated", {**settings, "memory_budget_mb": 0.32}, 2))


def test_bit_for_bit_as_declared_shards(workers) -> None:
    check(workers(4).run(on_mesh, "hsdp", {**FP32, "memory_budget_mb": 0.32}, 2, "declared"))


def test_replicas_that_are_cut_at_other_places_are_sent_results_by_owners(workers) -> None:
    check(workers(4).run(in_flat_buffers, {**FP32, "memory_budget_mb": 0.32}, 2), passes=False)


# ------------------------------------------------------------------ sums over matrices


def with_sums(name: str, machine: int, bucket: float) -> list[str]:
    """AdaMuon adds up squares of each whole matrix before weights are written; compared with no machines."""
    results = []
    for ranks in (machine, 0):
        sizes, placements = {**layouts.MESHES, **EIGHT}[name]
        placed = lambda _, shape, placements=placements: placements(len(shape))  # noqa: E731
        holding = layouts.dtensors(problem.PARAMETERS, problem.initial(), mesh_of(sizes), placed)
        holding.groups[0]["algorithm"] = "adamuon"
        with machines(ranks):
            optimizer = mm.Muon(holding.groups, **holding.settings, lr=0.02, memory_budget_mb=bucket, **FP32)
        for step in range(3):
            holding.give(problem.gradients(step))
            optimizer.step()
        results.append(holding.whole(optimizer))
        assert optimizer._runtime.ranks.machine == ranks
    return problem.differing(*results)


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("name", ["hsdp", "all replicated"])
def test_bit_for_bit_where_sums_come_first(workers, name: str, bucket: str) -> None:
    assert workers(4).run(with_sums, name, 2, BUCKETS[bucket]) == [[]] * 4


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


@pytest.mark.parametrize("bucket", [256.0, 0.8, 0.16], ids=["one exchange", "some", "many"])
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


def stepped_where(local_ranks: list[tuple[int, int]]) -> tuple[int, bool]:
    """Step where each rank is told how many ranks its machine has, and which of them it is."""
    weights = weights_on((4,), [Replicate()])
    with machines(local_ranks[dist.get_rank()][0]):
        os.environ["LOCAL_RANK"] = str(local_ranks[dist.get_rank()][1])
        optimizer = mm.Muon(list(weights.items()))
    optimizer.step()
    return optimizer._runtime.ranks.machine, passes_on(optimizer)


@pytest.mark.parametrize(
    "local_ranks",
    [[(1, 0), (3, 0), (3, 1), (3, 2)], [(2, 0), (2, 0), (2, 1), (2, 1)]],
    ids=["unequal machines", "ranks that are not numbered machine by machine"],
)
def test_nothing_is_passed_on_among(workers, local_ranks: list[tuple[int, int]]) -> None:
    assert workers(4).run(stepped_where, local_ranks) == [(0, False)] * 4


def test_something_is_passed_on_among_equal_machines(workers) -> None:
    assert workers(4).run(stepped_where, [(2, 0), (2, 1), (2, 0), (2, 1)]) == [(2, True)] * 4


# ------------------------------------------------------------------ overlap


def under_way(bucket: float) -> tuple[int, list[int]]:
    """How many stages there are, and of each how many transfers of results are under way while it is computed."""
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
    return len(owners.schedule.stages), counts


@pytest.mark.parametrize("bucket", [0.24, 0.12])
def test_results_travel_while_the_next_bucket_is_computed(workers, bucket: float) -> None:
    for stages, counts in workers(4).run(under_way, bucket):
        assert stages > 2
        assert counts == [0, *[1] * (stages - 1)]
