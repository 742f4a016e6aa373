"""Flat shards that are views of parameters, as Megatron's distributed optimizer lists fp32 weights."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import muonmesh as mm

SHAPES = {"matrix": (5, 7), "vector": (3,)}
BORDERS = {"matrix": (0, 10, 35), "vector": (0, 0, 3)}  # the first rank holds nothing of the vector


def trained(how: str) -> list[torch.Tensor]:
    """Two steps of shards that are views of parameters, or parameters themselves."""
    rank = dist.get_rank()
    tensors = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        generator = torch.Generator().manual_seed(number)
        low, high = BORDERS[name][rank : rank + 2]
        parameter = nn.Parameter(torch.randn(shape, generator=generator).flatten()[low:high].clone())
        tensors[name] = parameter.view(-1)[:] if how == "views" else parameter
    groups = [
        {"params": [("matrix", tensors["matrix"])], "matrices": ["whole"]},
        {"params": [("vector", tensors["vector"])], "algorithm": "adamw"},
    ]
    layouts = {name: mm.FlatShards.cut(SHAPES[name], (0, 1), borders) for name, borders in BORDERS.items()}
    optimizer = mm.Muon(groups, layouts=layouts, compute_dtype=torch.float32)
    for _ in range(2):
        for tensor in tensors.values():
            tensor.grad = torch.arange(tensor.numel()) + 1.0 + rank
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    return [tensor.detach().clone() for tensor in tensors.values()]


def test_views_are_stepped_as_parameters_are(workers) -> None:
    """torch takes no other tensors than leaves of autograd, unless it keeps their gradients."""
    for views, parameters in zip(workers(2).run(trained, "views"), workers(2).run(trained, "parameters"), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(views, parameters, strict=True))
