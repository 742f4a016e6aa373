"""Attention weights as one matrix for each head: by an override, and by DeepSpeed's tag."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import muonmesh as mm
from muonmesh.numerics.coefficients import coefficient_schedule
from tests.support import reference


def splits_by_name(module: nn.Module, **settings: Any) -> dict[str, Any]:
    matrices_of = {}
    for group in mm.split_params(module, **settings):
        if group["algorithm"] == "muon":
            matrices_of |= dict(zip(group["param_names"], group["matrices"], strict=True))
    return matrices_of


def test_a_head_is_stepped_as_a_matrix_of_its_own_and_has_its_scale() -> None:
    """Of six heads, in the fused weight of torch; the values stay one matrix."""
    module = nn.MultiheadAttention(24, 6, bias=False)
    gradient = torch.randn(72, 24, generator=torch.Generator().manual_seed(1))
    before = module.in_proj_weight.detach().clone()
    module.in_proj_weight.grad = gradient.clone()
    settings: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.0}
    heads = {"in_proj_weight": {"algorithm": "muon", "matrices": ("rows", *[4] * 12, 24)}}
    mm.from_model(module, overrides=heads, compute_dtype=torch.float32, **settings).step()
    expected = before.double()
    for low, high in [(4 * head, 4 * head + 4) for head in range(12)] + [(48, 72)]:
        expected[low:high], _ = reference.muon(
            before[low:high].double(),
            gradient[low:high].double(),
            {},
            coefficients=[tuple(step) for step in coefficient_schedule("polar_express", 5)],
            **settings,
        )
    torch.testing.assert_close(module.in_proj_weight.detach().double(), expected, atol=2e-4, rtol=0)


def test_deepspeeds_tag_is_honoured_whoever_steps() -> None:
    """`muon_num_heads` on a parameter, of modules that are not known too; half heads and fused weights are refused."""
    tagged = nn.Sequential(nn.Linear(24, 24, bias=False), nn.Linear(24, 24, bias=False), nn.Linear(24, 5))
    tagged[0].weight.muon_num_heads = 6  # type: ignore[assignment]
    for settings in ({}, {"overrides": {"1.weight": {"algorithm": "muon", "matrices": ("heads", 2, 0)}}}):
        assert splits_by_name(tagged, **settings)["0.weight"] == ("heads", 6, 0)
    overrides = {"0.weight": {"algorithm": "muon", "matrices": "whole"}}
    assert splits_by_name(tagged, overrides=overrides)["0.weight"] == "whole"
    for wrong in (5, 0, True, "6"):
        tagged[0].weight.muon_num_heads = wrong  # type: ignore[assignment]
        with pytest.raises(ValueError, match=rf"^0\.weight: found muon_num_heads={wrong!r} .* needed whole heads"):
            mm.split_params(tagged)
    fused = nn.MultiheadAttention(24, 6)
    fused.in_proj_weight.muon_num_heads = 6  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"in_proj_weight: found muon_num_heads=6 .*'rows', 24, 24, 24"):
        mm.split_params(fused)
