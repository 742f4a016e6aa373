"""The Gram form of all steps at once: two products with X for any number of steps, one of which is X Xᵀ.

If F is the product of the factors so far, the Gram matrix of F X is F X Xᵀ Fᵀ, so no step needs X. With a bf16 matrix
alone this is too inaccurate from the third step on: a Gram matrix holds the squares of the singular values, and each
step amplifies its rounding error where they are small. So each Gram matrix is held as two bf16 matrices: the rounded
matrix, and the rounding error. Where singular values are small, a factor is nearly its constant. So the second matrix
is needed only in sums, not in products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from muonmesh.numerics.coefficients import Polynomial
from muonmesh.numerics.kernels import Matmuls
from muonmesh.numerics.square_matrices import set_centred_diagonal

Squares = Callable[[str], Tensor]
"""Memory for (1, rows, rows) in the compute dtype, the same for the same name."""


def factored(p: Polynomial) -> tuple[float, float, float, float]:
    """Return l, u, w and t so that p₁·A + … + p₄·A⁴ = l·(H² + w·H + t·A) with H = A² + u·A.

    This takes two products instead of three, and its numbers have the size of the result. The powers of A have much
    larger factors, which would multiply their rounding errors.
    """
    lead, u = p[4], p[3] / (2 * p[4])
    w = p[2] / lead - u * u
    return lead, u, w, p[1] / lead - u * w


def factor_of_all(
    x: Tensor, inverse_square: Tensor, polynomials: Sequence[Polynomial], matmuls: Matmuls, square: Squares
) -> tuple[Tensor, Tensor, float]:
    """Return Q, μ and n so that (μ + Q) X are all polynomials of X/(n·ν), times n·ν.

    n·ν is (Σσ⁸)^⅛, which bounds the largest singular value.

    Args:
        x: One matrix, (1, rows, cols), rows ≤ cols.
        inverse_square: 1/ν², (1, 1, 1).
        polynomials: Of degree 5 or 9, the first a quintic.
        matmuls: The table of products, with `Matmuls.exact`.
        square: Gives memory; Q is in it.

    Returns:
        Q, whose diagonal has zero mean (see `Iteration.gram_steps`); μ, fp32 (1, 1, 1); and n.
    """
    multiply = matmuls.multiply
    r, low, zr, zr_low = square("a"), square("a low"), square("b"), square("b low")
    multiply(x, None, (), r, scale=inverse_square, low=low)
    z, scale = _first(polynomials[0], r, matmuls, square)
    norm, constant = scale**-0.5, _number(polynomials[0][0], x)
    factor, mean = z, constant
    for number, p in enumerate(polynomials[1:]):
        # R ← (c + Z) R (c + Z), where c + Z is the previous step. Rounded Z and R commute only nearly, so a mirrored
        # half of Z R has errors where large entries cancel. In the first step, where most cancel, it is computed in
        # full.
        with_r = ((r, scale * constant), (low, scale * constant))
        multiply(z, r, with_r, zr, scale, symmetric=number > 0, low=zr_low)
        multiply(zr, z, ((zr, constant), (zr_low, constant)), r, low=low)
        scale = 1.0
        z, constant = _powers(p, r, matmuls, square(f"step {number % 2}"), square)
        factor, mean = _joined(z, constant, factor, mean, matmuls, square(f"factor {number % 2}"))
    return factor, mean, norm


def _first(p: Polynomial, r: Tensor, matmuls: Matmuls, square: Squares) -> tuple[Tensor, float]:
    """Return p₁·S + p₂·S² and s, where S = s·R, so that the Schatten-4 norm of S is 1."""
    squared = matmuls.multiply(r, r, (), square("c"))
    # On a CPU reading a number needs no wait.
    scale = (_row_products(matmuls, squared, squared).sum().sqrt().item() or 1.0) ** -0.5
    weight = p[1] * scale
    squared.mul_(p[2] * scale**2 / (1 - weight))
    # Not by `add`: on a CPU it rounds the last elements of a thread differently from the others.
    return torch.lerp(squared, r, weight, out=square("step first")), scale


def _powers(p: Polynomial, r: Tensor, matmuls: Matmuls, out: Tensor, square: Squares) -> tuple[Tensor, Tensor]:
    """Return Z, in `out`, and c so that c + Z = p₀ + p₁·R + …, where Z of degree 9 has no mean on its diagonal."""
    if len(p) == 3:
        return matmuls.multiply(r, r, ((r, p[1]),), out, p[2]), _number(p[0], r)
    lead, u, w, t = factored(p)
    h = matmuls.multiply(r, r, ((r, u),), square("c"))
    z = matmuls.multiply(h, h, ((h, lead * w), (r, lead * t)), out, lead)
    diagonal = lead * (_row_products(matmuls, h, h) + w * _diagonal(h) + t * _diagonal(r))
    return z, p[0] + set_centred_diagonal(z, diagonal)


def _joined(w: Tensor, q: Tensor, z: Tensor, p: Tensor, matmuls: Matmuls, out: Tensor) -> tuple[Tensor, Tensor]:
    """Return (q + W)(p + Z) as a matrix without a mean on its diagonal, in `out`, and the rest.

    Both triangles are computed: rounded matrices commute only nearly, and no later product of X corrects the error.
    """
    matmuls.multiply(w, z, ((z, q), (w, p)), out, symmetric=False)
    diagonal = _row_products(matmuls, w, z) + q[..., 0] * _diagonal(z) + p[..., 0] * _diagonal(w)
    return out, p * q + set_centred_diagonal(out, diagonal)


def _row_products(matmuls: Matmuls, x: Tensor, y: Tensor) -> Tensor:
    assert matmuls.exact is not None
    return matmuls.exact.row_products(x, y)


def _number(value: float, like: Tensor) -> Tensor:
    return torch.full((1, 1, 1), value, dtype=torch.float32, device=like.device)


def _diagonal(square: Tensor) -> Tensor:
    return square.diagonal(dim1=-2, dim2=-1).float()
