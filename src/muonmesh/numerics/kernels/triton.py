"""Triton: symmetric results by one triangle of tiles, everything summed in fp32 and rounded once, on GPUs.

The products are one operator of torch, `muonmesh::multiply`. So dispatch modes and fake tensors see one operation for
each launch, and Triton itself is imported only at the first product.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from muonmesh.numerics.kernels import beside
from muonmesh.numerics.kernels.table import SMALL_COLS, SMALL_ROWS, Matmuls, Number, Operand, Small, Terms
from muonmesh.numerics.kernels.toolchain import DTYPES
from muonmesh.numerics.kernels.triton_launch import Launch, operator


def _multiply(*given: Any) -> Iterator[Launch]:
    """Write scale·(alpha·A B + factor·C + delta·D + identity·I); ``factors`` and ``scales`` have a number a matrix."""
    from muonmesh.numerics.kernels.tiles import multiplication

    a, b, c, alpha, factor, factors, scale, scales, symmetric, out, d, delta, identity = given
    factor, scale = factor if factors is None else factors, scale if scales is None else scales
    more = {"symmetric": symmetric, "d": d, "delta": delta, "identity": identity}
    yield multiplication(a, b, c, alpha, factor, scale, out, **more, **_asked(a.device))


@cache
def _asked(device: torch.device) -> dict[str, Any]:
    """Return how the tiles of a device differ: measured on 9.0, by the compiler's figures on AMD's.

    docs/internals/kernels.md has both.
    """
    if torch.version.hip:
        return {"stages": 2}
    is_there = device.type == "cuda" and torch.cuda.is_available()
    return {"warps": 4} if is_there and torch.cuda.get_device_capability(device) == (9, 0) else {}


_operation = operator(
    "multiply(Tensor a, Tensor b, Tensor? c, float alpha, float factor, Tensor? factors, float scale, Tensor? scales, "
    "bool symmetric, Tensor(a!) out, Tensor? d, float delta, float identity)",
    _multiply,
)


def multiply(
    a: Tensor,
    b: Operand,
    terms: Terms,
    out: Tensor,
    alpha: float = 1.0,
    scale: Number = 1.0,
    symmetric: bool = True,
    identity: float = 0.0,
) -> Tensor:
    """Multiply as `Matmuls.multiply` says, by one kernel; the factor of the second of two terms is no tensor."""
    given = [(c, number) for c, number in terms if isinstance(number, Tensor) or number]
    (c, factor), (d, delta) = (*given, (None, 0.0), (None, 0.0))[:2]
    factors, scales = (number if isinstance(number, Tensor) else None for number in (factor, scale))
    _operation(
        *(a, a.mT if b is None else b, c, alpha),
        *(factor if factors is None else 0.0, factors, scale if scales is None else 0.0, scales),
        *(symmetric, out, d, delta, identity),
    )
    return out


small = operator(
    "orthogonalize(Tensor x, Tensor(a!) out, float[] polynomials)",
    lambda *given: [importlib.import_module("muonmesh.numerics.kernels.small").orthogonalizing(*given)],
)


def triton_products(*, at_once: int, rows: int = sys.maxsize, cols: int = sys.maxsize) -> Matmuls:
    """The table for batches of at most `at_once` matrices of a shape, rows ≤ cols."""
    return Matmuls(
        multiply=multiply,
        at_once=at_once,
        together=True,
        normalize=beside.normalize,
        small=Small(small, DTYPES) if rows <= SMALL_ROWS and cols <= SMALL_COLS else None,
    )
