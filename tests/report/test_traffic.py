"""What a step sends is within 5 % of the least that any step could send in which one rank sees each whole matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import muonmesh as mm
from muonmesh.comm.storage import local_of
from tests.support.meshes import mesh_of
from tests.support.sent import Sent

COVERS = ("report.traffic.Traffic",)

RANKS, SHAPES = 4, [(64, 96)] * 8 + [(120, 32)] * 4
LAYOUTS: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    "ddp": ((4,), []),
    "fsdp": ((4,), [Shard(0)]),
    "hsdp": ((2, 2), [Replicate(), Shard(0)]),
    "tp": ((4,), [Shard(1)]),
    "fsdp and tp": ((2, 2), [Shard(0), Shard(1)]),
}


def least(weights: list[nn.Parameter]) -> int:
    """Elements that all ranks together must send, told from what each of them stores and from nothing else.

    Whoever orthogonalizes a matrix has to be sent what it does not store, once; and each other rank, of the result,
    what it stores. So it should be a rank that stores most.
    """
    total = 0
    for weight in weights:
        stored = torch.zeros(RANKS, dtype=torch.int64)
        stored[dist.get_rank()] = local_of(weight).numel()
        dist.all_reduce(stored)
        most = int(stored.max())
        total += (weight.numel() - most) + (int(stored.sum()) - most)
    return total


def sent(kind: str) -> tuple[float, float, int]:
    """Bytes that this rank sends in one step, those that its counts tell, and the least of all ranks together."""
    sizes, placements = LAYOUTS[kind]
    weights = []
    for number, shape in enumerate(SHAPES):
        value = torch.randn(shape, generator=torch.Generator().manual_seed(number))
        if placements:
            value = distribute_tensor(value, mesh_of(sizes), placements, src_data_rank=None)
        weights.append(nn.Parameter(value))
        weights[-1].grad = weights[-1].detach().clone()
    group = None if isinstance(weights[0], DTensor) else "world"
    optimizer = mm.Muon(weights, process_group=group, compute_dtype=torch.float32, memory_budget_mb=0.48)
    optimizer.step()
    with Sent(RANKS) as collectives:
        optimizer.step()
    return collectives.bytes, optimizer.counts.bytes_sent, 4 * least(weights)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_step_sends_hardly_more_than_the_least_possible(workers, kind: str) -> None:
    ranks = workers(RANKS).run(sent, kind)
    bound = ranks[0][2]
    assert bound <= sum(counted for _, counted, _ in ranks) <= sum(issued for issued, _, _ in ranks) < 1.05 * bound
    busiest = max(issued for issued, _, _ in ranks)
    assert busiest < 1.05 * bound / RANKS, "some rank sends more than its part"
