"""Stochastic rounding: rounds fp32 to bf16 up or down at random, so that small steps count on average."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor


class Rounding(NamedTuple):
    """The stochastic rounding of a tensor's elements, by their row-major numbers in the whole parameter.

    Element k has the number ``start + Σ k[d]·strides[d]``. Its random number depends only on this number and on the
    keys, not on sharding, threads or earlier calls. In parameters with more than 2³² elements, some elements share a
    random number.

    Attributes:
        keys: Two numbers of 32 bits (`keys_of`).
        start: Number of the first element.
        strides: For each dim, the difference between the numbers of successive elements.
    """

    keys: tuple[int, int]
    start: int
    strides: tuple[int, ...]

    def write(self, exact: Tensor, into: Tensor) -> None:
        """Round each element to one of its two neighbors in bf16, with probabilities that keep its expectation.

        Values that bf16 can represent stay unchanged. Only integer operations are used, so all devices give the same
        bits.

        Args:
            exact: fp32, any shape and strides.
            into: bf16, the same shape, written.
        """
        bits = exact.view(torch.int32)
        # Adding up to 2**16 - 1 to the bits, which grow with the magnitude, carries into bf16's last bit by chance.
        bits = bits.add(self._random(exact).bitwise_and_(0xFFFF)).bitwise_and_(-0x10000)
        into.copy_(torch.where(exact.isfinite(), bits.view(torch.float32), exact))

    def _random(self, like: Tensor) -> Tensor:
        x = torch.full(like.shape, _signed(self.start + self.keys[0]), dtype=torch.int32, device=like.device)
        for dim, (size, stride) in enumerate(zip(like.shape, self.strides, strict=True)):
            along = torch.arange(size, dtype=torch.int64, device=like.device).mul_(stride).to(torch.int32)
            x += along.view([-1 if other == dim else 1 for other in range(like.ndim)])
        return mixed(mixed(x).add_(_signed(self.keys[1])))


def keys_of(seed: int, step: int, name: str) -> tuple[int, int]:
    """Return the keys of the random numbers of one tensor in one step."""
    digest = hashlib.blake2b(f"{seed} {step} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def mixed(x: Tensor) -> Tensor:
    """Mix int32 in place by the finalizer of MurmurHash3 (A. Appleby): each bit of the result depends on all bits."""
    x ^= x.bitwise_right_shift(16).bitwise_and_(0xFFFF)
    x *= _signed(0x85EBCA6B)
    x ^= x.bitwise_right_shift(13).bitwise_and_(0x7FFFF)
    x *= _signed(0xC2B2AE35)
    x ^= x.bitwise_right_shift(16).bitwise_and_(0xFFFF)
    return x


def _signed(number: int) -> int:
    """Return the low 32 bits of a number, read as int32."""
    return (number + 2**31) % 2**32 - 2**31
