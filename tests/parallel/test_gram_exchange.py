"""exchange="gram": ranks sum X Xᵀ instead of moving X, and stay within bounds of the fp64 oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import muonmesh as mm
from muonmesh.comm.storage import local_of
from muonmesh.layout import FlatShards, Interval, MeshLayout
from muonmesh.numerics.coefficients import coefficient_schedule
from tests import problem
from tests.meshes import mesh_of
from tests.reference import reference_step

# name: (shape, mesh, placements, whether the Gram exchange fits)
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], list[Placement], bool]] = {
    "tall by rows": ((90, 24), (4,), [Shard(0)], True),
    "wide by cols": ((24, 90), (4,), [Shard(1)], True),
    "uneven": ((90, 24), (4,), [Shard(0)], True),
    "empty": ((17, 3), (4,), [Shard(0)], True),
    "one row": ((1, 40), (4,), [Shard(1)], True),
    "hsdp": ((90, 24), (2, 2), [Replicate(), Shard(0)], True),
    "twice": ((90, 24), (2, 2), [Shard(0), Shard(0)], True),
    "stack by cols": ((3, 8, 40), (4,), [Shard(2)], True),
    "short dim": ((24, 90), (4,), [Shard(0)], False),
    "both dims": ((90, 24), (2, 2), [Shard(0), Shard(1)], False),
    "replicated": ((90, 24), (4,), [Replicate()], False),
}
SETTINGS: dict[str, Any] = {"lr": 0.5, "weight_decay": 0.1, "momentum": 0.9}


def decaying(shape: tuple[int, ...], seed: int) -> Tensor:
    """A spectrum of four decades."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    return (u * torch.logspace(0, -4, s.shape[-1], dtype=torch.float64)) @ v


def stepped(name: str, exchange: Any, scale: float = 1.0) -> dict[str, Any]:
    shape, sizes, placements, _ = CASES[name]
    mesh = mesh_of(sizes)
    initial = decaying(shape, 0).float()
    weight = nn.Parameter(distribute_tensor(initial.clone(), mesh, placements, src_data_rank=None))
    optimizer = mm.Muon([{"params": [("w", weight)]}], exchange=exchange, compute_dtype=torch.float32, **SETTINGS)
    state: dict[str, Any] = {}
    expected = {"w": initial}
    coefficients = list(coefficient_schedule("polar_express", 5))
    for step in range(3):
        gradient = decaying(shape, 1 + step).float() * scale
        weight.grad = distribute_tensor(gradient, mesh, placements, src_data_rank=None)
        optimizer.step()
        options = {"algorithm": "muon", "coefficients": coefficients, **SETTINGS}
        expected, state = reference_step(expected, {"w": gradient}, state, {"w": options})
    result = problem.whole(weight)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, local_of(weight.detach()).clone())
    told, did = optimizer.explain(), optimizer.counts
    return {
        "result": result,
        "error": float((result - expected["w"]).norm() / (expected["w"] - initial).norm()),
        "replicas": all(torch.equal(parts[0], parts[2]) for _ in [0]) if name == "hsdp" else True,
        "told": (told.orthogonalizations, told.collectives, told.bytes_sent),
        "did": (did.orthogonalized, did.collectives, did.bytes_sent),
        "plan": (len(optimizer._kept.planned.plan.grams), str(told)) if optimizer._kept.planned is not None else None,
    }


@pytest.mark.parametrize("name", CASES)
def test_the_gram_exchange_is_as_accurate_as_an_owner(workers, name: str) -> None:
    outcomes = workers(4).run(stepped, name, "gram")
    matrices = CASES[name][0][0] if len(CASES[name][0]) == 3 else 1
    for outcome in outcomes:
        assert outcome["error"] < 1e-3
        assert outcome["replicas"]
        assert outcome["told"] == outcome["did"]
        assert outcome["plan"][0] == (matrices if CASES[name][3] else 0)
        assert torch.equal(outcome["result"], outcomes[0]["result"])
    if not CASES[name][3]:  # then it is the owner's, bit for bit
        owner = workers(4).run(stepped, name, "owner")[0]["result"]
        assert torch.equal(outcomes[0]["result"], owner)


