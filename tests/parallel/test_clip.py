"""Clipping: norms over all shards, each element once, and Muon's gradients left alone by default."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import muonmesh as mm
from tests import problem

MUON = [name for name, (_, spec) in problem.PARAMETERS.items() if spec != "adamw"]


def clipped(layout: str, max_norm: float, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    model, group = problem.hold(layout, problem.initial())
    optimizer = mm.Muon(problem.groups(model), process_group=group, **problem.SETTINGS)
    for name, gradient in problem.gradients(4).items():
        model.get_parameter(name).grad = problem.placed_like(model.get_parameter(name), gradient)
    norms = optimizer.clip_grad_norm_(max_norm, **options)
    assert norms.item() == pytest.approx(float(norms), nan_ok=True)
    values = [math.nan if n is None else float(n) for n in (norms.total, norms.muon, norms.adamw)]
    return values, {name: problem.whole(p.grad) for name, p in model.named_parameters()}


def expected(names: list[str]) -> float:
    return math.sqrt(sum(float(problem.gradients(4)[name].double().square().sum()) for name in names))


@pytest.mark.parametrize("policy", ["adamw_only", "all", "separate"])
@pytest.mark.parametrize(("ranks", "layout"), [(2, "ddp"), (2, "fsdp"), (4, "fsdp"), (4, "shard1")])
def test_norms_and_clipped_gradients_are_those_of_one_process(workers, ranks: int, layout: str, policy: str) -> None:
    adamw = [name for name in problem.PARAMETERS if name not in MUON]
    alone_norms, alone = clipped("local", 1.5, policy=policy)
    assert alone_norms == pytest.approx([expected([*problem.PARAMETERS]), expected(MUON), expected(adamw)], rel=1e-12)
    for norms, gradients in workers(ranks).run(clipped, layout, 1.5, policy=policy):
        assert norms == pytest.approx(alone_norms, rel=1e-12)
        assert problem.differing(gradients, alone) == []


def test_what_each_policy_scales() -> None:
    raw = problem.gradients(4)
    for policy in ("adamw_only", "all", "separate"):
        _, gradients = clipped("local", 1.5, policy=policy)
        factors = {name: float(gradients[name].norm() / raw[name].norm()) for name in raw}
        muon, adamw = factors["even"], factors["embedding"]
        norms = {"adamw_only": (None, "adamw"), "all": ("total", "total"), "separate": ("muon", "adamw")}[policy]
        values = dict(zip(("total", "muon", "adamw"), clipped("local", math.inf)[0], strict=True))
        for factor, norm in zip((muon, adamw), norms, strict=True):
            assert factor == pytest.approx(1.0 if norm is None else 1.5 / values[norm], rel=1e-5)
        if policy == "adamw_only":
            assert all(torch.equal(gradients[name], raw[name]) for name in MUON)


def test_small_gradients_are_not_scaled_and_torch_agrees() -> None:
    _, gradients = clipped("local", 1e9, policy="all")
    assert problem.differing(gradients, problem.gradients(4)) == []
    model, _ = problem.hold("local", problem.initial())
    for name, gradient in problem.gradients(4).items():
        model.get_parameter(name).grad = gradient
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.5)
    _, ours = clipped("local", 1.5, policy="all")
    for name, parameter in model.named_parameters():
        assert torch.allclose(ours[name], parameter.grad, rtol=1e-5)


def test_norms_false_measures_only_what_the_policy_needs() -> None:
    (total, muon, adamw), _ = clipped("local", 1.5, norms=False)
    assert math.isnan(total)
    assert math.isnan(muon)
    assert adamw > 0


@pytest.mark.parametrize("max_norm", [-1.0, math.nan, "1", None])
def test_a_bad_max_norm_is_refused(max_norm: Any) -> None:
    with pytest.raises(ValueError, match="max_norm"):
        clipped("local", max_norm)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="policy"):
        clipped("local", 1.0, policy="muon_only")
