"""Partial gradients are reduced as torch reduces them: a sum, a mean, the largest or the smallest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

import muonmesh as mm
from muonmesh.comm.storage import local_of
from tests.support.on_ranks import on_ranks

COVERS = ("comm.gradients.reduced",)

FP32: dict[str, Any] = {"lr": 0.1, "compute_dtype": torch.float32}
SHAPES = {"muon": (6, 4), "adamw": (5,)}


def parts(shape: tuple[int, ...]) -> list[Tensor]:
    """The part of each rank; the last has none, which counts as zero."""
    values = [torch.randn(shape, generator=torch.Generator().manual_seed(r)) for r in range(dist.get_world_size())]
    return [*values[:-1], torch.zeros(shape)]


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
@pytest.mark.parametrize("op", ["sum", "avg", "max", "min"])
@on_ranks(2)
def test_a_partial_gradient_is_reduced_as_torch_does(op: str, algorithm: str) -> None:
    """Norms and steps are those of the gradient that torch has reduced."""
    mesh, shape, last = init_device_mesh("cpu", (2,)), SHAPES[algorithm], dist.get_rank() == dist.get_world_size() - 1
    part, gradient = (
        DTensor.from_local(parts(shape)[dist.get_rank()], mesh, [Partial(op)], run_check=False) for _ in range(2)
    )
    expected = part.full_tensor()
    weight = nn.Parameter(distribute_tensor(torch.ones(shape), mesh, [Replicate()]))
    optimizer = mm.Muon([{"params": [("w", weight)], "algorithm": algorithm}], **FP32)
    weight.grad = gradient
    norm = float(optimizer.clip_grad_norm_(float("inf")))
    twin = nn.Parameter(torch.ones(shape))
    twin.grad = expected.clone()
    torch_norm = float(torch.nn.utils.clip_grad_norm_([twin], float("inf")))
    weight.grad = None if last else part
    optimizer.step()
    mm.Muon([{"params": [("w", twin)], "algorithm": algorithm}], process_group="local", **FP32).step()
    assert norm == pytest.approx(torch_norm, rel=1e-6)
    assert torch.equal(local_of(weight), twin)
    assert weight.grad is None or weight.grad is part


@pytest.mark.parametrize(
    ("ops", "error", "message"),
    [
        (["sum", "avg"], mm.PlanError, r"w: The gradient is placed differently on the ranks \(0, 1\)"),
        (["product", "product"], mm.LayoutError, r"w: found a gradient placed \(Partial\(product\),\)"),
    ],
)
@on_ranks(2, timeout=20)
def test_what_cannot_be_reduced_is_an_error_on_every_rank(ops: list[str], error: type, message: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(distribute_tensor(torch.ones(5), mesh, [Replicate()]))
    optimizer = mm.Muon([{"params": [("w", weight)], "algorithm": "adamw"}], lr=0.1)
    weight.grad = DTensor.from_local(torch.ones(5), mesh, [Partial(ops[dist.get_rank()])], run_check=False)
    with pytest.raises(error, match=message):
        optimizer.step()
