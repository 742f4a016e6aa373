"""Blockwise int8: numbers stored as one of 255 codes, which stand for multiples of the largest number of their block.

The codes are the dynamic tree of 8-bit optimizers (Dettmers et al., arXiv 2110.02861): seven decades, the largest with
64 codes, each smaller decade with half as many. docs/decisions/0017 has figures on them. Decoded values that are
encoded again with the same scale give the same codes.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from muonmesh.numerics.kernels.pinned_copies import upload

_DECADES = 7


class Codes(NamedTuple):
    """The tables of values that codes stand for, on a device.

    Attributes:
        multiples: The factor of the scale for each of the codes -127 to 127, fp32 (255,).
        borders: The borders between the factors that are not negative, fp32 (127,).
    """

    multiples: Tensor
    borders: Tensor

    @staticmethod
    def on(device: torch.device) -> Codes:
        """Return the tables on a device. They are computed in fp64 on the CPU, so they are the same everywhere."""
        half = [
            10.0 ** (decade + 1 - _DECADES) * (0.1 + 0.9 * (part + 0.5) / 2**decade)
            for decade in range(_DECADES)
            for part in range(2**decade)
        ]
        half = [0.0, *half[:-1], 1.0]
        multiples = [*(-value for value in half[:0:-1]), *half]
        borders = [(low + high) / 2 for low, high in itertools.pairwise(half)]
        return Codes(*(upload(values, dtype=torch.float32, device=device) for values in (multiples, borders)))


def largest(values: Tensor, *, first: int, size: int) -> Tensor:
    """Return the largest magnitude in each block, fp32 (lines, blocks); NaN for a block that contains NaN.

    Args:
        values: Consecutive elements of each line, (lines, width), fp32.
        first: Number of the first element in its line.
        size: Elements of a block; the last block of a line may be shorter.
    """
    before = first % size
    after = -(before + values.shape[1]) % size
    values = values.abs()
    if before or after:  # zeros in place of a block's elements outside these values
        values = torch.nn.functional.pad(values, (before, after))
    return values.reshape(len(values), -1, size).amax(-1)


def encode(values: Tensor, scales: Tensor, codes: Codes, *, first: int, size: int) -> Tensor:
    """Return values as int8 codes (lines, width), each the code whose value is nearest.

    Args:
        values: Consecutive elements of each line, (lines, width), fp32.
        scales: The largest magnitude in each whole block, fp32 (lines, blocks).
        codes: The tables of codes on the same device.
        first: Number of the first element in its line.
        size: Elements of a block.
    """
    spread = _spread(scales, first, values.shape[1], size)
    shares = values / torch.where(spread == 0, 1.0, spread)
    numbers = torch.bucketize(shares.abs().nan_to_num_(0.0), codes.borders, out_int32=True)
    return torch.where(shares < 0, -numbers, numbers).to(torch.int8)


def decode(numbers: Tensor, scales: Tensor, codes: Codes, *, first: int, size: int) -> Tensor:
    """Return the values that codes stand for, fp32 (lines, width); NaN for blocks whose scale is not finite.

    Args:
        numbers: The codes that `encode` returned, int8 (lines, width).
        scales: The scale of each block, fp32 (lines, blocks).
        codes: The tables of codes on the same device.
        first: Number of the first element in its line.
        size: Elements of a block.
    """
    index = numbers.to(torch.int32).add_(len(codes.multiples) // 2).reshape(-1)
    values = codes.multiples.index_select(0, index).view(numbers.shape)
    return values.mul_(_spread(scales, first, numbers.shape[1], size))


def _spread(scales: Tensor, first: int, width: int, size: int) -> Tensor:
    """Return the scale of each element, (lines, width)."""
    before = first % size
    return scales.repeat_interleave(size, dim=1)[:, before : before + width]
