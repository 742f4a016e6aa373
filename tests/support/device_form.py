"""What a device computes of matrices, run on the CPU, by both tables of products that devices have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from muonmesh.numerics.coefficients import Coefficients
from muonmesh.numerics.device_iteration import DeviceIteration
from muonmesh.numerics.kernels import Matmuls
from muonmesh.numerics.kernels.batched import torch_products
from muonmesh.numerics.newton_schulz import Method, Orthogonalizer


def mirrored(x: Tensor) -> Tensor:
    return x.triu() + x.triu(1).mT


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
        wide = torch.promote_types(a.dtype, torch.float32)
        result = alpha * (a.to(wide) @ (a.mT if b is None else b).to(wide))
        for c, factor in terms:
            result = factor * c.to(wide) + result
        result = scale * (result + identity * torch.eye(*result.shape[1:], dtype=wide))
        return out.copy_(mirrored(result) if symmetric else result)

    return Matmuls(multiply=multiply, batch_limit=1)


TABLES = {"torch": torch_products(batch_limit=1), "triton": like_triton()}


def by_device_iteration(
    x: Tensor,
    table: Matmuls = TABLES["triton"],
    *others: Tensor,
    coefficients: Coefficients = "polar_express",
    method: Method = "auto",
    dtype: torch.dtype = torch.bfloat16,
    overwrite: bool = False,
) -> Tensor:
    """What a device computes of matrices, (batch, rows, cols); of others together with them."""
    form = Orthogonalizer.of(
        *x.shape[1:],
        coefficients=coefficients,
        steps=None,
        method=method,
        dtype=dtype,
        kernels="torch",
        device=torch.device("cuda"),
    )
    out = [torch.empty_like(matrices) for matrices in (*others, x)]
    DeviceIteration(form.prepared, form.segments, table, form.dtype).run([*others, x], out, overwrite=overwrite)
    return out[-1]
