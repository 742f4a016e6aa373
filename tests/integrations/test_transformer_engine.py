"""Transformer Engine's attributes, class by class: each rank's shard is what its declared layout says it holds.

It cannot be imported without CUDA, so what its modules write on their parameters is restated here, from
``reset_parameters`` of transformer_engine/pytorch/module/{linear,layernorm_linear,layernorm_mlp,grouped_linear}.py
(github.com/NVIDIA/TransformerEngine, commit 0004dbd for the first and third): every weight is called sharded, also
with ``parallel_mode=None``, and of one piece, also gate and up; the bias of a row-parallel layer has
``sequence_parallel`` only.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.tensor import Placement, Replicate
from torch.distributed.tensor.placement_types import _StridedShard

from tests.support.on_ranks import on_ranks
from tests.support.stamps import Weights, declared_layouts_of


def parallel(dim: int, stride: int = 1) -> dict[str, Any]:
    """What its ``set_tensor_model_parallel_attributes(tensor, True, dim, stride)`` sets."""
    return {"tensor_model_parallel": True, "partition_dim": dim, "partition_stride": stride}


SEQUENCE = {"sequence_parallel": True}
NOTHING: dict[str, Any] = {}
# One entry a class and mode; placements are what a user must correct because the attributes do not say it.
CLASSES: dict[str, tuple[Weights, dict[str, Placement]]] = {
    "Linear, column": ({"weight": ((8, 4), 0, 1, parallel(0)), "bias": ((8,), 0, 1, parallel(0))}, {}),
    "Linear, row": ({"weight": ((4, 8), 1, 1, parallel(1)), "bias": ((4,), None, 1, SEQUENCE)}, {}),
    "Linear, whole": (
        {"weight": ((8, 4), None, 1, parallel(0)), "bias": ((8,), None, 1, NOTHING)},
        {"weight": Replicate()},
    ),
    "LayerNormLinear": (
        {
            "layer_norm_weight": ((4,), None, 1, SEQUENCE),
            "layer_norm_bias": ((4,), None, 1, SEQUENCE),
            "weight": ((8, 4), 0, 1, parallel(0)),
            "bias": ((8,), 0, 1, parallel(0)),
        },
        {},
    ),
    "LayerNormMLP": (
        {
            "layer_norm_weight": ((4,), None, 1, SEQUENCE),
            "fc1_weight": ((8, 4), 0, 1, parallel(0)),
            "fc1_bias": ((8,), 0, 1, parallel(0)),
            "fc2_weight": ((4, 8), 1, 1, parallel(1)),
            "fc2_bias": ((4,), None, 1, SEQUENCE),
        },
        {},
    ),
    "LayerNormMLP, gated": (
        {
            "layer_norm_weight": ((4,), None, 1, SEQUENCE),
            "fc1_weight": ((16, 4), 0, 2, parallel(0)),
            "fc2_weight": ((4, 8), 1, 1, parallel(1)),
        },
        {"fc1_weight": _StridedShard(0, split_factor=2)},
    ),
    "GroupedLinear, column": (
        {f"weight{i}": ((8, 4), 0, 1, parallel(0)) for i in range(3)}
        | {f"bias{i}": ((8,), 0, 1, parallel(0)) for i in range(3)},
        {},
    ),
    "GroupedLinear, row": (
        {f"weight{i}": ((4, 8), 1, 1, parallel(1)) for i in range(3)}
        | {f"bias{i}": ((4,), None, 1, SEQUENCE) for i in range(3)},
        {},
    ),
    # Megatron-Core then overwrites the stride, of TELayerNormColumnParallelLinear and TEColumnParallelLinear, and
    # ``allreduce`` (megatron/core/extensions/transformer_engine.py of 0.16.1).
    "Megatron's column-parallel layer, gated": (
        {
            "layer_norm_weight": ((4,), None, 1, SEQUENCE | {"allreduce": True}),
            "weight": ((16, 4), 0, 2, parallel(0, 2) | {"allreduce": True}),
            "bias": ((16,), 0, 2, parallel(0, 2) | {"allreduce": True}),
        },
        {},
    ),
}


@pytest.mark.parametrize("case", CLASSES)
@on_ranks(2)
def test_each_rank_holds_what_the_attributes_say(case: str) -> None:
    """The parameters that this rank does not hold as their layouts say."""
    weights, corrected = CLASSES[case]
    assert declared_layouts_of(weights, dist.group.WORLD, None, dist.get_rank(), 2, corrected)[2] == []
