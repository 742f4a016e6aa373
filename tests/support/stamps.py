"""What Megatron-Core does to parameters: how it cuts them, what it stamps on them, and its groups."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muonmesh.integrations.megatron import declared_layouts
from tests.support.layouts import cut, layout_on


def shard(whole: Tensor, dim: int, pieces: int, rank: int, ranks: int) -> Tensor:
    """Each piece, such as gate and up, is divided over the ranks, and a rank keeps its parts one after the other."""
    return torch.cat([piece.chunk(ranks, dim)[rank] for piece in whole.chunk(pieces, dim)], dim)


def stamped(local: Tensor, attributes: dict[str, Any]) -> nn.Parameter:
    parameter = nn.Parameter(local.clone())
    for name, value in attributes.items():
        setattr(parameter, name, value)
    return parameter


def groups_of(grid: list[list[int]]) -> tuple[Any, Any, int]:
    """The (data, tensor) groups of this rank, which is in one row and one column of the grid, and its column."""
    row, column = next((i, r.index(dist.get_rank())) for i, r in enumerate(grid) if dist.get_rank() in r)
    rows = [dist.new_group(ranks) for ranks in grid]
    columns = [dist.new_group(list(ranks), sort_ranks=False) for ranks in zip(*grid, strict=True)]
    return columns[column], rows[row], column


Weights = dict[str, tuple[tuple[int, ...], int | None, int, dict[str, Any]]]
"""For each parameter its whole shape, the dim that is cut or None, the pieces in each shard, and its attributes."""


def declared_layouts_of(
    weights: Weights, tensor: Any, data: Any, column: int, columns: int, corrected: dict[str, Any] | None = None
) -> tuple[dict[str, nn.Parameter], dict[str, Any], list[str]]:
    """The parameters of this rank, cut as Megatron cuts them; their layouts; and those that it does not hold so.

    ``corrected`` has the placements that a user must give because attributes do not say them.
    """
    parameters, wholes = {}, {}
    for name, (shape, dim, pieces, attributes) in weights.items():
        whole = wholes[name] = torch.arange(1.0, torch.Size(shape).numel() + 1).reshape(shape)
        parameters[name] = stamped(whole if dim is None else shard(whole, dim, pieces, column, columns), attributes)
    declared = declared_layouts(parameters.items(), tensor_parallel=tensor, data_parallel=data)
    declared |= {name: (declared[name][0], [placement]) for name, placement in (corrected or {}).items()}
    wrong = []
    for name, (mesh, placements) in declared.items():
        layout = layout_on(mesh, placements, wholes[name].shape)
        layout.prove_cover()
        if not torch.equal(cut(wholes[name], layout, dist.get_rank()), parameters[name]):
            wrong.append(name)
    return parameters, declared, wrong
