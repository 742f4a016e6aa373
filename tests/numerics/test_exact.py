"""Exact sums: the same bits in any order and any grouping, and close to the true sum, which fractions tell."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from muonmesh.numerics.exact import largest_exponent, limbs_of, total_of

COVERS = (
    "numerics.exact.limbs_of",
    "numerics.exact.total_of",
)


def added_exactly(parts: list[Tensor]) -> Tensor:
    """The sum of parts as ranks take it: the largest exponent of all, then the integers of all."""
    count = sum(part.numel() for part in parts)
    exponent = torch.stack([largest_exponent(part) for part in parts]).amax()
    limbs = torch.stack([limbs_of(part, exponent, count=count) for part in parts]).sum(0)
    return total_of(limbs, exponent, count=count)


def awkward(kind: str, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    values = torch.randn(count, generator=generator, dtype=torch.float64)
    if kind == "magnitudes":
        return values * 10.0 ** torch.randint(-30, 30, (count,), generator=generator)
    if kind == "cancelling":
        return torch.cat([values, -values[:-1]])
    if kind == "tiny":
        return values.abs() * 1e-290
    if kind == "huge":
        return values.abs() * (1e308 / count / 8)
    return values.square()


@pytest.mark.parametrize("count", [1, 2, 7, 1000, 4097])
@pytest.mark.parametrize("kind", ["squares", "magnitudes", "cancelling", "tiny", "huge"])
def test_neither_order_nor_grouping_changes_a_bit(kind: str, count: int) -> None:
    values = awkward(kind, count)
    expected = added_exactly([values])
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        shuffled = values[torch.randperm(len(values), generator=generator)]
        borders = sorted(int(n) for n in torch.randint(0, len(values) + 1, (3,), generator=generator))
        assert torch.equal(added_exactly(list(shuffled.tensor_split(borders))), expected)


@pytest.mark.parametrize("count", [1, 7, 1000])
@pytest.mark.parametrize("kind", ["squares", "magnitudes", "cancelling", "tiny", "huge"])
def test_the_sum_is_that_of_fractions(kind: str, count: int) -> None:
    values = awkward(kind, count)
    true = sum(Fraction(value) for value in values.tolist())
    largest = max(abs(Fraction(value)) for value in values.tolist())
    # Each number is rounded to 2**-76 of the largest one or less, and the sum once or twice.
    bound = abs(true) * Fraction(2) ** -52 + largest * len(values) * Fraction(2) ** -76
    assert abs(Fraction(float(added_exactly([values]))) - true) <= bound


def test_a_plain_sum_would_depend_on_the_order() -> None:
    """Else these tests would show nothing."""
    values = awkward("magnitudes", 1000)
    assert values.sum() != values.flip(0).cumsum(0)[-1]
    assert torch.equal(added_exactly([values]), added_exactly([values.flip(0)]))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_makes_the_sum_so(bad: float, count: int) -> None:
    """Two of them too, whose integers may add up to 0."""
    values = torch.tensor([1.0, *[bad] * count, 2.0], dtype=torch.float64)
    assert added_exactly([torch.ones(5, dtype=torch.float64), values]).isnan()


def test_zeros_and_nothing_add_up_to_zero() -> None:
    nothing = torch.empty(0, dtype=torch.float64)
    assert float(added_exactly([nothing, torch.zeros(3, dtype=torch.float64)])) == 0.0
    assert float(added_exactly([nothing])) == 0.0
    assert float(added_exactly([nothing, torch.tensor([-3.0], dtype=torch.float64)])) == -3.0


def test_a_sum_of_ones_counts() -> None:
    for count in (1, 3, 2**20 + 1):
        assert float(added_exactly([torch.ones(count, dtype=torch.float64)])) == count


def test_as_many_numbers_as_a_matrix_may_have_do_not_overflow() -> None:
    """All of them the largest that there is beside it; the integers are added up as those of 2**40 numbers would be."""
    count = 2**40
    values = torch.tensor([1 - 2.0**-53], dtype=torch.float64)
    exponent = largest_exponent(values)
    limbs = limbs_of(values, exponent, count=count) * count
    assert float(total_of(limbs, exponent, count=count)) == pytest.approx(count, rel=2.0**-44)
