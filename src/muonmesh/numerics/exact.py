"""Exact sums: adds fp64 numbers as integers, so that the bits of a sum do not depend on order and grouping.

Floating-point sums round at every addition, so the sums of two halves of a matrix do not add up to the sum of the
matrix. This module writes every number as an integer multiple of a power of two, the same for the whole matrix. The
integer has two parts of 64 bits, and integers add up without rounding. This takes two passes over all numbers: the
first finds the largest exponent, which gives the power of two; the second adds the integers.
"""

from __future__ import annotations

import torch
from torch import Tensor

_NOT_FINITE = 2047
"""The exponent field of infinities and NaNs in fp64 (IEEE 754)."""

_LEAST = 62
"""The smallest exponent field in use, for 2**-960, so that the power of two that multiplies the numbers is finite."""


def largest_exponent(values: Tensor) -> Tensor:
    """Return the largest exponent field of fp64 numbers, 0-d int64; infinities and NaNs have the largest field of all.

    Args:
        values: Any shape, fp64; no elements count as zeros.
    """
    if not values.numel():
        return torch.zeros((), dtype=torch.int64, device=values.device)
    largest = values.abs().amax()  # NaN if there is one
    return largest.view(torch.int64).bitwise_right_shift(52).bitwise_and(_NOT_FINITE)


def limbs_of(values: Tensor, exponent: Tensor, *, count: int) -> Tensor:
    """Return the sum of some of the numbers as two integers, int64 (2,); add the results of all parts for `total_of`.

    Each number is rounded at the last bit of the second integer. With 2**24 numbers, this bit is 2**-76 of the largest
    number.

    Args:
        values: Any shape, fp64.
        exponent: `largest_exponent` of all numbers of the sum, 0-d.
        count: The number of all numbers of the sum.
    """
    bits = _bits(count)
    power = _power_of_two(bits - _unbiased(exponent))
    scaled = values * power  # exact, except for bits below the last one
    first = scaled.trunc()
    second = (scaled - first).mul_(2.0**bits).round_()
    return torch.stack([first.to(torch.int64).sum(), second.to(torch.int64).sum()])


def total_of(limbs: Tensor, exponent: Tensor, *, count: int) -> Tensor:
    """Return the sum of all numbers from their integers, fp64; NaN if a number was not finite.

    Args:
        limbs: The sum of the results of `limbs_of` over all numbers, int64 (..., 2).
        exponent: `largest_exponent` of all numbers, (...).
        count: The number of all numbers.
    """
    bits, unbiased = _bits(count), _unbiased(exponent)
    first, second = limbs.double().unbind(-1)
    fraction = first * 2.0**-bits + second * 4.0**-bits
    half = unbiased >> 1  # in two steps, since the power of the largest exponent is no fp64 number
    total = fraction * _power_of_two(half) * _power_of_two(unbiased - half)
    return torch.where(exponent == _NOT_FINITE, torch.nan, total)


def _bits(count: int) -> int:
    """Return the number of bits of an integer such that ``count`` integers add up to less than 2**63."""
    return 62 - (max(1, count) - 1).bit_length()


def _unbiased(exponent: Tensor) -> Tensor:
    """Return e, for which all numbers are below 2**e, from their largest exponent field."""
    return exponent.clamp(min=_LEAST) - 1022


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2**exponent in fp64, exactly: its bits, since `torch.pow` may be off by one in the last place."""
    return (exponent + 1023).bitwise_left_shift(52).view(torch.float64)
