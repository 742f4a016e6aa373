"""Which matrices several ranks are given together, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import muonmesh as mm
from muonmesh.layout import MeshLayout, Parameter, Plan, Teams, cost, gathered, make_plan, split_matrices
from muonmesh.layout.layout import Shard

QUINTICS = [3] * 5
FAST = mm.Rates(flops=1e12, bytes=1e12)
SLOW = mm.Rates(flops=1e12, bytes=1e8)


def planned(teams: Teams | None, *, large: int = 1, small: int = 8, ranks: int = 8, may_share: bool = True) -> Plan:
    """A plan of some matrices of 4096×4096 and of 512×512 that all ranks share."""
    parameters = []
    for name, size, count in (("large", 4096, large), ("small", 512, small)):
        for number in range(count):
            layout = MeshLayout((size, size), (ranks,), tuple(range(ranks)), (Shard(0),))
            flops = cost(size, size, degrees=QUINTICS, gram=False)
            products = gathered(size, size, degrees=QUINTICS, gram=False) if may_share else 0
            matrices = split_matrices(name, (size, size), None)
            entry = Parameter(f"{name}{number}", layout, layout, matrices, (flops,), "", gathered=(products,))
            parameters.append(entry)
    return make_plan(parameters, bucket_elements=1 << 30, teams=teams)


def sizes(plan: Plan) -> list[int]:
    return [len(assignment.team) for assignment in plan.assignments]


def test_a_matrix_that_would_make_its_owner_the_last_gets_a_team() -> None:
    plan = planned(Teams(8, FAST))
    assert sizes(plan) == [8] + [1] * 8
    assert max(plan.loads.values()) < 1.1 * sum(plan.loads.values()) / 8
    assert sizes(planned(Teams(4, FAST))) == [4] + [1] * 8, "at most as many as are allowed"


@pytest.mark.parametrize("teams", [None, Teams(1, FAST), Teams(8, SLOW)], ids=["owners", "of one", "slow"])
def test_without_gain_it_keeps_one_owner(teams: Teams | None) -> None:
    assert sizes(planned(teams)) == [1] * 9


def test_matrices_that_fit_or_cannot_be_divided_keep_one_owner() -> None:
    assert sizes(planned(Teams(8, FAST), large=8, small=0)) == [1] * 8, "each rank has one already"
    assert sizes(planned(Teams(8, FAST), may_share=False)) == [1] * 9


def test_a_team_lies_within_one_node() -> None:
    """Consecutive ranks, whose first is a multiple of the size; and teams take turns."""
    plan = planned(Teams(4, FAST), large=2, small=0, ranks=8)
    assert [sorted(assignment.team) for assignment in plan.assignments] in (
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[4, 5, 6, 7], [0, 1, 2, 3]],
    )


def test_what_is_gathered_is_counted_as_time() -> None:
    teams = Teams(8, mm.Rates(flops=100.0, bytes=10.0))
    assert teams.load(1000, 50, 2, 1) == 1000
    assert teams.load(1000, 50, 2, 4) == 1000 // 4 + 50 * 2 * 3 // 4 * 10


@pytest.mark.parametrize("most", [0, 3, -2, 2.0])
def test_a_team_has_a_power_of_two_ranks(most: float) -> None:
    with pytest.raises(ValueError, match=r"exchange=Teams\(most=...\).*power of two"):
        mm.Muon([nn.Parameter(torch.ones(4, 4))], exchange=mm.Teams(most=most))  # type: ignore[arg-type]


def test_a_small_matrix_is_left_to_one_rank() -> None:
    class Alone:
        size, index = 2, 0

        def gather(self, mine: torch.Tensor, everyone: torch.Tensor) -> None:
            raise AssertionError("nothing may be gathered")

    with pytest.raises(ValueError, match="share: found a matrix of 40 rows on cpu; needed 384 rows"):
        mm.orthogonalize(torch.ones(40, 60), share=Alone())
