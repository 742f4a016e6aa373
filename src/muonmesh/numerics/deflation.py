"""Deflation: reduces the largest singular values of a matrix, so that the iteration need not raise the others as far.

The polynomials of an iteration are made for singular values in [l, 1], so a matrix is divided by a bound of its largest
singular value. If a few are far above all others, as in momentum, the others become small by this division. This module
finds these few by one power iteration, and reduces them to the smallest among them. Their vectors, and so the polar
factor, do not change, up to the accuracy of the power iteration (Halko, Martinsson and Tropp 2011, arXiv 0909.4061,
algorithm 4.3).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from muonmesh.numerics import kernels
from muonmesh.numerics.kernels.pinned_copies import pinned
from muonmesh.numerics.kernels.threads import keep, run_on_one_thread, scratch
from muonmesh.numerics.precision import exact_products
from muonmesh.numerics.stochastic import mixed

FROM_ROWS = 384
"""From this number of rows on, deflation saves more than it costs (measured, on a CPU)."""

_FLOOR = 1 / 32
"""Values are not reduced below this fraction of the largest: in bf16, rounding leaves some thousandths of it."""

# A deflated matrix is near enough to its polar factor if its Schatten norm is so many times smaller than its first
# norm, because small values are then raised as far as by "polar_express"; or if the mean of (1 − σ²)² is at most this
# (measured).
_NARROWED, _DEPARTURE = 10.8, 0.03


@dataclass(frozen=True)
class Deflation:
    """Reduces the largest singular values first, and applies more polynomials to a result that is still far off.

    Deflated matrices are then divided by ‖(X Xᵀ)²‖^¼ (Frobenius), a closer bound of the largest singular value than the
    norm. The first polynomial is a quintic, which uses the products of this bound.

    Only the result shows how many values the polynomials left low. The CPU reads a number to decide, which would be a
    wait on a device, so `finish` is for a CPU, and for as many steps as the set is made for.

    Attributes:
        vectors: How many of the largest singular values are reduced to the smallest among them.
        finish: Polynomials that are applied last if the result is not yet near its polar factor.
        has_table: Whether a device may take three other polynomials, which follow for each matrix from how far the
            bound of its largest singular value fell (`muonmesh.numerics.device_deflation`).
    """

    vectors: int = 64
    finish: tuple[tuple[float, ...], ...] = ()
    has_table: bool = False

    def falls_short(self, x: Tensor, loaded: Tensor, norm: Tensor) -> bool:
        """Return whether a result needs `finish`, for one matrix on a CPU; False if it is not finite.

        Args:
            x: The result, (1, rows, cols).
            loaded: The Frobenius norm of the matrix before its largest singular values were reduced.
            norm: What it was divided by.
        """
        if not self.finish or loaded > _NARROWED * norm:
            return False
        return departure(x[0], self.vectors) > _DEPARTURE


def deflate(x: Tensor, vectors: int) -> None:
    """Reduce the largest singular values of each matrix to the smallest among them, in place.

    The values are Ritz values: with Y = X Xᵀ Ω, where Ω has random signs, an orthonormal basis Q of Y's columns, and
    Q Qᵀ X = U S Vᵀ, X becomes X − X V (1 − τ/S) Vᵀ, where τ is the smallest of S, or 1/32 of the largest if this is
    more. V is nearer to singular vectors of X than U is, and the more so the further their values are above the others.
    Zeros stay zeros, and a matrix that is not finite becomes NaN.

    If the smallest of S is no larger than what rounding M to its dtype adds, what lies below it is rounding too. Then τ
    is so large that it is raised as far as by "polar_express", and no further.

    Each matrix has one thread, because the rounding of sums depends on the number of threads, in LAPACK too. Devices do
    it otherwise (`muonmesh.numerics.device_deflation`).

    Args:
        x: Shape (batch, rows, cols), rows ≤ cols, compute dtype, contiguous.
        vectors: The number of values to reduce, at most the number of rows.
    """

    def one_by_one() -> None:
        for matrix in x.unbind():  # in fp32 the bits of a batch differ from those of a single matrix
            _deflate(_multiplied(matrix), matrix, vectors)

    run_on_one_thread(one_by_one, device=x.device)


def departure(x: Tensor, vectors: int) -> float:
    """Estimate the mean of (1 − σ²)² over the singular values σ of one matrix, (rows, cols).

    The estimate is ‖(1 − X Xᵀ) Ω‖² / (rows · vectors), where Ω has random signs (Hutchinson), with thin products. On a
    CPU it uses one thread.
    """

    def measure() -> float:
        wide = _multiplied(x)
        rows = probe(wide, vectors)
        with exact_products(torch.promote_types(x.dtype, torch.float32)):
            rest = (wide @ (rows @ wide).mT).to(torch.promote_types(x.dtype, torch.float32))
            return rest.sub_(rows.mT).square_().mean().item()

    return run_on_one_thread(measure, device=x.device)


def _multiplied(x: Tensor) -> Tensor:
    """Return a matrix, or a copy in fp32 if the processor cannot multiply bf16."""
    if x.dtype != torch.bfloat16 or kernels.multiplies_bf16():
        return x
    return scratch("deflated", x.shape, dtype=torch.float32, device=x.device).copy_(x)


def probe(x: Tensor, vectors: int) -> Tensor:
    """Return rows of `signs` to multiply matrices x by, (vectors, rows of x), in x's dtype and on its device."""
    rows = x.shape[-2]
    return keep_on(x, ("signs", rows, vectors), lambda: signs(vectors, rows))


