"""Generated mesh layouts, what torch itself would store under them, and plans of one parameter."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard

from muonmesh.layout import (
    MeshLayout,
    Parameter,
    Placement,
    Plan,
    Replicate,
    Shard,
    cost,
    make_plan,
    split_matrices,
)


def local_by_torch(whole: Tensor, layout: MeshLayout, rank: int) -> Tensor:
    """What DTensor itself would store on a rank: its own splitting, placement by placement."""
    index = layout.ranks.index(rank)
    at = [int(i) for i in torch.unravel_index(torch.tensor(index), layout.mesh)]
    for size, placement, coordinate in zip(layout.mesh, layout.placements, at, strict=True):
        if isinstance(placement, Replicate):
            continue
        torch_placement: Any = TorchShard(placement.dim)
        if getattr(placement, "split_factor", 1) > 1:
            torch_placement = _StridedShard(placement.dim, split_factor=placement.split_factor)
        whole = torch_placement._split_tensor(whole, size, with_padding=False)[0][coordinate]
    return whole.clone(memory_format=torch.contiguous_format)


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> MeshLayout:
    """A mesh of 1 to 3 axes and up to 8 ranks, in any rank order, with any placements."""
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda m: math.prod(m) <= 8)))
    ranks = tuple(draw(st.permutations(range(math.prod(mesh)))))
    dim = st.integers(0, len(shape) - 1)
    placement = st.one_of(
        st.just(Replicate()),
        st.builds(Shard, dim),
        st.builds(Shard, dim, st.integers(1, 3)),
    )
    placements: list[Placement] = [draw(placement) for _ in mesh]
    return MeshLayout(shape, mesh, ranks, tuple(placements))


def planned(shape: tuple[int, ...], spec: Any, layout: MeshLayout, bucket_elements: int = 50) -> Plan:
    matrices = split_matrices("w", shape, spec)
    flops = tuple(cost(m.rows, m.cols, degrees=[(3,)] * 5) for m in matrices)
    return make_plan([Parameter("w", layout, layout, matrices, flops, "")], bucket_elements=bucket_elements)


def canonical(matrix: Tensor) -> Tensor:
    return (matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT).clone(memory_format=torch.contiguous_format)
