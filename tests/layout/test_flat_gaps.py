"""Elementwise rules leave alone what a flat buffer has beside the parameters: padding, and what others keep there."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import muonmesh as mm
from muonmesh.layout import Interval, MeshLayout

COVERS = ("layout.flat.occupied", "step.elementwise_step.step_elementwise")

SIZE = 20
PLACES = {"padded": [slice(0, 13)], "between": [slice(3, 9), slice(12, 19)], "nowhere": []}
SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": torch.float32},
    "masters": {"dtype": torch.bfloat16, "master_dtype": torch.float32},
    "rounded stochastically": {"dtype": torch.bfloat16, "stochastic_rounding": 0},
}


def buffer_layout(places: list[slice]) -> mm.FlatShards:
    """The layout of one vector whose intervals lie in these places of the buffer."""
    within = MeshLayout.replicated((sum(place.stop - place.start for place in places),), (0,))
    first, intervals = 0, []
    for place in places:
        intervals.append(Interval(first, place.stop - place.start, place.start))
        first += place.stop - place.start
    return mm.FlatShards(within, (tuple(intervals),), (SIZE,))


def filled_buffer(seed: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


CASES = [(kind, location, False) for kind in SETTINGS for location in PLACES]
CASES += [("fp32", "between", True), ("masters", "between", True)]  # several with stochastic rounding are refused


@pytest.mark.parametrize(("kind", "location", "several"), CASES)
def test_what_is_no_parameter_stays(kind: str, location: str, several: bool) -> None:
    """Weights of 9 decayed there, and a gradient of NaN gave NaN."""
    settings, places = dict(SETTINGS[kind]), PLACES[location]
    dtype = settings.pop("dtype")
    inside = torch.zeros(SIZE, dtype=torch.bool)
    for place in places:
        inside[place] = True
    start = torch.where(inside, filled_buffer(0), 9.0).to(dtype)
    flat = nn.Parameter(start.clone())
    parameters = [mm.FlatParameter(str(place.start), buffer_layout([place])) for place in places]
    entry = parameters if several else buffer_layout(places)
    group = {"params": [("flat", flat)], "algorithm": "adamw", "weight_decay": 0.1}
    optimizer = mm.Muon([group], lr=0.1, layouts={"flat": entry}, process_group="local", **settings)
    expected = [nn.Parameter(start[place].double()) for place in places]
    oracle = torch.optim.AdamW(expected, lr=0.1, betas=(0.9, 0.95), weight_decay=0.1) if expected else None
    for step in range(3):
        gradient = torch.where(inside, filled_buffer(step + 1), math.nan).to(dtype)
        flat.grad = gradient.clone()
        optimizer.step()
        for parameter, place in zip(expected, places, strict=True):
            parameter.grad = gradient[place].double()
        if oracle is not None:
            oracle.step()
        figures = optimizer.metrics()
    assert bool((flat[~inside] == 9).all())
    tolerance = 1e-5 if dtype == torch.float32 else 0.05  # weights of 1 in bf16, three times rounded
    for parameter, place in zip(expected, places, strict=True):
        torch.testing.assert_close(flat[place].double(), parameter, rtol=tolerance, atol=tolerance)
    assert all(math.isfinite(figure) for figure in figures.values())


def test_parameters_of_two_groups_may_share_a_buffer() -> None:
    """AdamW stepped the matrix too, and the last master to be rounded brought back what the others had changed."""
    memory = filled_buffer(0).bfloat16()
    matrix, bias, gain = (nn.Parameter(memory[:]) for _ in range(3))
    within = MeshLayout.replicated((3, 4), (0,))
    layouts = {
        "matrix": mm.FlatShards(within, ((Interval(0, 12, 0),),), (SIZE,)),
        "bias": buffer_layout([slice(12, 15)]),
        "gain": buffer_layout([slice(15, 20)]),
    }
    groups = [
        {"params": [("matrix", matrix)], "algorithm": "muon"},
        {"params": [("bias", bias), ("gain", gain)], "algorithm": "adamw"},
    ]
    settings: dict[str, Any] = {"lr": 0.1, "process_group": "local", "master_dtype": torch.float32}
    optimizer = mm.Muon(groups, layouts=layouts, **settings)
    alone = {"matrix": memory[:12].view(3, 4), "bias": memory[12:15], "gain": memory[15:]}
    apart = {name: nn.Parameter(part.clone()) for name, part in alone.items()}
    other = mm.Muon(
        [{**group, "params": [(name, apart[name]) for name, _ in group["params"]]} for group in groups], **settings
    )
    for step in range(3):
        gradient = filled_buffer(step + 1).bfloat16()
        matrix.grad = bias.grad = gain.grad = gradient
        for name, place in {"matrix": slice(0, 12), "bias": slice(12, 15), "gain": slice(15, 20)}.items():
            apart[name].grad = gradient[place].view(apart[name].shape).clone()
        optimizer.step()
        other.step()
        assert torch.equal(memory, torch.cat([parameter.detach().flatten() for parameter in apart.values()]))
