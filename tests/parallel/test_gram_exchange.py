"""exchange="gram": ranks sum X Xᵀ instead of moving X, and stay within bounds of the fp64 oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import muonmesh as mm
from muonmesh.comm.storage import local_of
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
