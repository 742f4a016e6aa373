"""Orthogonalization on the GPU against the fp64 SVD: strength at any scale, accuracy, and untouched inputs."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from torch import Tensor

import muonmesh as mm
from muonmesh.numerics.coefficients import coefficient_schedule
from tests.gpu import DEVICE, pytestmark  # noqa: F401, the mark is read by pytest
from tests.support.reference import polar

NORMS = [1e7, 1e-4, 1e-6, 1e-8, 1e-10, 1e-14, 1e-18, 1e-30]
DTYPES = [torch.float32, torch.bfloat16]
Method = Literal["standard", "gram"]


def gaussian(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)


def decaying_on_device(rows: int, cols: int, decades: float = 4.0) -> Tensor:
    """Singular values from 1 down to 10^-decades, evenly in the logarithm."""
    u, _, vh = torch.linalg.svd(gaussian(rows, cols).double(), full_matrices=False)
    values = torch.logspace(0, -decades, len(vh), dtype=torch.float64, device=DEVICE)
    x: Tensor = (u * values) @ vh
    return x.float()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_full_strength_at_any_scale(norm: float, dtype: torch.dtype) -> None:
    x = gaussian(64, 256)
    x = (x.double() * (norm / x.double().norm())).float()
    values = torch.linalg.svdvals(mm.orthogonalize(x, dtype=dtype).double())
    assert 0.95 < values.mean().item() < 1.05
    assert values.min().item() > 0.8
    assert values.max().item() < 1.2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zero_stays_exactly_zero(dtype: torch.dtype) -> None:
    result = mm.orthogonalize(torch.zeros(3, 64, 256, device=DEVICE), dtype=dtype)
    assert torch.count_nonzero(result).item() == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("exponent", [-60, -7, 1, 40])
def test_a_power_of_two_changes_no_bit(exponent: int, dtype: torch.dtype) -> None:
    x = gaussian(4, 96, 160)
    assert torch.equal(
        mm.orthogonalize(x * 2.0**exponent, dtype=dtype),
        mm.orthogonalize(x, dtype=dtype),
    )


# Relative Frobenius error to the fp64 polynomial; about twice what a CPU shows at 768×3072.
@pytest.mark.parametrize(
    ("dtype", "method", "spectrum", "bound"),
    [
        (torch.float32, "standard", "gaussian", 2e-4),
        (torch.float32, "standard", "decaying", 1e-3),
        (torch.bfloat16, "standard", "gaussian", 0.03),
        (torch.bfloat16, "standard", "decaying", 0.15),
        (torch.bfloat16, "gram", "gaussian", 0.06),
        (torch.bfloat16, "gram", "decaying", 0.15),
    ],
)
@pytest.mark.parametrize("shape", [(256, 1024), (768, 3072)])
def test_accuracy(shape: tuple[int, int], dtype: torch.dtype, method: Method, spectrum: str, bound: float) -> None:
    x = gaussian(*shape) if spectrum == "gaussian" else decaying_on_device(*shape)
    exact = polar(x.double(), list(coefficient_schedule("polar_express", 5)))
    for matrix, expected in ((x, exact), (x.mT, exact.mT)):
        result = mm.orthogonalize(matrix, steps=5, method=method, dtype=dtype).double()
        error = (result - expected).norm() / expected.norm()
        assert error.item() < bound
        assert torch.linalg.matrix_norm(result, 2).item() < 1.15


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_input_is_not_written(dtype: torch.dtype) -> None:
    storage = gaussian(128, 128).to(dtype)
    before = storage.clone()
    for x in (storage, storage.T, storage[::2, 1::3], storage.view(2, 64, 128)):
        result = mm.orthogonalize(x)
        assert result.shape == x.shape
        assert result.dtype == dtype
        assert result.data_ptr() != x.data_ptr()
    assert torch.equal(storage, before)


def test_what_is_not_finite_stays_in_its_matrix() -> None:
    batch = gaussian(3, 64, 96)
    clean = mm.orthogonalize(batch)
    batch[1, 5, 7] = math.nan
    result = mm.orthogonalize(batch)
    assert not result[1].isfinite().any()
    assert torch.equal(result[[0, 2]], clean[[0, 2]])
