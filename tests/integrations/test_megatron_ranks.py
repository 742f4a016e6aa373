"""declared_layouts on real ranks: each rank's shard, cut as Megatron cuts it, is what its layout says it holds."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from muonmesh.errors import LayoutError
from muonmesh.integrations.megatron import declared_layouts
from tests.support.stamps import Weights, declared_layouts_of, groups_of, stamped

COVERS = (
    "integrations.megatron.declared.declared_layouts",
    "integrations.megatron.layouts.layout_of",
)

WEIGHTS: Weights = {
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


def declared(grid: list[list[int]]) -> list[str]:
    """The parameters that this rank does not hold as their layouts say, on one mesh of all."""
    data, tensor, column = groups_of(grid)
    parameters, layouts, wrong = declared_layouts_of(WEIGHTS, tensor, data, column, len(grid[0]))
    assert list(layouts) == list(WEIGHTS) == list(parameters)
    assert len({id(mesh) for mesh, _ in layouts.values()}) == 1
    mesh = layouts["norm.weight"][0]
    assert mesh.mesh.tolist() == grid
    assert [mesh.get_group(i).group_name for i in range(2)] == [group.group_name for group in (data, tensor)]
    return wrong


@pytest.mark.parametrize("grid", [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0], [1], [2], [3]], [[0, 1, 2, 3]]], ids=str)
def test_every_rank_holds_what_its_layout_says(workers, grid: list[list[int]]) -> None:
    """Four ranks: data × tensor parallel, the tensor-parallel ranks next to each other or not."""
    assert workers(4).run(declared, grid) == [[]] * 4


def test_groups_that_do_not_tell_the_grid_are_refused(workers) -> None:
    """Nothing says which tensor-parallel group the ranks in neither group are in; a guess could be wrong."""
    for outcome in workers(4).run_expecting_errors(declared, [[0, 3], [2, 1]]):
        assert outcome.error is LayoutError
        assert re.search(r"groups of a regular grid.*Make a DeviceMesh of all", outcome.message)
    for outcome in workers(4).run_expecting_errors(same_group_twice):
        assert outcome.error is LayoutError
        assert "groups of a regular grid" in outcome.message


def same_group_twice() -> None:
    named = [("w", nn.Parameter(torch.zeros(2, 2)))]
    declared_layouts(named, tensor_parallel=dist.group.WORLD, data_parallel=dist.group.WORLD)


def expert_layouts() -> list[tuple[list[Any], tuple[Any, ...]]]:
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
    for rank, (dense, expert) in enumerate(workers(4).run(expert_layouts)):
        assert dense == ([[0, 1], [2, 3]], (Replicate(), Shard(0)))
        assert expert == ([[rank % 2], [rank % 2 + 2]], (Replicate(), Replicate()))


def declared_placements(attributes: dict[str, Any], shape: tuple[int, ...]) -> Any:
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
    assert workers(2).run(declared_placements, attributes, (4, 6)) == [[(expected,)] * 2] * 2


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
    for outcome in workers(2).run_expecting_errors(declared_placements, {**TE, **attributes}, shape):
        assert outcome.error is LayoutError
        assert re.search(rf"^layers\.0\.fc1_weight: found .*{key}={re.escape(str(value))}", outcome.message)
        assert re.search(r"; needed .*\. [A-Z]", outcome.message)