@pytest.mark.parametrize("scale", [2.0**-90, 2.0**80])
def test_the_gram_exchange_does_not_see_magnitudes(workers, scale: float) -> None:
    plain, scaled = (workers(4).run(stepped, "tall by rows", "gram", s)[0]["result"] for s in (1.0, scale))
    assert torch.equal(plain, scaled)


def chosen(shape: tuple[int, ...], exchange: Any) -> tuple[int, int, float]:
    mesh = mesh_of((dist.get_world_size(),))
    weight = nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, [Shard(0)], src_data_rank=None))
    optimizer = mm.Muon([{"params": [("w", weight)]}], exchange=exchange)
    told = optimizer.explain()
    assert optimizer._kept.planned is not None
    return len(optimizer._kept.planned.plan.grams), told.bytes_sent, told.flops[0]


def test_auto_chooses_what_takes_less_time(workers) -> None:
    """Summing moves rows² numbers a segment, an owner rows × cols in all, both spread over the ranks."""
    thin, plump = (4096, 8), (96, 64)
    for shape, expected in ((thin, 1), (plump, 0)):
        assert {count for count, _, _ in workers(4).run(chosen, shape, "auto")} == {expected}
    thin_bytes = {how: workers(4).run(chosen, thin, how)[1][1] for how in ("owner", "auto")}
    assert thin_bytes["auto"] < 0.5 * thin_bytes["owner"]
    # Where arithmetic is all that counts, the work is divided over the ranks; where bytes are, squares lose.
    free_wire, free_arithmetic = mm.Rates(flops=1e9, bytes=1e15), mm.Rates(flops=1e18, bytes=1e9)
    assert workers(4).run(chosen, (8192, 64), free_wire)[0][0] == 1
    assert workers(4).run(chosen, (512, 256), free_arithmetic)[0][0] == 0


# ------------------------------------------------------------------ who takes part, in what order, with how much memory

SEVERAL = {"lr": 0.5, "weight_decay": 0.1, "momentum": 0.9, "exchange": "gram", "compute_dtype": torch.float32}


class Moved:
    """Counts what collectives are given, at torch.distributed, and keeps the ranks of each."""

    def __init__(self) -> None:
        self.collectives, self.bytes, self.ranks = 0, 0, set[tuple[int, ...]]()

    def __enter__(self) -> Moved:
        self._honest = dist.all_to_all_single
        dist.all_to_all_single = self._noted
        return self

    def __exit__(self, *error: object) -> None:
        dist.all_to_all_single = self._honest

    def _noted(self, receive: Tensor, send: Tensor, *args: Any, **options: Any) -> Any:
        ranks = tuple(dist.get_process_group_ranks(options["group"]))
        self.collectives += 1
        self.ranks.add(ranks)
        size = send.numel() * send.element_size()
        self.bytes += size - size // len(ranks)  # one of the parts, which are equal, stays
        return self._honest(receive, send, *args, **options)


def in_sets(sets: list[tuple[int, ...]], each: int, bucket_cap_mb: float) -> dict[str, Any]:
    """Several matrices for each set of ranks, cut among them; ranks are linked through the sets."""
    rank = dist.get_rank()
    groups = {ranks: dist.new_group(ranks) for ranks in sets}
    mine = [(i, ranks) for i, ranks in enumerate(sets) if rank in ranks]
    named, expected, coefficients = [], {}, list(coefficient_schedule("polar_express", 5))
    for i, ranks in mine:
        mesh = DeviceMesh.from_group(groups[ranks], "cpu")
        for j in range(each):
            name = f"{min(ranks)}{max(ranks)}.{j}"
            whole = decaying((60 + 10 * i + j, 8 + j), 100 * i + j).float()
            named.append((name, nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None))))
            expected[name] = whole
    optimizer = mm.Muon([{"params": named}], bucket_cap_mb=bucket_cap_mb, **SEVERAL)
    state: dict[str, Any] = {}
    initial = expected
    for step in range(2):
        gradients = {}
        for name, weight in named:
            whole = decaying(tuple(weight.shape), 7 * step + sum(map(ord, name))).float()
            gradients[name] = whole
            weight.grad = distribute_tensor(whole, weight.device_mesh, [Shard(0)], src_data_rank=None)
        with Moved() as moved:
            optimizer.step()
        options = {name: {"algorithm": "muon", "coefficients": coefficients, **SETTINGS} for name in expected}
        expected, state = reference_step(expected, gradients, state, options)
    results = {name: problem.whole(weight) for name, weight in named}
    told, did, plan = optimizer.explain(), optimizer.counts, optimizer._kept.planned.plan
    (strategy,) = optimizer._kept.planned.exchange._strategies
    return {
        "results": results,
        "error": max(
            [0.0, *(float((results[n] - expected[n]).norm() / (expected[n] - initial[n]).norm()) for n in results)]
        ),
        "told": (told.collectives, told.bytes_sent, told.bytes_received),
        "did": (did.collectives, did.bytes_sent, did.bytes_received),
        "moved": (moved.collectives + 1, moved.bytes, moved.bytes),  # one for the flags
        "ranks": (plan.ranks, moved.ranks, {ranks for _, ranks in mine}),
        "memory": sum(memory.numel() for memory in strategy.memory.values()),
    }


