"""What a device computes of matrices, run on the CPU, by both tables of products that devices have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from muonmesh.numerics.coefficients import Coefficients
from muonmesh.numerics.kernels import Matmuls
from muonmesh.numerics.kernels.batched import torch_products
from muonmesh.numerics.newton_schulz import Method, Orthogonalizer
from muonmesh.numerics.working_memory import PlacedBatch


def mirrored(x: Tensor) -> Tensor:
    return x.triu() + x.triu(1).mT


def extent(x: Tensor) -> range:
    last = sum((length - 1) * stride for length, stride in zip(x.shape, x.stride(), strict=True))
    return range(x.data_ptr(), x.data_ptr() + (last + 1) * x.itemsize)


def share_no_memory(x: Tensor, y: Tensor) -> bool:
    """Whether the extents of tensors share no memory."""
    return max(extent(x).start, extent(y).start) >= min(extent(x).stop, extent(y).stop)


def like_triton() -> Matmuls:
    """Products rounded as Triton's are: `test_triton` shows that those are these, to the bit or nearly."""

    def multiply(
        a: Tensor,
        b: Any,
        terms: Any,
        out: Tensor,
        alpha: float = 1.0,
        scale: Any = 1.0,
        symmetric: bool = True,
        identity: float = 0.0,
    ) -> Tensor:
        for operand in (a, b, *(c for c, _ in terms)):
            in_place = not symmetric and any(operand is c for c, _ in terms[:1]) and extent(operand) == extent(out)
            assert operand is None or in_place or share_no_memory(operand, out)
        wide = torch.promote_types(a.dtype, torch.float32)
        result = alpha * (a.to(wide) @ (a.mT if b is None else b).to(wide))
        for c, factor in terms:
            result = factor * c.to(wide) + result
        result = scale * (result + identity * torch.eye(*result.shape[1:], dtype=wide))
        return out.copy_(mirrored(result) if symmetric else result)

    return Matmuls(multiply=multiply, batch_limit=1)


TABLES = {"torch": torch_products(batch_limit=1), "triton": like_triton()}


def form_of(rows: int, cols: int, **options: Any) -> Orthogonalizer:
    """How a device orthogonalizes matrices."""
    defaults = {"steps": None, "method": "auto", "dtype": torch.bfloat16, "kernels": "torch"}
    return Orthogonalizer.of(rows, cols, **defaults | options, device=torch.device("cuda"))


def in_one_memory(inputs: Sequence[Tensor], one_by_one: bool, **options: Any) -> list[Tensor]:
    """What a device computes of matrices, (batch, rows, cols), of which nothing else is in memory."""
    form, shapes = form_of(*inputs[0].shape[1:], **options, in_place=True), [tuple(x.shape) for x in inputs]
    layout = replace(form.needs, one_by_one=one_by_one).layout(shapes)  # type: ignore[arg-type]
    assert layout is not None
    placed = PlacedBatch(torch.full((layout.numel,), torch.nan, dtype=inputs[0].dtype), layout)
    for view, matrices in zip(placed.matrices(0), inputs, strict=True):
        view.copy_(matrices)
    form.iteration(TABLES["triton"]).run_in_place(placed)
    return placed.results


def by_device_iteration(
    x: Tensor,
    table: Matmuls = TABLES["triton"],
    *others: Tensor,
    coefficients: Coefficients = "polar_express",
    method: Method = "auto",
    dtype: torch.dtype = torch.bfloat16,
    overwrite: bool = False,
) -> Tensor:
    """What a device computes of matrices, (batch, rows, cols), together with others, whose bits are those of each."""
    form = form_of(*x.shape[1:], coefficients=coefficients, method=method, dtype=dtype)
    out = [torch.empty_like(matrices) for matrices in (*others, x)]
    alone = [torch.empty_like(matrices) for matrices in others]
    iteration = form.iteration(table)
    for matrices, into in zip(others, alone, strict=True):
        iteration.run([matrices.clone()], [into], overwrite=overwrite)
    iteration.run([*others, x], out, overwrite=overwrite)
    for together, apart_from_others in zip(out, alone, strict=False):
        torch.testing.assert_close(together, apart_from_others, rtol=0, atol=0, equal_nan=True)
    return out[-1]
