"""Blockwise int8: numbers kept as 255 codes for multiples of the largest of their block.

The codes are the dynamic tree of 8-bit optimizers (Dettmers et al., arXiv 2110.02861): seven decades, the largest in
64 parts, each smaller one in half as many. docs/decisions/0016 has the figures for them. What is decoded and encoded
again with the largest number of its block gives the same codes.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

_DECADES = 7


def largest(values: Tensor, *, first: int, size: int) -> Tensor:
    """Return the largest magnitude in each block that values have elements of, fp32 (lines, blocks); NaN if one is.

    Args:
        values: Consecutive elements of each line, (lines, width), fp32.
        first: Number of the first of them in its line.
        size: Elements of a block; the last block of a line may be shorter.
    """
    before = first % size
    after = -(before + values.shape[1]) % size
    values = values.abs()
    if before or after:  # zeros where a block has elements elsewhere
        values = torch.nn.functional.pad(values, (before, after))
    return values.reshape(len(values), -1, size).amax(-1)


def encode(values: Tensor, scales: Tensor, *, first: int, size: int) -> Tensor:
    """Return values as int8 (lines, width), each the code that is nearest to its share of the scale.

    Args:
        values: As in `largest`.
        scales: The largest magnitude in each whole block, fp32 (lines, blocks).
        first: As in `largest`.
        size: As in `largest`.
    """
    spread = _spread(scales, first, values.shape[1], size)
    shares = values / torch.where(spread == 0, 1.0, spread)
    _, borders = _codes(values.device)
    codes = torch.bucketize(shares.abs().nan_to_num_(0.0), borders, out_int32=True)
    return torch.where(shares < 0, -codes, codes).to(torch.int8)


def decode(codes: Tensor, scales: Tensor, *, first: int, size: int) -> Tensor:
    """Return the values that codes stand for, fp32 (lines, width); NaN where a scale is not finite.

    Args:
        codes: What `encode` returns.
        scales: As in `encode`.
        first: As in `largest`.
        size: As in `largest`.
    """
    multiples, _ = _codes(codes.device)
    index = codes.to(torch.int32).add_(len(multiples) // 2).reshape(-1)
    values = multiples.index_select(0, index).view(codes.shape)
    return values.mul_(_spread(scales, first, codes.shape[1], size))


@lru_cache(maxsize=64)
def _codes(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the 255 multiples that the codes -127 to 127 stand for, and the borders of the 128 that are not negative.

    Both fp32. Worked out in fp64 on the CPU, so they are the same everywhere.
    """
    positive = [
        10.0 ** (decade + 1 - _DECADES) * (0.1 + 0.9 * (part + 0.5) / 2**decade)
        for decade in range(_DECADES)
        for part in range(2**decade)
    ]
    half = torch.tensor([0.0, *positive[:-1], 1.0], dtype=torch.float64)
    multiples = torch.cat([-half[1:].flip(0), half]).float()
    borders = ((half[1:] + half[:-1]) / 2).float()
    return multiples.to(device), borders.to(device)


def _spread(scales: Tensor, first: int, width: int, size: int) -> Tensor:
    """Return the scale of each element, (lines, width)."""
    before = first % size
    return scales.repeat_interleave(size, dim=1)[:, before : before + width]