def keep_on(like: Tensor, name: Hashable, make: Callable[[], Tensor]) -> Tensor:
    """Return a CPU tensor that is made once, in the dtype and on the device of another; the CPU does not wait."""
    stream = torch.cuda.current_stream(like.device) if like.is_cuda else None  # only this one waits for the upload
    key = name, like.dtype, like.device, stream
    return keep(key, lambda: pinned(make().to(like.dtype), like.device))


def _deflate(x: Tensor, out: Tensor, vectors: int) -> None:
    exact = torch.promote_types(x.dtype, torch.float32)
    with exact_products(exact):
        y = x @ (probe(x, vectors) @ x).mT
        basis, _ = torch.linalg.qr(y.to(exact))
        inside = basis.to(x.dtype).mT @ x
        rest = inside.to(exact)
        gram = rest @ rest.mT
        # A decomposition of a matrix that is not finite raises an error; X is not finite then, and stays so.
        finite = gram.isfinite().flatten(-2).all(-1)[..., None, None]
        squares, rotation = torch.linalg.eigh(
            torch.where(finite, gram, torch.eye(vectors, dtype=exact, device=x.device))
        )
        squares = squares.clamp_min(torch.finfo(exact).tiny)
        values = squares.sqrt()
        target = torch.maximum(values[..., :1], values[..., -1:] * _FLOOR)
        norm = squares.sum(-1, keepdim=True).sqrt()
        # An entry is off by up to half of eps of itself, so singular values that this adds are half of that or less.
        eps = torch.finfo(torch.bfloat16 if out.dtype.itemsize == 2 else out.dtype).eps
        rounding = values[..., :1] < eps / 2 * x.shape[-2] ** -0.5 * norm
        target = torch.where(rounding, _just_narrowed(values, norm), target)
        less = (1 - target / values).clamp_min(0)
        # X V S = X Xᵀ Q for the right vectors, which are one product nearer than the left vectors, Q times the turn.
        inside = (rotation.mT @ rest).to(x.dtype)
        left_vectors = (x @ inside.mT).to(exact) * (less / squares)[..., None, :]
        subtract = x.addmm_ if x.ndim == 2 else x.baddbmm_
        subtract(left_vectors.to(x.dtype), inside, alpha=-1)
        if out is not x:
            out.copy_(x)


def _just_narrowed(values: Tensor, norm: Tensor) -> Tensor:
    """Return the largest τ that makes the Schatten norm of the values `_NARROWED` times smaller, or `_FLOOR` of them.

    Args:
        values: (..., vectors), ascending.
        norm: Their norm, (..., 1).
    """
    largest = values[..., -1:]
    heights = 2.0 ** (torch.arange(0, -321, -1, dtype=values.dtype, device=values.device) / 64)
    lowered = torch.minimum((values / largest)[..., None, :], heights[:, None]).pow(8).sum(-1).pow(1 / 8)
    narrowed = norm / largest > 1.005 * _NARROWED * lowered  # more than it, whatever rounding adds
    first = (~narrowed).sum(-1, keepdim=True).clamp_max(len(heights) - 1)
    return largest * heights[first]


def signs(rows: int, cols: int, device: torch.device | str = "cpu") -> Tensor:
    """Return a matrix of 1 and −1 as if drawn at random, int32 (rows, cols), the same in every version of torch.

    The bits are those of MurmurHash3's finaliser (A. Appleby) of each element's number.
    """
    bits = mixed(torch.arange(rows * cols, dtype=torch.int32, device=device)).bitwise_and_(1)
    return (1 - 2 * bits).view(rows, cols)
