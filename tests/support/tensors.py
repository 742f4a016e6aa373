"""Tensors that tests make and compare: random ones from a seed, the same bits, the error of one against another.

Also steps with random gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normal random numbers of a seed of their own."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def random_fp64(*shape: int, seed: int = 0) -> Tensor:
    """Return normal random numbers that other ones of a dtype are rounded from."""
    return random(*shape, seed=seed, dtype=torch.float64)


def _weights_of(optimizer: Optimizer) -> list[Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def give_random(optimizer: Optimizer, seed: int, scale: float = 1.0) -> None:
    """Give all weights random gradients of a seed."""
    for number, weight in enumerate(_weights_of(optimizer)):
        weight.grad = random_fp64(*weight.shape, seed=30 * seed + number).to(weight.dtype) * scale


def random_step(optimizer: Optimizer, seed: int, scale: float = 1.0) -> None:
    """Step with random gradients of a seed."""
    give_random(optimizer, seed, scale)
    optimizer.step()


def weights_and_state(optimizer: Optimizer) -> list[Tensor]:
    """Return copies of all weights and of their state, in the order of the groups."""
    weights = _weights_of(optimizer)
    state = [value for weight in weights for value in optimizer.state[weight].values()]
    return [tensor.detach().clone() for tensor in (*weights, *state)]


def same_bits(a: Any, b: Any) -> bool:
    """Whether two nested values are equal, tensors bit for bit and of the same dtype."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same_bits(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(same_bits, a, b))
    return bool(a == b)


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over that of what is expected, in fp64."""
    return float((result.double() - expected.double()).norm() / expected.double().norm())


def commuting_operands(rows: int, cols: int, batch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return X, and A and B that commute: polynomials of one symmetric matrix, exactly symmetric."""
    torch.manual_seed(rows + cols)
    x = torch.randn(batch, rows, cols, dtype=torch.float64) / cols**0.5
    s = torch.randn(batch, rows, rows, dtype=torch.float64)
    s = (s + s.mT) / rows**0.5 / 2
    a, b = (s + s @ s).to(dtype), (2 * s - s @ s).to(dtype)
    return x.to(dtype), a.triu() + a.triu(1).mT, b.triu() + b.triu(1).mT
