"""Matrices of 4,096 rows whose singular vectors are known by how they are made, and errors without a decomposition.

`device_forms` has them as its parts "large momentum" and "large". A decomposition in fp64 would take minutes for each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

ROWS = 4096
WIDE = 14336
_FALLEN = 1 / 2000
"""Singular values below this times the largest have no part in an error, as in `criteria.judged`."""


class Known(NamedTuple):
    """A matrix in bf16 with the decomposition of what was rounded.

    Attributes:
        x: The matrix, (rows, cols).
        u, s, v: Of the singular values that count: (rows, count), (count,) and (cols, count), in fp32.
        rounded: What rounding added, (rows, cols); None: the decomposition is that of x.
    """

    x: Tensor
    u: Tensor
    s: Tensor
    v: Tensor
    rounded: Tensor | None


@functools.cache
def _orthonormal(rows: int, cols: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(rows, cols, generator=generator))[0]


def _with_values(s: Tensor, cols: int) -> Known:
    u, v = _orthonormal(ROWS, ROWS, 0), _orthonormal(cols, ROWS, 1)
    exact = (u * s.float()) @ v.mT
    x = exact.bfloat16()
    count = int((s > s.max() * _FALLEN).sum())
    return Known(x, u[:, :count], s[:count].float(), v[:, :count], exact.neg_().add_(x))


def _by_subspace(x: Tensor) -> Known:
    """A matrix with few values that count, whose vectors a subspace iteration finds to all digits."""
    wide = x.double()
    basis = torch.linalg.qr(wide @ torch.randn(x.shape[1], 64, dtype=torch.float64))[0]
    for _ in range(3):
        basis = torch.linalg.qr(wide @ (wide.mT @ basis))[0]
    u, s, vh = torch.linalg.svd(basis.mT @ wide, full_matrices=False)
    count = int((s > s[0] * _FALLEN).sum())
    return Known(x, (basis @ u[:, :count]).float(), s[:count].float(), vh[:count].mT.float(), None)


def inputs(part: str) -> Iterator[tuple[str, Known]]:
    """The named matrices of a part."""
    count = torch.arange(1, ROWS + 1, dtype=torch.float64)
    evenly = torch.linspace(0, 1, ROWS, dtype=torch.float64)
    noise = 1.0 - 0.95 * evenly  # as of a Gaussian matrix that is not square
    square, wide = ROWS, WIDE
    falling = [
        ("power 1.5 and a floor of .003", count**-1.5 + 0.003 * (1 - evenly / 1.1), (square, wide)),
        (
            "16 values of a decade above noise",
            torch.where(count <= 16, 10 ** (-count / 16), 0.02 * noise),
            (square, wide),
        ),
        ("power .8 and an exponential tail", count**-0.8 * torch.exp(-2 * evenly), (square,)),
    ]
    other = [
        ("rank 1", (count <= 1).double(), (square, wide)),
        ("100 at 1, rest 0.003", torch.where(count <= 100, 1.0, 0.003), (square, wide)),
        ("2048 at 1, rest 0.01", torch.where(count <= 2048, 1.0, 0.01), (square,)),
        ("four decades", 10.0 ** (-4 * evenly), (square,)),
        ("rank 32 and noise", torch.where(count <= 32, 1.0, 0.01 * noise), (square, wide)),
        ("noise alone", noise, (square,)),
        ("rank 32", (count <= 32).double(), (square,)),
    ]
    for name, values, all_cols in falling if part == "large momentum" else other:
        for cols in all_cols:
            yield f"{name}, {ROWS}×{cols}", _with_values(values, cols)
    if part == "large":
        hilbert = 1 / (count[:, None] + torch.arange(ROWS, dtype=torch.float64))
        yield f"Hilbert, {ROWS}×{ROWS}", _by_subspace(hilbert.bfloat16())


def judged(matrix: Known, contenders: Mapping[str, Callable[[Tensor], Tensor]]) -> dict[str, dict[str, float]]:
    """Error to the polar factor, largest singular value, and norm over √rows of what each contender makes of a matrix.

    The polar factor of U S Vᵀ + E is U (1 + K) Vᵀ there, to first order in E, where K is the skew part of Uᵀ E V over
    the means of singular values. Errors are relative, in the Frobenius norm, in the directions of U and V.
    """
    expected = torch.eye(len(matrix.s))
    if matrix.rounded is not None:
        added = matrix.u.mT @ matrix.rounded @ matrix.v
        expected += (added - added.mT) / (matrix.s[:, None] + matrix.s)
    figures = {}
    for name, run in contenders.items():
        result = run(matrix.x).float()
        error = (matrix.u.mT @ result @ matrix.v - expected).norm() / len(matrix.s) ** 0.5
        largest = torch.linalg.eigvalsh(result @ result.mT)[-1].sqrt()
        size = result.norm() / ROWS**0.5
        figures[name] = {"polar": float(error), "largest": float(largest), "size": float(size)}
    return figures
