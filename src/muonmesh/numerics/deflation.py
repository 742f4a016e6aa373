"""Deflation: the largest singular values of a matrix brought down, so that the others need not be raised as far.

The polynomials of an iteration are made for singular values in [l, 1], so a matrix is divided by a bound of its largest
one. Where a few are far above all others, as in momentum, the others begin that much lower. Here those few are found by
one power iteration, and brought down to the smallest of them. Their vectors stay as they are, and so does the polar
factor, as far as they have been found (Halko, Martinsson and Tropp 2011, arXiv 0909.4061, algorithm 4.3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from muonmesh.numerics import kernels
from muonmesh.numerics.kernels.memory import keep, pinned, scratch
from muonmesh.numerics.kernels.threads import run_on_one_thread
from muonmesh.numerics.precision import exact_fp32
from muonmesh.numerics.stochastic import mixed

_FLOOR = 1 / 32
"""No further down than this times the largest: what rounding leaves of it in bf16 is some thousandths."""


def deflate(x: Tensor, vectors: int) -> None:
    """Bring the largest singular values of each matrix down to the smallest of them, in place.

    What is found are Ritz values: with Y = X Xᵀ Ω, where Ω has random signs, an orthonormal basis Q of Y's columns, and
    Q Qᵀ X = U S Vᵀ, X becomes X − X V (1 − τ/S) Vᵀ, where τ is the smallest of S, or 1/32 of the largest if that is
    more. V is nearer to vectors of X than U is, by as much as their values are above the others. Zeros stay zeros, and
    a matrix that is not finite becomes NaN.

    On a CPU each matrix has one thread: sums round otherwise on another number of threads, LAPACK's too. On other
    devices the host waits for the decomposition of a small matrix.

    Args:
        x: Shape (batch, rows, cols), rows ≤ cols, compute dtype, contiguous.
        vectors: How many, at most as many as rows.
    """
    if x.device.type != "cpu":
        _deflate(x, x, vectors)
        return

    def each() -> None:
        for one in x.unbind():  # in fp32 a batch has other bits than a matrix alone
            _deflate(_multiplied(one), one, vectors)

    run_on_one_thread(each, device=x.device)


def departure(x: Tensor, times: float, vectors: int) -> float:
    """Estimate the mean of (1 − σ²)² over the singular values σ of one matrix, (rows, cols), divided by `times`.

    It is ‖(1 − X Xᵀ) Ω‖² / (rows · vectors), where Ω has random signs (Hutchinson's estimate), with thin products. On a
    CPU, on one thread.
    """

    def measure() -> float:
        wide = _multiplied(x)
        rows = probe(wide, vectors)
        with exact_fp32(torch.promote_types(x.dtype, torch.float32)):
            # Divided twice: the square of a small number may vanish.
            rest = (wide @ (rows @ wide).div_(times).mT).to(torch.promote_types(x.dtype, torch.float32)).div_(times)
            return rest.sub_(rows.mT).square_().mean().item()

    return run_on_one_thread(measure, device=x.device)


def _multiplied(x: Tensor) -> Tensor:
    """Return a matrix, or a copy in fp32 where a processor multiplies no bf16."""
    if x.dtype != torch.bfloat16 or kernels.multiplies_bf16():
        return x
    return scratch("deflated", x.shape, dtype=torch.float32, device=x.device).copy_(x)


def probe(x: Tensor, vectors: int) -> Tensor:
    """Return rows of `signs` to multiply matrices x by, (vectors, rows of x), in x's dtype and on its device."""
    rows = x.shape[-2]
    return keep(("signs", rows, vectors, x.dtype, x.device), lambda: pinned(signs(vectors, rows).to(x.dtype), x.device))


def _deflate(x: Tensor, out: Tensor, vectors: int) -> None:
    exact = torch.promote_types(x.dtype, torch.float32)
    with exact_fp32(exact):
        y = x @ (probe(x, vectors) @ x).mT
        basis, _ = torch.linalg.qr(y.to(exact))
        inside = basis.to(x.dtype).mT @ x
        rest = inside.to(exact)
        gram = rest @ rest.mT
        # A decomposition of what is not finite raises; X is not finite then, and stays so.
        finite = gram.isfinite().flatten(-2).all(-1)[..., None, None]
        squares, turn = torch.linalg.eigh(torch.where(finite, gram, torch.eye(vectors, dtype=exact, device=x.device)))
        squares = squares.clamp_min(torch.finfo(exact).tiny)
        values = squares.sqrt()
        target = torch.maximum(values[..., :1], values[..., -1:] * _FLOOR)
        less = (1 - target / values).clamp_min(0)
        # X V S = X Xᵀ Q of the right vectors, which are one product nearer than the left ones, Q times the turn.
        inside = (turn.mT @ rest).to(x.dtype)
        left = (x @ inside.mT).to(exact) * (less / squares)[..., None, :]
        subtract = x.addmm_ if x.ndim == 2 else x.baddbmm_
        subtract(left.to(x.dtype), inside, alpha=-1)
        if out is not x:
            out.copy_(x)


def signs(rows: int, cols: int) -> Tensor:
    """Return a matrix of 1 and −1 as if drawn at random, int32 (rows, cols), the same in every version of torch.

    The bits are those of MurmurHash3's finaliser (A. Appleby) of each element's number.
    """
    bits = mixed(torch.arange(rows * cols, dtype=torch.int32, device="cpu")).bitwise_and_(1)
    return (1 - 2 * bits).view(rows, cols)
