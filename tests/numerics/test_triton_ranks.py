"""Triton's kernels in its interpreter on several ranks: shards and replicas have the bits of one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import muonmesh as mm
from muonmesh.step.runtime import Driver
from tests.support import interpreter
from tests.support.workers import Pool

COVERS = ("step.by_kernel.mark_nonzero",)

SHAPES = [(9, 8), (2, 12), (8, 14), (1, 7), (6, 5)]
"""Of rows, three ranks store 3 + 3 + 3, 1 + 1 + 0, 3 + 3 + 2, 1 + 0 + 0 and 2 + 2 + 2."""
DTYPES = [torch.float32, torch.float32, torch.bfloat16, torch.float32, torch.bfloat16]
STEPS = 4


@pytest.fixture(scope="module")
def interpreting_ranks() -> Iterator[Pool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        pool = Pool(3, programs=True)
        pool.run(interpreter._prepare, timeout=120.0)
        yield pool
        pool.close()


def rows_of_rank(whole: Tensor, layout: str) -> Tensor:
    """What this rank stores of a tensor."""
    if layout != "sharded":
        return whole.clone()
    shards = whole.chunk(dist.get_world_size())
    return (*shards, *[whole[:0]] * dist.get_world_size())[dist.get_rank()].clone()


def weights_after_steps(layout: str, **settings: Any) -> list[Tensor]:
    """This rank's weights after steps whose gradients are zero, missing or new here and there."""
    generator = torch.Generator().manual_seed(0)

    def drawn() -> list[Tensor]:
        pairs = zip(SHAPES, DTYPES, strict=True)
        return [torch.randn(shape, generator=generator).to(dtype) for shape, dtype in pairs]

    weights = [nn.Parameter(rows_of_rank(whole, layout)) for whole in drawn()]
    names = [f"w{number}" for number in range(len(weights))]
    if layout == "sharded":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        settings["layouts"] = {name: (mesh, [Shard(0)], shape) for name, shape in zip(names, SHAPES, strict=True)}
    else:
        settings["process_group"] = "local" if layout == "alone" else "world"
    optimizer = mm.Muon([*zip(names, weights, strict=True)], lr=0.2, kernels="triton", ns_steps=1, **settings)
    optimizer._runtime.driver = Driver(False)  # as on a device
    for step in range(STEPS):
        gradients: list[Tensor | None] = [rows_of_rank(whole, layout) for whole in drawn()]
        for number, gradient in enumerate(gradients):
            if gradient is not None and step == number:
                gradient.zero_()
        gradients[4] = None if step == 2 else gradients[4]
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        optimizer.step()
    return [weight.detach() for weight in weights]


def shapes_that_differ(layout: str, **settings: Any) -> list[str]:
    """The weights of this rank that differ from one process's."""
    alone = [rows_of_rank(whole, layout) for whole in weights_after_steps("alone")]
    pairs = zip(alone, weights_after_steps(layout, **settings), strict=True)
    return [
        f"{shape}" for (expected, actual), shape in zip(pairs, SHAPES, strict=True) if not torch.equal(expected, actual)
    ]


@pytest.mark.parametrize(
    ("layout", "settings"),
    [("sharded", {}), ("replicas", {}), ("replicas", {"shard_state": True})],
    ids=str,
)
def test_ranks_have_the_bits_of_one_process(interpreting_ranks: Pool, layout: str, settings: dict[str, Any]) -> None:
    """Also a rank that stores no row of a parameter: it looked at another gradient, or at none, for zeros."""
    assert interpreting_ranks.run(shapes_that_differ, layout, timeout=120.0, **settings) == [[], [], []]
