"""Teams of several ranks on one matrix: they have the bits of one rank, and `explain` tells of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import muonmesh as mm
from muonmesh.layout import make_plan
from muonmesh.numerics.kernels import blocked
from muonmesh.report.explain import explain
from muonmesh.step.connection import plan
from tests import problem
from tests.samples import one_in

# Rows that nothing divides, more and fewer columns; what no team can take; several in one parameter.
SHAPES: dict[str, tuple[tuple[int, int], object]] = {
    "wide": ((401, 530), "whole"),
    "tall": ((900, 390), "whole"),
    "square": ((512, 512), "whole"),
    "pair": ((840, 512), ("rows", 420, 420)),
    "small": ((40, 30), "whole"),
}
ALWAYS = mm.Teams(most=4, rates=mm.Rates(flops=1.0, bytes=1e18))
"""Gathering costs nothing."""


def explained(asked: dict[tuple[int, int], tuple[int, ...]]) -> tuple[str, int, dict[int, int], list[dict[int, int]]]:
    weights = [("qkv", nn.Parameter(torch.ones(12, 4))), ("up", nn.Parameter(torch.ones(8, 4)))]
    group = {"params": weights, "matrices": [("rows", 4, 4, 4), "whole"]}
    optimizer = mm.Muon([group], process_group="world")
    planned = plan(optimizer.param_groups, optimizer._kept)
    teamed = make_plan(planned.plan.parameters, bucket_elements=100, _teams=asked)
    told = explain(optimizer.param_groups, dataclasses.replace(planned, plan=teamed), optimizer._kept.precision)
    return str(told), told.orthogonalizations, told.flops, [row.owners for row in told.rows]


def test_explain_shows_teams(workers) -> None:
    asked = {(0, 0): (1, 0), (0, 1): (1,), (0, 2): (0,), (1, 0): (1, 0)}
    for rank, (text, count, flops, owners) in enumerate(workers(2).run(explained, asked)):
        assert "rank 0: 1, rank 1: 1, ranks 1+0: 1" in text
        assert "ranks 1+0  " in text
        own = ("1 of 4 orthogonalisations, parts of 2 more with their owners", "3 of 4 orthogonalisations")[rank]
        assert f"rank {rank} of 2: {own}, " in text, "those of all ranks add up to 4"
        assert count == 3  # it takes part in both teams, and has one matrix to itself
        assert flops[0] == flops[1]
        assert owners == [{1: 2, 0: 1}, {1: 1}]


def test_a_team_of_one_is_told_as_an_owner(workers) -> None:
    asked = {(0, 0): (0,), (0, 1): (0,), (0, 2): (1,), (1, 0): (1,)}
    for text, *_ in workers(2).run(explained, asked):
        assert "rank 0: 2, rank 1: 1" in text
        assert "ranks" not in text.replace("ranks 1", "")


# ------------------------------------------------------------------ steps


def values(seed: int, names: Iterable[str] = SHAPES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(SHAPES[name][0], generator=generator) for name in names}


def stepped(held: dict[str, nn.Parameter], dtype: torch.dtype, **settings: object) -> mm.Muon:
    group = {"params": list(held.items()), "matrices": [SHAPES[name][1] for name in held], "algorithm": "muon"}
    optimizer = mm.Muon([group], lr=0.1, compute_dtype=dtype, bucket_cap_mb=1.0, **settings)
    for step in range(2):
        for name, gradient in values(1 + step, held).items():
            held[name].grad = problem.placed_like(held[name], gradient)
        optimizer.step()
    return optimizer


def together(
    placements: list[Placement], dtype: torch.dtype, rows: int, coefficients: str, kernels: str, names: Sequence[str]
) -> tuple[list[str], list[int], int]:
    """Step with teams and alone; return what differs, the sizes of the teams and how many products were gathered."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocked, "ROWS", rows)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        shared = {
            name: nn.Parameter(distribute_tensor(value, mesh, placements, src_data_rank=None))
            for name, value in values(0, names).items()
        }
        settings = {"ns_coefficients": coefficients, "kernels": kernels}
        optimizer = stepped(shared, dtype, exchange=ALWAYS, **settings)
        alone = {name: nn.Parameter(value) for name, value in values(0, names).items()}
        stepped(alone, dtype, process_group="local", **settings)
    assert optimizer._kept.planned is not None
    sizes = [len(assignment.team) for assignment in optimizer._kept.planned.plan.assignments]
    differing = problem.differing(
        {n: problem.whole(p) for n, p in shared.items()}, {n: p.data for n, p in alone.items()}
    )
    return differing, sizes, optimizer.counts.products_gathered


@pytest.mark.parametrize("dtype", one_in(2, [torch.bfloat16, torch.float32]), ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    ("ranks", "placement", "rows", "coefficients"),
    [
        (2, Shard(0), 128, "polar_express"),
        (4, Shard(1), 128, "polar_express"),
        (4, Replicate(), 64, "polar_express"),
        (2, Shard(0), 128, "deflated"),
    ],
    ids=["two ranks", "four ranks", "replicas", "deflated"],
)
def test_a_team_has_the_bits_of_one_rank(
    workers, ranks: int, placement: Placement, rows: int, coefficients: str, dtype: torch.dtype
) -> None:
    outcomes = workers(ranks).run(together, [placement], dtype, rows, coefficients, "auto", [*SHAPES])
    check_team(outcomes, ranks, least=9 if coefficients == "deflated" else 15)


@pytest.mark.parametrize(("ranks", "coefficients"), one_in(2, [(2, "deflated"), (4, "polar_express"), (4, "deflated")]))
def test_a_team_has_the_bits_of_one_rank_with_compiled_products(
    workers, products: None, ranks: int, coefficients: str
) -> None:
    """One matrix is so much larger than the others that it has a team, whatever it costs."""
    names = ["tall", "small"]
    outcomes = workers(ranks).run(together, [Shard(0)], torch.bfloat16, 128, coefficients, "compiled", names)
    check_team(outcomes, ranks, least=9)


def check_team(outcomes: list[tuple[list[str], list[int], int]], ranks: int, *, least: int) -> None:
    gathered = 0
    for differing, sizes, count in outcomes:
        assert differing == []
        assert max(sizes) == ranks
        assert sizes[-1] == 1, "a small matrix has one owner"
        gathered += count
    assert gathered >= least * ranks
