"""Placements that torch does not have: read off the parameters themselves, and stepped bit for bit as in one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import muonmesh as mm
from muonmesh.errors import LayoutError
from tests import problem
from tests.meshes import mesh_of
from tests.parallel.test_every_layout import check, compared
from tests.placements import Flat, Making, R, RaggedShard, dtensor, flex, held_by, megatron, vescale


def offsets() -> tuple[dict[str, int], int]:
    """Where parameters begin in a buffer of which each of four ranks gets whole rows of all of them."""
    rows = {name: math.prod(shape[1:]) for name, (shape, _) in NAMED.items()}
    step, first, found = math.lcm(*rows.values()), 0, {}
    for name, (shape, _) in NAMED.items():
        first = -(-first // rows[name]) * rows[name]
        found[name] = first
        first += math.prod(shape)
    return found, -(-first // (4 * step)) * 4 * step


# Buffers of Megatron-FSDP are padded to the least common multiple of all rows, so only some of the shapes.
NAMED = {n: problem.PARAMETERS[n] for n in ("square", "qkv", "gate_up", "neox", "few", "embedding", "norm", "bias")}


def making(how: str) -> Making:
    first, size = offsets()
    return {
        "ragged": lambda: vescale((4,), lambda n: ["ragged"]),
        "ragged beside copies": lambda: vescale((2, 2), lambda n: [R, "ragged"]),
        "ragged over columns": lambda: vescale((2, 2), lambda n: ["ragged", Shard(n - 1) if n != 1 else R]),
        "flex": flex,
        "megatron v1": lambda: megatron((4,), [Shard(0)], 1, first, size),
        "megatron v1 beside copies": lambda: megatron((2, 2), [R, Shard(0)], 1, first, size),
        "megatron v1, both axes": lambda: megatron((2, 2), [Shard(0), Shard(0)], 1, first, size),
        "megatron v2": lambda: megatron((4,), [Flat()], 2, first, size),
        "megatron v2, both axes": lambda: megatron((2, 2), [Flat(), Flat()], 2, first, size),
    }[how]()


def stepped(how: str) -> Any:
    parameters = NAMED if how.startswith("megatron") else problem.PARAMETERS
    values = {name: value for name, value in problem.initial().items() if name in parameters}
    held = held_by(making(how), parameters, values)
    give, whole = held.give, held.whole
    held.give = lambda gradients: give({name: g for name, g in gradients.items() if name in parameters})
    missing = [name for name in problem.PARAMETERS if name not in parameters]
    reference = problem.alone(3, compute_dtype=torch.float32)

    def with_the_rest(optimizer: Any) -> dict[str, torch.Tensor]:
        result = whole(optimizer)
        rest = {key: value for key, value in reference.items() if key.split(".")[0] in missing}
        return {**result, **rest}

    held.whole = with_the_rest
    return compared(held, {"compute_dtype": torch.float32})


HOW = (
    "ragged",
    "ragged beside copies",
    "ragged over columns",
    "flex",
    "megatron v1",
    "megatron v1 beside copies",
    "megatron v1, both axes",
    "megatron v2",
    "megatron v2, both axes",
)


@pytest.mark.parametrize("how", HOW)
def test_a_published_placement_is_stepped_as_in_one_process(workers, how: str) -> None:
    check(workers(4).run(stepped, how), divided=False)
