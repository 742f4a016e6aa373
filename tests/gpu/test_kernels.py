"""Triton's kernels on the device that is there: products against fp64, the same bits in every run, the fused pair."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

import muonmesh as mm
from muonmesh.numerics import kernels
from muonmesh.numerics.coefficients import coefficient_schedule
from muonmesh.numerics.kernels import fused
from tests.gpu import DEVICE, pytestmark  # noqa: F401, the mark is read by pytest
from tests.support.pieces import pieces_of
from tests.support.reference import polar

SHAPES = [(2, 512, 1024), (2, 511, 1023), (3, 64, 80), (1, 1, 7), (1, 288, 304)]


def random_on_device(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_against_fp64(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    batch, rows, cols = shape
    matmuls = kernels.select("triton", device=torch.device(DEVICE), dtype=dtype, rows=rows, cols=cols)
    x, square = random_on_device(*shape, dtype=dtype), random_on_device(batch, rows, rows, dtype=dtype)
    a = square.triu() + square.triu(1).mT
    s = torch.linspace(0.5, 2.0, batch, device=DEVICE)[:, None, None]
    xd, ad, sd = x.double(), a.double(), s.double()
    results = {
        "gram": (matmuls.multiply(x, None, [], torch.empty_like(a), scale=s), sd * (xd @ xd.mT)),
        "polynomial": (
            matmuls.multiply(a, a, [(a, -2.5)], torch.empty_like(a), alpha=1.25),
            -2.5 * ad + 1.25 * ad @ ad,
        ),
        "full": (matmuls.multiply(a, a, [(a, 0.5)], torch.empty_like(a), symmetric=False), 0.5 * ad + ad @ ad),
        "apply": (
            matmuls.multiply(a, x, [(x, s)], torch.empty_like(x), scale=s, symmetric=False),
            sd * (sd * xd + ad @ xd),
        ),
    }
    # One rounding of the result, and those of the sums in fp32, whose terms may cancel.
    half = 2**-8 if dtype == torch.bfloat16 else 2**-24
    for name, (result, exact) in results.items():
        beyond = ((result.double() - exact).abs() - half * exact.abs()).max()
        assert float(beyond) < 8 * 2**-24 * cols**0.5 * float(exact.abs().max()), name
        assert name in ("full", "apply") or torch.equal(result, result.mT), name


@pytest.mark.parametrize("method", ["standard", "gram"])
def test_triton_is_as_accurate_as_torch_and_the_same_in_every_run(method: Literal["standard", "gram"]) -> None:
    x = random_on_device(4, 384, 768)
    exact = torch.stack([polar(matrix.double(), list(coefficient_schedule("polar_express", 5))) for matrix in x])

    def error(result: Tensor) -> float:
        return float((result.double() - exact).norm() / exact.norm())

    by_triton = mm.orthogonalize(x, method=method, kernels="triton")
    assert error(by_triton) < 1.1 * error(mm.orthogonalize(x, method=method, kernels="torch"))
    for _ in range(5):
        assert torch.equal(mm.orthogonalize(x, method=method, kernels="triton"), by_triton)
    assert torch.equal(mm.orthogonalize(x[1], method=method, kernels="triton"), by_triton[1])


def test_the_fused_pair_computes_what_torch_does_piece_by_piece() -> None:
    shapes = [(64, 64), (33, 70), (70, 33), (3, 40, 9), (4100,), (5,)]
    active = torch.tensor([True, True, False, True, True, True], device=DEVICE)
    gradients = [random_on_device(*shape) for shape in shapes]
    gradients[2].fill_(torch.nan)
    momenta, weights, updates = ([random_on_device(*shape) for shape in shapes] for _ in range(3))
    # Every other direction lies transposed, as in an assembled tall matrix.
    directions = [torch.empty(s, dtype=torch.bfloat16, device=DEVICE) for s in shapes]
    directions[1] = torch.empty(70, 33, dtype=torch.bfloat16, device=DEVICE).mT
    old, pieces = [m.clone() for m in momenta], pieces_of(momenta, directions)
    fused.fold(pieces, gradients, momenta, directions, active, momentum=0.95, nesterov=True)
    for g, m, d, before, on in zip(gradients, momenta, directions, old, active.tolist(), strict=True):
        expected = torch.lerp(before, g, 0.05) if on else before
        torch.testing.assert_close(m, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(d, (torch.lerp(g, m, 0.95) if on else m).bfloat16(), rtol=2**-7, atol=1e-6)
    keep, size = torch.rand(len(shapes), device=DEVICE), torch.rand(len(shapes), device=DEVICE)
    old = [w.clone() for w in weights]
    fused.apply(pieces_of(weights, updates), weights, [], updates, active, keep=keep, size=size)
    for w, u, before, k, s, on in zip(weights, updates, old, keep, size, active.tolist(), strict=True):
        torch.testing.assert_close(w, before * k - u * s if on else before, rtol=0, atol=0)
