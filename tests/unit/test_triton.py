"""Triton's products in its interpreter: against fp64, their rounding rules, symmetry, and what they leave alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from muonmesh.numerics import kernels
from muonmesh.numerics.kernels.triton import triton_products
from muonmesh.numerics.newton_schulz import orthogonalize
from tests.interpreter import interpreting

Interpreter = Callable[..., Any]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HALF = {BF16: 2**-8, FP16: 2**-11, FP32: 2**-24}
"""The largest error of one rounding, relative."""
# Smaller than a tile, larger with rows that are not aligned, tiles of 128 that do not divide the matrix.
SIZES = [
    *((1, 1, 1, BF16), (3, 50, 2, BF16), (65, 130, 2, BF16), (288, 304, 1, BF16)),
    *((3, 50, 2, FP16), (64, 80, 1, FP16)),
    *((3, 50, 2, FP32), (65, 130, 2, FP32)),
]


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    with interpreting() as run:
        yield run


# ------------------------------------------------------------------ in the interpreter's process


def operands(rows: int, cols: int, batch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """X, and A and B that commute because both are polynomials of one symmetric matrix, exactly symmetric."""
    torch.manual_seed(rows + cols)
    x = torch.randn(batch, rows, cols, dtype=torch.float64) / cols**0.5
    s = torch.randn(batch, rows, rows, dtype=torch.float64)
    s = (s + s.mT) / rows**0.5 / 2
    a, b = (s + s @ s).to(dtype), (2 * s - s @ s).to(dtype)
    return x.to(dtype), a.triu() + a.triu(1).mT, b.triu() + b.triu(1).mT


def excess(result: Tensor, exact: Tensor, terms: int) -> float:
    """The error beyond one rounding, in roundings of an fp32 sum of that many terms of the largest magnitude."""
    allowed = HALF[result.dtype] * exact.abs() + 2**-133  # half of bf16's smallest denormal number
    beyond = ((result.double() - exact).abs() - allowed).clamp(min=0).max()
    return float(beyond / (2**-24 * terms**0.5 * exact.abs().max()))


def upper(x: Tensor) -> Tensor:
    """The upper triangle and its mirror image: rounded A and B commute only nearly."""
    return x.triu() + x.triu(1).mT


def products_of(rows: int, cols: int, batch: int, dtype: torch.dtype) -> dict[str, float]:
    """The excess of every product; raises where one wrote an operand or is not symmetric."""
    matmuls = triton_products(at_once=3)
    x, a, b = operands(rows, cols, batch, dtype)
    before = [t.clone() for t in (x, a, b)]
    xd, ad, bd = (t.double() for t in (x, a, b))
    s = torch.linspace(0.5, 2.0, batch)[:, None, None]
    sd = s.double()

    def square() -> Tensor:
        return torch.full_like(a, torch.nan)

    def long() -> Tensor:
        return torch.full_like(x, torch.nan)

    symmetric = {
        "gram": (matmuls.gram(x, s, square()), sd * (xd @ xd.mT)),
        "polynomial": (matmuls.polynomial(a, -2.5, 1.25, square()), -2.5 * ad + 1.25 * ad @ ad),
        "product": (matmuls.product(a, b, b, 0.75, square()), upper(0.75 * bd + ad @ bd)),
    }
    for name, (result, _) in symmetric.items():
        assert torch.equal(result, result.mT), name
    others = {
        "full": (matmuls.full(a, b, b, 0.75, square()), 0.75 * bd + ad @ bd),
        "full without C": (matmuls.full(a, b, torch.full_like(b, torch.nan), 0.0, square()), ad @ bd),
        "apply, numbers": (matmuls.apply(x, a, 1.5, 0.5, long()), 0.5 * (1.5 * xd + ad @ xd)),
        "apply, a tensor": (matmuls.apply(x, a, s, 0.5, long()), 0.5 * (sd * xd + ad @ xd)),
        "apply, s tensor": (matmuls.apply(x, a, 1.5, s, long()), sd * (1.5 * xd + ad @ xd)),
        "apply, tensors": (matmuls.apply(x, a, s, s, long()), sd * (sd * xd + ad @ xd)),
        "apply, 0-d": (matmuls.apply(x, a, s[0, 0, 0], s[0, 0, 0], long()), sd[0] * (sd[0] * xd + ad @ xd)),
    }
    assert all(torch.equal(t, was) for t, was in zip((x, a, b), before, strict=True))
    # The coefficients used here make sums of a few times the largest entry of the result.
    return {name: excess(result, exact, max(rows, cols)) for name, (result, exact) in (symmetric | others).items()}


def strided(rows: int, cols: int, dtype: torch.dtype) -> dict[str, float]:
    """Products of matrices that lie in memory in every other way."""
    matmuls = triton_products(at_once=3)
    x, a, _ = operands(rows, cols, 2, dtype)
    xd, ad = x.double(), a.double()
    s = torch.tensor([0.5, 2.0])[:, None, None]
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "transposed": lambda t: t.mT.contiguous().mT,
        "every other column": lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2],
        "rows apart": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
        "two bytes off": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
        "batch last": lambda t: t.permute(1, 2, 0).contiguous().permute(2, 0, 1),
        "one for all": lambda t: t[:1].expand(2, -1, -1),
    }
    found = {}
    for name, way in ways.items():
        gram = matmuls.gram(way(x), s, way(torch.full_like(a, torch.nan)) if name != "one for all" else a.clone())
        reference = way(xd)
        found[f"gram, {name}"] = excess(gram, s.double() * (reference @ reference.mT), cols)
        long = matmuls.apply(way(x), way(a), s, s, torch.full_like(x, torch.nan))
        exact = s.double() * (s.double() * reference + way(ad) @ reference)
        found[f"apply, {name}"] = excess(long, exact, cols)
    return found


def around() -> list[bool]:
    """Whether zeros stay zeros, a matrix that is not finite becomes NaN, and the one between them is untouched."""
    x, _, _ = operands(40, 72, 4, BF16)
    alone = orthogonalize(x[1], dtype=BF16, kernels="triton", steps=3)
    x[0], x[2, 3, 4], x[3, 5, 6] = 0, math.nan, -math.inf
    result = orthogonalize(x, dtype=BF16, kernels="triton", steps=3)
    return [not result[0].any(), torch.equal(result[1], alone), bool(result[2:].isnan().all())]


def far_apart() -> float:
    """The excess of a product with strides that need 64 bits; the memory between the rows is never touched."""
    memory = torch.empty(3 << 30, dtype=torch.bfloat16)
    x = memory.as_strided((1, 3, 20), (0, 1 << 30, 1))
    x.copy_(operands(3, 20, 1, torch.bfloat16)[0])
    gram = triton_products(at_once=1).gram(x, torch.ones(1, 1, 1), torch.empty(1, 3, 3, dtype=torch.bfloat16))
    return excess(gram, x.double() @ x.double().mT, 20)


def refused() -> dict[str, str]:
    """What is said where Triton is asked for what it cannot do."""
    found = {}
    for name, device, dtype in (("dtype", "cpu", torch.float64), ("device", "meta", torch.bfloat16)):
        with pytest.raises(ValueError, match="kernels") as caught:
            kernels.select("triton", device=torch.device(device), dtype=dtype, rows=4, cols=4)
        found[name] = str(caught.value)
    return found


# ------------------------------------------------------------------ tests


@pytest.mark.parametrize(("rows", "cols", "batch", "dtype"), SIZES, ids=str)
def test_products_against_fp64(interpreter: Interpreter, rows: int, cols: int, batch: int, dtype: torch.dtype) -> None:
    found = interpreter(products_of, rows, cols, batch, dtype)
    assert max(found.values()) < 4, found


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize(("rows", "cols"), [(48, 80), (33, 70)])
def test_products_of_matrices_with_any_strides(
    interpreter: Interpreter, rows: int, cols: int, dtype: torch.dtype
) -> None:
    found = interpreter(strided, rows, cols, dtype)
    assert max(found.values()) < 4, found


def test_products_of_rows_that_are_far_apart(interpreter: Interpreter) -> None:
    assert interpreter(far_apart) < 4


def test_zero_nan_and_inf_stay_where_they_are(interpreter: Interpreter) -> None:
    assert interpreter(around) == [True, True, True]


def test_what_triton_cannot_do_is_refused(interpreter: Interpreter) -> None:
    assert interpreter(refused) == {
        "dtype": "kernels='triton': found torch.float64; needed bf16 or fp32. Write kernels=\"auto\"",
        "device": "kernels='triton': found a matrix on meta; needed one on a CUDA or ROCm device. "
        'Write kernels="auto"',
    }
