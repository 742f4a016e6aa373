"""Teams of several ranks in what `explain` tells; nothing plans them yet, so the plan is made here."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

import muonmesh as mm
from muonmesh.layout import make_plan
from muonmesh.report.explain import explain
from muonmesh.step.connection import plan


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
        assert f"rank {rank} of 2: 3 of 4 orthogonalisations" in text
        assert count == 3  # it takes part in both teams, and has one matrix to itself
        assert flops[0] == flops[1]
        assert owners == [{1: 2, 0: 1}, {1: 1}]


def test_a_team_of_one_is_told_as_an_owner(workers) -> None:
    asked = {(0, 0): (0,), (0, 1): (0,), (0, 2): (1,), (1, 0): (1,)}
    for text, *_ in workers(2).run(explained, asked):
        assert "rank 0: 2, rank 1: 1" in text
        assert "ranks" not in text.replace("ranks 1", "")
