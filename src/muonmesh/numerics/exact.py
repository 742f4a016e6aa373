"""Exact sums: fp64 numbers are added as integers, so that no order and no grouping changes a bit of the sum.

Floating-point sums round at every addition, so the sums of two halves of a matrix are not the sum of the matrix. Here
every number is written in units of one power of two, the same for the whole matrix, as an integer of two parts of
64 bits, and integers add up without rounding. It takes two rounds over all numbers: first the largest exponent among
them, from which the unit follows, then the integers.
"""

from __future__ import annotations

import torch
from torch import Tensor

_NOT_FINITE = 2047
"""The exponent field of infinities and NaNs in fp64 (IEEE 754)."""

_LEAST = 62
"""The least exponent that is used, 2**-960, so that the power of two that numbers are multiplied by is finite."""


def largest_exponent(values: Tensor) -> Tensor:
    """Return the largest exponent field of fp64 numbers, 0-d int64; that of numbers that are not finite is above all.

    Args:
        values: Any shape, fp64; no elements count as zeros.
    """
    if not values.numel():
        return torch.zeros((), dtype=torch.int64, device=values.device)
    largest = values.abs().amax()  # NaN if there is one
    return largest.view(torch.int64).bitwise_right_shift(52).bitwise_and(_NOT_FINITE)


def limbs_of(values: Tensor, exponent: Tensor, *, count: int) -> Tensor:
    """Return some of the numbers of a sum, added up as two integers, int64 (2,); whoever has all of them adds these up.

    What a number has below the last bit of the second integer is rounded away, number by number; with 2**24 numbers
    that bit is 2**-76 of the largest one.

    Args:
        values: Any shape, fp64.
        exponent: `largest_exponent` of all numbers, 0-d.
        count: How many numbers there are in all.
    """
    bits = _bits(count)
    power = _power_of_two(bits - _unbiased(exponent))
    scaled = values * power  # exact, but for what would be below the last bit
    first = scaled.trunc()
    second = (scaled - first).mul_(2.0**bits).round_()
    return torch.stack([first.to(torch.int64).sum(), second.to(torch.int64).sum()])


def total_of(limbs: Tensor, exponent: Tensor, *, count: int) -> Tensor:
    """Return what the integers of all numbers add up to, fp64; NaN where a number was not finite.

    Args:
        limbs: What `limbs_of` returns, added up over all numbers, int64 (..., 2).
        exponent: `largest_exponent` of all numbers, (...).
        count: How many numbers there are.
    """
    bits, unbiased = _bits(count), _unbiased(exponent)
    first, second = limbs.double().unbind(-1)
    fraction = first * 2.0**-bits + second * 4.0**-bits
    half = unbiased >> 1  # in two steps, since the power of the largest exponent is no fp64 number
    total = fraction * _power_of_two(half) * _power_of_two(unbiased - half)
    return torch.where(exponent == _NOT_FINITE, torch.nan, total)


def _bits(count: int) -> int:
    """Return how many bits an integer may have so that ``count`` of them add up to less than 2**63."""
    return 62 - (max(1, count) - 1).bit_length()


def _unbiased(exponent: Tensor) -> Tensor:
    """Return e, for which all numbers are below 2**e, from their largest exponent field."""
    return exponent.clamp(min=_LEAST) - 1022


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2**exponent in fp64, exactly: its bits, since `torch.pow` may be off by one in the last place."""
    return (exponent + 1023).bitwise_left_shift(52).view(torch.float64)