@pytest.mark.parametrize(
    "sets",
    [
        [(0, 1), (1, 2), (0, 2)],
        [(1, 2), (0, 2), (0, 1), (0, 1, 2)],
        [(0, 1, 2)],
    ],
    ids=["ring", "ring and all", "one"],
)
def test_each_set_of_ranks_adds_up_its_own(workers, sets: list[tuple[int, ...]]) -> None:
    """In buckets of one matrix or of all, overlapping sets in one order on all ranks, and no bit depends on it."""
    found = {cap: workers(3).run(in_sets, sets, 4, cap) for cap in (1e-5, 0.002, 16.0)}
    for outcomes in found.values():
        for outcome in outcomes:
            assert outcome["error"] < 1e-3
            assert outcome["told"] == outcome["did"] == outcome["moved"]
            linked, took_part, shared = outcome["ranks"]
            assert linked == (0, 1, 2)
            assert took_part == shared
    for one, two, all_at_once in zip(*found.values(), strict=True):
        for name, result in one["results"].items():
            assert torch.equal(result, two["results"][name])
            assert torch.equal(result, all_at_once["results"][name])


def test_memory_is_that_of_a_bucket_and_not_of_the_model(workers) -> None:
    few, many, at_once = (
        workers(2).run(in_sets, [(0, 1)], each, cap)[0]["memory"] for each, cap in ((4, 1e-5), (12, 1e-5), (12, 16.0))
    )
    assert many < 2.5 * few  # the matrices grow with their number, too
    assert at_once > 3 * many


def on_axes(order: list[list[int]]) -> dict[str, Any]:
    """Matrices that are cut over the one axis of a mesh and replicated over the other, and one that both cut."""
    mesh = DeviceMesh("cpu", order, mesh_dim_names=("replicate", "shard"))
    places = {"a": [Replicate(), Shard(0)], "b": [Shard(0), Replicate()], "c": [Shard(0), Shard(0)]}
    first = decaying((70, 12), 0).float()
    named = [(n, nn.Parameter(distribute_tensor(first, mesh, p, src_data_rank=None))) for n, p in places.items()]
    optimizer = mm.Muon([{"params": named}], bucket_cap_mb=1e-5, **SEVERAL)
    for step in range(3):
        for name, weight in named:
            gradient = decaying((70, 12), 1 + step).float()
            weight.grad = distribute_tensor(gradient, mesh, places[name], src_data_rank=None)
        with Moved() as moved:
            optimizer.step()
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, [local_of(weight.detach()).clone() for _, weight in named])
    told, did = optimizer.explain(), optimizer.counts
    replicas = [(parts[r][0], parts[s][0]) for row in order for r, s in zip(order[0], row, strict=True)]
    replicas += [(parts[row[0]][1], parts[r][1]) for row in order for r in row]
    return {
        "replicas": all(torch.equal(a, b) for a, b in replicas),
        "sets": sorted(map(sorted, moved.ranks)),
        "told": (told.collectives, told.bytes_sent) == (did.collectives, did.bytes_sent),
        "moved": (did.collectives, did.bytes_sent) == (moved.collectives + 1, moved.bytes),
    }


