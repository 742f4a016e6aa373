"""What `Muon.explain` says of the size of an elementwise step is true of any gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import muonmesh as mm
from muonmesh.numerics.rules import RULES

COVERS = ("report.explain.explain", "numerics.rules.adamw.AdamWRule.largest_step")

RATE = 1e-3


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999), (0.0, 0.999), (0.5, 0.9)])
def test_no_step_of_adamw_is_larger_than_its_bound_and_some_come_near_it(betas: tuple[float, float]) -> None:
    """The bound was lr, and a gradient after many steps without any took a step of 3.2 times lr with torch's betas."""
    vector = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = mm.Muon([{"params": [vector], "algorithm": "adamw"}], lr=RATE, adamw_betas=betas, weight_decay=0.0)
    (row,) = optimizer.explain().rows
    steps, largest = 4000, 0.0
    for step in range(steps):  # the gradients for which Cauchy and Schwarz's inequality is an equation
        growth = (betas[0] / betas[1]) ** (steps - 1 - step) if betas[0] else float(step == steps - 1)
        vector.grad = torch.full_like(vector, 1e6 * growth if step else max(growth, 1e-9))
        before = vector.detach().clone()
        optimizer.step()
        largest = max(largest, float((vector.detach() - before).square().mean().sqrt()))
    assert 0.95 * row.rms < largest <= 1.0001 * row.rms
    assert f"≤{row.rms:.1e}" in str(optimizer.explain())


def test_moments_for_which_no_step_is_the_largest_have_no_bound() -> None:
    optimizer = mm.Muon([{"params": [nn.Parameter(torch.zeros(3))], "algorithm": "adamw"}], adamw_betas=(0.95, 0.9))
    (row,) = optimizer.explain().rows
    assert math.isnan(row.rms)
    assert "≤" not in str(optimizer.explain())


def test_a_rule_of_ones_own_has_a_bound_only_if_it_says_so() -> None:
    """It had AdamW's, also where its steps are as large as the gradients."""

    @dataclass(frozen=True)
    class GradientDescent(mm.ElementwiseRule):
        def update(self, gradient: Tensor, state: Mapping[str, Tensor], count: Tensor) -> Tensor:
            return gradient

    @dataclass(frozen=True)
    class Signs(GradientDescent):
        def largest_step(self) -> float:
            return float(self.lr)

        def update(self, gradient: Tensor, state: Mapping[str, Tensor], count: Tensor) -> Tensor:
            return gradient.sign()

    bounds = []
    for name, rule in (("descent", GradientDescent), ("signs", Signs)):
        mm.register_rule(name)(rule)
        optimizer = mm.Muon([{"params": [nn.Parameter(torch.zeros(3))], "algorithm": name}], lr=RATE)
        bounds.append(optimizer.explain().rows[0].rms)
        del RULES[name]
    assert math.isnan(bounds[0])
    assert bounds[1] == RATE
