"""declared_layouts on real ranks: each rank's shard, cut as Megatron cuts it, is what its layout says it holds."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from muonmesh.comm.placing import placements_of
from muonmesh.errors import LayoutError
from muonmesh.integrations.megatron import declared_layouts
from muonmesh.layout import MeshLayout
from tests.support.stamps import groups_of, shard, stamped

COVERS = (
    "integrations.megatron.declared.declared_layouts",
    "integrations.megatron.layouts.layout_of",
)

# name: (global shape, dim that is cut or None, pieces in each shard, attributes)
WEIGHTS: dict[str, tuple[tuple[int, ...], int | None, int, dict[str, Any]]] = {
    "qkv.weight": ((12, 5), 0, 1, {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1}),
    "qkv.bias": ((12,), 0, 1, {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1}),
    "proj.weight": ((5, 12), 1, 1, {"tensor_model_parallel": True, "partition_dim": 1, "partition_stride": 1}),
    "fc1.weight": ((16, 3), 0, 2, {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 2}),
    "three.weight": ((2, 24), 1, 3, {"tensor_model_parallel": True, "partition_dim": 1, "partition_stride": 3}),
    "mamba.weight": ((24, 2), 0, 3, {"tensor_model_parallel": True, "partition_dim": 0, "partition_sizes": [4] * 3}),
    "norm.weight": ((5,), None, 1, {}),
    "pos.weight": ((4, 5), None, 1, {"tensor_model_parallel": True, "partition_dim": -1, "partition_stride": 1}),
    # Replicated, with what is left of an attribute: Megatron-LM #7395.
    "router.weight": ((4, 5), None, 1, {"tensor_model_parallel": False, "partition_dim": 0, "partition_stride": 1}),
}


def local_part(shape: tuple[int, ...], mesh: DeviceMesh, placements: Any, rank: int, whole: Tensor) -> Tensor:
    """The local tensor that the layout says a rank holds."""
    ranks = tuple(mesh.mesh.flatten().tolist())
    layout = MeshLayout(shape, tuple(mesh.mesh.shape), ranks, placements_of("w", placements))
    layout.prove_cover()
    local = torch.full(layout.local_shape(rank), -1.0)
    for block in layout.blocks(rank):
        region = block.region
        box = tuple(slice(first, first + count) for first, count in zip(region.offset, region.shape, strict=True))
        local.as_strided(region.shape, block.strides, block.start).copy_(whole[box])
    return local


def differing(grid: list[list[int]]) -> list[str]:
    data, tensor, column = groups_of(grid)
    wholes, parameters = {}, {}
    for name, (shape, dim, pieces, attributes) in WEIGHTS.items():
        whole = wholes[name] = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
        local = whole if dim is None else shard(whole, dim, pieces, column, len(grid[0]))
        parameters[name] = stamped(local, attributes)
    layouts = declared_layouts(parameters.items(), tensor_parallel=tensor, data_parallel=data)
    assert list(layouts) == list(WEIGHTS)
    assert len({id(mesh) for mesh, _ in layouts.values()}) == 1
    mesh = layouts["norm.weight"][0]
    assert mesh.mesh.tolist() == grid
    assert [mesh.get_group(i).group_name for i in range(2)] == [group.group_name for group in (data, tensor)]
    return [
        name
        for name, (mesh, placements) in layouts.items()
        if not torch.equal(
            local_part(WEIGHTS[name][0], mesh, placements, dist.get_rank(), wholes[name]), parameters[name]
        )
    ]


@pytest.mark.parametrize("grid", [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0], [1], [2], [3]], [[0, 1, 2, 3]]], ids=str)
def test_every_rank_holds_what_its_layout_says(workers, grid: list[list[int]]) -> None:
    """Four ranks: data × tensor parallel, the tensor-parallel ranks next to each other or not."""
    assert workers(4).run(differing, grid) == [[]] * 4


def test_groups_that_do_not_tell_the_grid_are_refused(workers) -> None:
    """Nothing says which tensor-parallel group the ranks in neither group are in; a guess could be wrong."""
    for outcome in workers(4).run_expecting_errors(differing, [[0, 3], [2, 1]]):
        assert outcome.error is LayoutError
        assert re.search(r"groups of a regular grid.*Make a DeviceMesh of all", outcome.message)
    for outcome in workers(4).run_expecting_errors(same_group_twice):
        assert outcome.error is LayoutError
        assert "groups of a regular grid" in outcome.message


def same_group_twice() -> None:
    named = [("w", nn.Parameter(torch.zeros(2, 2)))]
    declared_layouts(named, tensor_parallel=dist.group.WORLD, data_parallel=dist.group.WORLD)


def experts() -> list[tuple[list[Any], tuple[Any, ...]]]:
    """Two tensor-parallel ranks that each hold experts of their own, replicated over two data-parallel ranks."""
    data, tensor, _ = groups_of([[0, 1], [2, 3]])
    alone = [dist.new_group([rank]) for rank in range(4)][dist.get_rank()]
    column = {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1}
    named = {
        "fc1.weight": stamped(torch.zeros(4, 2), {**column, "allreduce": True}),
        "experts.weight0": stamped(torch.zeros(4, 2), {**column, "allreduce": False}),
    }
    layouts = declared_layouts(
        named.items(),
        tensor_parallel=tensor,
        data_parallel=data,
        expert_tensor_parallel=alone,
        expert_data_parallel=data,
    )
    return [(mesh.mesh.tolist(), placements) for mesh, placements in layouts.values()]


def test_experts_live_on_their_own_groups(workers) -> None:
    for rank, (dense, expert) in enumerate(workers(4).run(experts)):
        assert dense == ([[0, 1], [2, 3]], (Replicate(), Shard(0)))
        assert expert == ([[rank % 2], [rank % 2 + 2]], (Replicate(), Replicate()))


def placements(attributes: dict[str, Any], shape: tuple[int, ...]) -> Any:
    named = {f"module.layers.{i}.fc1_weight": stamped(torch.zeros(shape), attributes) for i in range(2)}
    layouts = declared_layouts(named.items(), tensor_parallel=dist.group.WORLD, data_parallel=None)
    return [placements for _, placements in layouts.values()]


TE = {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1}


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({"tensor_model_parallel": True}, Replicate()),  # no dim
        ({"partition_dim": 0}, Replicate()),  # no flag
        (TE, Shard(0)),
        ({**TE, "partition_sizes": [2, 2]}, _StridedShard(0, split_factor=2)),
    ],
)
def test_a_placement_is_what_the_attributes_say(workers, attributes: Any, expected: Any) -> None:
    assert workers(2).run(placements, attributes, (4, 6)) == [[(expected,)] * 2] * 2


@pytest.mark.parametrize(
    ("attributes", "shape"),
    [
        ({"partition_dim": 2}, (4, 6)),
        ({"partition_dim": 1}, (4,)),
        ({"partition_dim": -2}, (4, 6)),
        ({"partition_stride": 3}, (4, 6)),
        ({"partition_stride": 0}, (4, 6)),
        ({"partition_sizes": [3, 1]}, (4, 6)),
    ],
)
def test_attributes_that_do_not_fit_are_refused(workers, attributes: Any, shape: tuple[int, ...]) -> None:
    ((key, value),) = attributes.items()
    for outcome in workers(2).run_expecting_errors(placements, {**TE, **attributes}, shape):
        assert outcome.error is LayoutError
        assert re.search(rf"^layers\.0\.fc1_weight: found .*{key}={re.escape(str(value))}", outcome.message)
        assert re.search(r"; needed .*\. [A-Z]", outcome.message)
