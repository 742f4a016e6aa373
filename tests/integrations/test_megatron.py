"""declared_layouts where no second rank is needed; tests/integrations/test_megatron_ranks.py has the rest."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from muonmesh.errors import LayoutError
from muonmesh.integrations.megatron import declared_layouts
from muonmesh.integrations.megatron.refusals import refuse_state
from tests.support.stamps import stamped as with_attributes

COVERS = (
    "integrations.megatron.refusals.refuse_state",
    "integrations.megatron.declared.mesh_finder",
)


@pytest.fixture
def one_rank() -> Iterator[dist.ProcessGroup]:
    """A gloo world of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def stamped(*shape: int, **attributes: Any) -> nn.Parameter:
    return with_attributes(torch.zeros(shape), attributes)


COLUMN = {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 2}


def test_momentum_in_int8_is_refused_since_megatrons_checkpoints_would_lose_its_scales() -> None:
    refuse_state({"state_dtype": torch.bfloat16}, qk_clip=True)
    with pytest.raises(ValueError, match=r"found 'int8'; needed a floating-point dtype"):
        refuse_state({"state_dtype": "int8"}, qk_clip=False)


def test_masters_in_cpu_memory_are_refused_where_megatron_reads_them_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuse_state({"state_device": "cpu"}, qk_clip=True)
    script = types.SimpleNamespace(_GLOBAL_ARGS=types.SimpleNamespace(log_params_norm=True))
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", script)
    refuse_state({"state_device": "cpu"}, qk_clip=False)
    with pytest.raises(ValueError, match=r"found 'cpu' with qk_clip=True and --log-params-norm; .*Remove --log-par"):
        refuse_state({"state_device": "cpu"}, qk_clip=True)


def test_one_process_declares_nothing() -> None:
    assert declared_layouts([("fc1.weight", stamped(4, 3, **COLUMN))], tensor_parallel=None, data_parallel=None) == {}


def test_a_missing_group_is_this_rank_alone(one_rank: dist.ProcessGroup) -> None:
    named = [("fc1.weight", stamped(4, 3, **COLUMN))]
    assert declared_layouts(named, tensor_parallel=None, data_parallel=None) == {}
    for name, tensor, data in (("data", None, one_rank), ("tensor", one_rank, None)):
        mesh, placements = declared_layouts(named, tensor_parallel=tensor, data_parallel=data)["fc1.weight"]
        assert (mesh.mesh.tolist(), mesh.mesh_dim_names, placements) == ([0], (name,), (Replicate(),))


def test_a_dtensor_says_itself_where_it_lives(one_rank: dist.ProcessGroup) -> None:
    mesh = init_device_mesh("cpu", (1,))
    weight = nn.Parameter(DTensor.from_local(torch.zeros(2, 2), mesh, [Shard(0)]))
    assert declared_layouts([("w", weight)], tensor_parallel=one_rank, data_parallel=None) == {}


@pytest.mark.parametrize(
    ("parameters", "arguments", "message"),
    [
        (
            {"experts.weight0": stamped(2, 2, allreduce=False)},
            {},
            r"experts\.weight0: found allreduce=False.*expert_tensor_parallel=\.\.\.",
        ),
        (
            {"experts.weight0": stamped(2, 2, allreduce=False)},
            {"expert_data_parallel": "world"},
            r"experts\.weight0: found allreduce=False",
        ),
        ({"w": stamped(2, 2, is_gtp_weight_remat=True)}, {}, r"w: found is_gtp_weight_remat=True"),
        ({"w": stamped(2, 2), "module.w": stamped(2, 2)}, {}, r"w: found two parameters of this name"),
        ({"w": stamped(2, 2)}, {"tensor_parallel": "other"}, r"tensor_parallel: found a group of ranks \[\] on rank 0"),
    ],
)
def test_what_cannot_be_declared_is_refused(
    one_rank: dist.ProcessGroup, parameters: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    groups = {
        "world": lambda: one_rank,
        "other": lambda: dist.GroupMember.NON_GROUP_MEMBER,  # what new_group gives to ranks it leaves out
    }
    settings: dict[str, Any] = {"tensor_parallel": one_rank, "data_parallel": None, **arguments}
    settings = {key: groups[value]() if isinstance(value, str) else value for key, value in settings.items()}
    with pytest.raises(ValueError, match=message) as raised:
        declared_layouts(parameters.items(), **settings)
    assert isinstance(raised.value, LayoutError)
    assert re.search(r": found .*; needed .*\. [A-Z]", str(raised.value))