@pytest.mark.parametrize("order", [[[0, 1, 2], [5, 3, 4]], [[0, 1], [2, 3], [4, 5]]], ids=["turned", "in order"])
def test_replicas_add_up_in_one_order_wherever_their_shards_are(workers, order: list[list[int]]) -> None:
    for rank, outcome in enumerate(workers(6).run(on_axes, order)):
        assert outcome["replicas"]
        row = next(sorted(row) for row in order if rank in row)
        column = next(sorted(column) for column in zip(*order, strict=True) if rank in column)
        assert outcome["sets"] == sorted([row, column, list(range(6))])
        assert outcome["told"]
        assert outcome["moved"]


def stands_aside() -> str:
    """Where the host does not wait, a rank whose groups are broken still sends what the others wait for."""
    mesh = mesh_of((2,))
    weight = nn.Parameter(distribute_tensor(decaying((90, 24), 0).float(), mesh, [Shard(0)], src_data_rank=None))
    optimizer = mm.Muon([{"params": [("w", weight)]}], **SEVERAL)
    optimizer._kept.waits = False
    gradient = distribute_tensor(decaying((90, 24), 1).float(), mesh, [Shard(0)], src_data_rank=None)
    for step in range(3):
        weight.grad = gradient.clone()
        if step == 1:
            before = local_of(weight.detach()).clone()
            if dist.get_rank() == 1:
                optimizer.param_groups[0]["lr"] = -1.0
        try:
            optimizer.step()
        except (ValueError, mm.PlanError) as error:
            assert step == 2
            assert torch.equal(before, local_of(weight.detach())), "something was written"
            return f"{type(error).__name__}: {error}"
    return "stepped"


def test_a_rank_that_cannot_follow_takes_part_in_the_sums(workers) -> None:
    other, culprit = workers(2).run(stands_aside)
    assert culprit.startswith("ValueError: ")
    assert other.startswith("PlanError: rank 1")


def cut_differently(borders: tuple[int, int], exchange: Any) -> tuple[int, Tensor]:
    """Two flat copies of a matrix of 24 columns, each cut at another element."""
    rank, size = dist.get_rank(), 90 * 24
    runs = [(0, borders[0]), (borders[0], size), (0, borders[1]), (borders[1], size)]
    intervals = tuple((Interval(low, high - low, 0),) for low, high in runs)
    within = MeshLayout.replicated((90, 24), (0, 1, 2, 3))
    sizes = tuple(high - low for low, high in runs)
    layout = FlatShards(within, intervals, sizes, replicas=((0, 1), (2, 3)))
    mine = slice(*runs[rank])
    weight = nn.Parameter(decaying((90, 24), 0).float().flatten()[mine].clone())
    settings = SEVERAL | {"exchange": exchange}
    optimizer = mm.Muon([{"params": [("w", weight)]}], layouts={"w": layout}, **settings)
    for step in range(3):
        weight.grad = decaying((90, 24), 1 + step).float().flatten()[mine].clone()
        optimizer.step()
    parts: list[Any] = [None] * 4
    dist.all_gather_object(parts, weight.detach())
    assert torch.equal(torch.cat(parts[:2]), torch.cat(parts[2:])), "the copies have drifted apart"
    return len(optimizer._kept.planned.plan.grams), torch.cat(parts[:2])


@pytest.mark.parametrize("borders", [(24 * 40, 24 * 40), (24 * 40, 24 * 30), (24 * 40, 24 * 40 + 5)])
def test_copies_that_are_cut_differently_have_an_owner(workers, borders: tuple[int, int]) -> None:
    """Their ranks would add up other sums, and a part of a column is no slab at all."""
    outcomes = workers(4).run(cut_differently, borders, "gram")
    fits = borders[0] == borders[1]
    assert {grams for grams, _ in outcomes} == {1 if fits else 0}
    if not fits:
        owner = workers(4).run(cut_differently, borders, "owner")[0][1]
        assert torch.equal(outcomes[0][1], owner)
