"""What Megatron-Core does to parameters: how it cuts them, what it stamps on them, and its groups."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


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
