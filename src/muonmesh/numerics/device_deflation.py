"""Deflation on devices: by products alone, so that the CPU reads no number and a matrix has the same bits in any batch.

Torch's decompositions make the CPU wait, or call other code for a batch than for a single matrix. So what QR would find
is found by Newton–Schulz steps on squares of 64 rows in fp32: a basis is (Y Yᵀ)^-½ Y. What eigenvectors are for, a
function of singular values, is a polynomial of such an inverse root. Which polynomials follow, each matrix reads from a
table on the device (`factor_by_table`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, log2, prod
from typing import NamedTuple

import torch
from torch import Tensor

from muonmesh.numerics.coefficients import Polynomial, coefficient_schedule
from muonmesh.numerics.deflation import keep_on, signs
from muonmesh.numerics.kernels import Matmuls
from muonmesh.numerics.kernels.product_table import SMALL_ROWS, Number, SquareFunctions
from muonmesh.numerics.working_memory import Squares

FIRST_GRAM = 2.0**14
"""What the first Gram matrix is multiplied by: its singular values are at most 1, and most are far below it."""
_GRAM = 2.0**10
"""What later Gram matrices are multiplied by."""
FACTOR = 2.0**12
"""What factors are multiplied by."""
DEGREES = (3, 5, 5)
"""The numbers of coefficients of the polynomials of `factor_by_table`."""

_UNIT = 2.0**-13
"""What singular values are multiplied by where their squares would leave fp32: norms are in [2¹², 2¹³)."""

_FLOOR = 1 / 32
"""Values are hardly reduced below this fraction of the largest; see `muonmesh.numerics.deflation`."""
_SHIFT = 3e-6
"""What is added to a Gram matrix of trace 1, so that rounding leaves no negative eigenvalues (arXiv 1809.11085)."""
_FROM_SHIFT, _FROM_FLOOR = coefficient_schedule("polar_express", 7), coefficient_schedule("polar_express", 7)[2:]
"""Polynomials that bring the roots of all eigenvalues from `_SHIFT`, or from `_FLOOR`², to 1 in 1 to 1.001."""
_TO_ONE = coefficient_schedule("polar_express", 8)[2:]
"""One more, which brings them to 1 in fp32: what Q leaves of X is told from what it finds."""
_LEFT = 3e-4
"""If Q leaves less than this of ‖X‖², it may all be rounding: in bf16 that is 1e-6, but what Q finds is known to 2e-4
only. Then τ is `_NARROWED` times the norm over k^.19 for k values alike, which makes g about 9."""
_NARROWED = 0.17


class Step(NamedTuple):
    """A polynomial 1 + Z of a Gram matrix R, in numbers that products take: one for all matrices, or one for each.

    Z is lead·H, or lead·(H² + w·H + t·R) where there is a w, with H = R² + u·R. The next Gram matrix is
    growth·(1 + Z) R (1 + Z).
    """

    u: Number
    lead: Number
    growth: Number = 1.0
    w: Number | None = None
    t: float = 0.0


# For singular values in [l, 1], with l from .005 to .012 in 12 steps, the first two of three polynomials are the same
# but for the scales of X before and after; so is t of the last. By `benchmarks/studies/remez.py --table`.
_QUINTIC = (-1.4678545179425713, 1.7451990519607217)
_SECOND = Step(-4.65278851, 0.0561716068, w=7.95400678, t=-0.3)
_SECOND_GROWTH = 58.332864
_LAST_T = -0.9
_TABLE = (  # the growth before the last polynomial; its u, w and lead; the slope of all three at 0
    (40.735062, -4.42703772, 7.84848409, 0.0474154905, 172.431901),
    (39.1496373, -4.27948186, 7.42185973, 0.0518815438, 165.774792),
    (37.5927394, -4.13610425, 7.02346811, 0.0566425249, 159.292813),
    (36.0644271, -3.99700508, 6.65226711, 0.0616916395, 153.002014),
    (34.5649116, -3.86230372, 6.30725073, 0.0670163642, 146.91545),
    (33.0945611, -3.73213835, 5.98744088, 0.0725979048, 141.043133),
    (31.6539062, -3.60666511, 5.69187934, 0.0784107967, 135.392103),
    (30.2436426, -3.48605676, 5.41962049, 0.0844226856, 129.966607),
    (28.8646328, -3.37050074, 5.16972458, 0.0905943251, 124.768362),
    (27.5179061, -3.26019661, 4.94125227, 0.0968798164, 119.796896),
    (26.204656, -3.15535261, 4.7332602, 0.103227114, 115.049946),
    (24.9262363, -3.05618152, 4.54479821, 0.109578807, 110.523871),
)
_FALLS = tuple(5 * 2.4 ** (row / 11) for row in range(1, 12))
"""By how much the bound of the largest singular value must have fallen for each row but the first: 1000·l."""


def joint_factor(
    multiply: Callable[..., Tensor],
    r: Tensor,
    steps: Sequence[Step],
    squares: Squares,
    *,
    gram: float = 1.0,
    unit: float = 1.0,
) -> Tensor:
    """Return ``unit`` times the product of all steps, of which there are two or more, on one Gram matrix.

    Rounded matrices commute only nearly, and no step repairs what the mirrored half of the last product would do to the
    largest singular values, so it is computed in full.

    Args:
        multiply: `Matmuls.multiply`.
        r: The Gram matrix times ``gram``. Its memory gets the result.
        steps: The steps of it, with leads that are ``unit``/``gram`` times as large.
        squares: Memory.
        gram, unit: Powers of two.
    """
    product: Tensor | None = None
    for number, step in enumerate(steps, 1):
        last = number == len(steps)
        z = multiply(r, r, ((r, step.u),), squares.take(), 1 / gram, 1.0 if step.w is not None else step.lead)
        if step.w is not None:
            h, z = z, multiply(z, z, ((z, step.w), (r, step.t)), squares.take(), 1 / gram, step.lead)
            squares.give(h)
        before, product = product, z
        if before is not None:
            # The first is without its identity: (1 + Z)(1 + Z₁).
            terms = ((before, 1.0), (z, 1.0)) if number == 2 else ((before, 1.0),)
            more = {"symmetric": not last, "identity": unit if number == 2 else 0.0}
            product = multiply(z, before, terms, r if last else squares.take(), 1 / unit, **more)
            squares.give(before)
        if not last:
            half = multiply(z, r, ((r, 1.0),), squares.take(), 1 / unit)
            multiply(z, half, ((half, 1.0),), r, 1 / unit, step.growth)
            squares.give(half)
        if before is not None:
            squares.give(z)
    assert product is not None
    return product


def deflate(
    x: Sequence[Tensor],
    inverse: Tensor,
    vectors: int,
    matmuls: Matmuls,
    memory: Callable[[Sequence[int], torch.dtype], Tensor],
) -> None:
    """Bring down the largest singular values of matrices, in place.

    As in `muonmesh.numerics.deflation`, Y = X Xᵀ Ω, Q is a basis of Y's columns, and Q Qᵀ X = U S Vᵀ. Here X becomes
    X − X V (1 − f(S)/S) Vᵀ, where f(S)/S = 1 − (1 − R²)(1 − R/2) with R = (1 + S²/τ²)^-½: small values stay, and large
    ones come near .5 to .8 τ. τ is 1.5 times what Q leaves of X in the middle, a tenth of what it finds in the middle,
    or 1/32 of a bound of the largest value, whichever is largest. If next to nothing is left, τ is so large that small
    values are raised 1.2 times as far as by "polar_express".

    Whatever Q is, no singular value grows, because X is multiplied by a contraction.

    Args:
        x: The matrices, for each shape (batch, rows, cols), rows ≤ cols, with norms in [2¹², 2¹³). The rows are alike.
        inverse: The inverses of the norms of all matrices, (matrices, 1, 1).
        vectors: The number of values to bring down, at most the number of rows.
        matmuls: The products.
        memory: Returns memory of a shape and dtype (`working_memory.deflation_at_once`).
    """
    multiply, counts, (_, rows, _), dtype = matmuls.multiply, list(map(len, x)), x[0].shape, x[0].dtype
    exact, number = torch.promote_types(dtype, torch.float32), sum(counts)
    omega, thin = memory((vectors, rows), dtype), [memory((len(part), vectors, part.shape[2]), dtype) for part in x]
    y, once = (memory((number, vectors, rows), exact) for _ in range(2))
    basis, gram = memory((number, vectors, rows), dtype), memory((number, vectors, vectors), exact)
    functions = _Functions.of(matmuls, gram, memory)

    def by_shape(*batches: Tensor) -> Iterator[tuple[Tensor, ...]]:
        return zip(x, thin, *(torch.split(batch, counts) for batch in batches), strict=True)

    if matmuls.signs is None:
        omega.copy_(signs(vectors, rows, omega.device))
    else:
        matmuls.signs(omega)
    for part, short, into in by_shape(y):  # no entry of Ω X is more than √rows times the norm
        multiply(omega.expand(len(part), -1, -1), part, (), short, 2.0 ** -ceil(log2(rows) / 2), symmetric=False)
        multiply(short, part.mT, (), into, symmetric=False)
    for batch, polynomials, into in ((y, _FROM_SHIFT, once), (once, _TO_ONE, basis)):
        multiply(batch, None, (), gram)
        multiply(functions.whiten(gram, polynomials), batch, (), into, symmetric=False)
    for part, short, q, into in by_shape(basis, gram):
        multiply(q, part, (), short, symmetric=False)
        multiply(short, None, (), into, _UNIT**2)
    middle = functions.soften(gram, inverse, rows)
    turned, narrow = y.view(number, rows, vectors), basis.view(number, rows, vectors)
    for part, short, into in by_shape(turned):
        multiply(part, short.mT, (), into, _UNIT**2, symmetric=False)
    multiply(turned, middle, (), narrow, symmetric=False)
    for part, short, left in by_shape(narrow):
        multiply(left, short, ((part, 1.0),), part, -1.0, symmetric=False)


@dataclass(frozen=True)
class _Functions:
    """Functions of Gram matrices, (matrices, vectors, vectors), that replace them.

    Attributes:
        matmuls: The products.
        launches: What does each in one launch; None: products do.
        room: Memory for three squares of each matrix.
    """

    matmuls: Matmuls
    launches: SquareFunctions | None
    room: Tensor

    @staticmethod
    def of(matmuls: Matmuls, gram: Tensor, memory: Callable[[Sequence[int], torch.dtype], Tensor]) -> _Functions:
        """Return the functions for such matrices."""
        number, vectors, _ = gram.shape
        launches = matmuls.of_squares if vectors <= SMALL_ROWS and gram.dtype == torch.float32 else None
        side = vectors if launches is None else SMALL_ROWS
        return _Functions(matmuls, launches, memory((3, number, side, side), gram.dtype))

    def whiten(self, gram: Tensor, polynomials: Sequence[Polynomial]) -> Tensor:
        """Make (Y Yᵀ)^-½ of Y Yᵀ, so that its product with Y has orthonormal rows.

        Of directions that are far smaller than the others it leaves less than their whole length.
        """
        slope = _slope(polynomials)
        if self.launches is not None:
            self.launches.whiten(gram, self.room, _SHIFT, slope, _numbers(polynomials))
            return gram
        trace = self._trace(gram)
        gram.mul_(trace.reciprocal()).diagonal(dim1=-2, dim2=-1).add_(_SHIFT)
        return self._joint_factor(gram, polynomials).mul_(trace.rsqrt().mul_(slope))

    def soften(self, gram: Tensor, inverse: Tensor, rows: int) -> Tensor:
        """Make (1 − f(S)/S)/S² of S² (`deflate`), which is multiplied by `_UNIT`², for matrices of so many rows."""
        vectors, slope = gram.shape[1], _slope(_FROM_FLOOR)
        shares = 2.25 / max(1, rows - vectors), 0.01 / vectors, _FLOOR**2, _LEFT, _NARROWED**2
        if self.launches is not None:
            self.launches.soften(gram, inverse, self.room, _UNIT, slope, shares, _numbers(_FROM_FLOOR))
            return gram
        multiply, captured, largest = self.matmuls.multiply, self._trace(gram), norm_of(gram, self.matmuls)
        total = inverse.reciprocal().mul(_UNIT).square()
        outside = total.sub(captured)
        target = torch.maximum(outside.mul(shares[0]), captured.mul(shares[1]))
        target = torch.maximum(target, largest.mul(shares[2]))
        alike = largest.div(total).sqrt()
        narrowed = torch.maximum(target, total.mul(shares[4]).mul(alike).mul(alike.sqrt()))
        target = torch.where(outside < total.mul(shares[3]), narrowed, target)
        # B = 1 + S²/τ² is divided by a bound of it. With its inverse root R, R² − R³/2 over τ² is (1 − f(S)/S)/S².
        bound = largest.div(target).add(1.0)
        gram.mul_(bound.mul(target).reciprocal()).diagonal(dim1=-2, dim2=-1).add_(bound.reciprocal()[..., 0])
        root, (square, middle, _) = self._joint_factor(gram, _FROM_FLOOR), self.room
        multiply(root, root, (), square, slope**2, bound.reciprocal())
        terms = ((square, bound.sqrt()),)
        return multiply(square, root, terms, middle, -slope / 2, bound.sqrt().mul(target).reciprocal())

    def _joint_factor(self, gram: Tensor, polynomials: Sequence[Polynomial]) -> Tensor:
        squares = Squares(partial(torch.empty_like, gram), free=self.room.unbind())
        return joint_factor(self.matmuls.multiply, gram, [_step(p) for p in polynomials], squares)

    def _trace(self, gram: Tensor) -> Tensor:
        return norm_of(gram.diagonal(dim1=-2, dim2=-1).sqrt()[:, None], self.matmuls).square()


def _numbers(polynomials: Sequence[Polynomial]) -> tuple[float, ...]:
    """Return u, lead and growth of the steps of quintics, one step after the other."""
    return tuple(number for p in polynomials for number in (p[1] / p[2], p[2] / p[0], p[0] ** 2))


def _step(p: Polynomial) -> Step:
    """Return the step of a quintic, p₀ + p₁R + p₂R², divided by p₀."""
    return Step(p[1] / p[2], p[2] / p[0], p[0] ** 2)


def _slope(polynomials: Sequence[Polynomial]) -> float:
    """Return the slope at 0 of polynomials one after the other."""
    return prod(p[0] for p in polynomials)


def norm_of(x: Tensor, matmuls: Matmuls) -> Tensor:
    """Return the norm of each matrix, (batch, 1, 1), in fp32 or wider; a positive number for zeros."""
    if matmuls.norm is not None:
        return matmuls.norm(x)
    exact = torch.promote_types(x.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=exact)
    return torch.where(norm == 0, 1.0, norm)


def factor_by_table(r: Tensor, squares: Squares, matmuls: Matmuls) -> tuple[Tensor, Tensor]:
    """Return `FACTOR` times the factor of three polynomials of X/(n·ν), and by what it falls short for X/ν.

    n·ν is (Σσ⁸)^⅛, a bound of the largest singular value. 1/n is how far the bound fell from ν, the norm before
    deflation, and says which row of the table a matrix takes.

    Args:
        r: Gram matrices of X/ν, times `FIRST_GRAM`. Their memory gets the result.
        squares: Memory.
        matmuls: The products.
    """
    square = matmuls.multiply(r, r, (), squares.take(), 1 / FIRST_GRAM)
    bound = norm_of(square, matmuls).mul(FIRST_GRAM).sqrt()  # n² · FIRST_GRAM
    squares.give(square)
    fell = bound.div(FIRST_GRAM).rsqrt()
    falls = keep_on(fell, "falls", lambda: torch.tensor(_FALLS, dtype=fell.dtype, device="cpu"))
    table = keep_on(fell, "table", lambda: torch.tensor(_TABLE, dtype=fell.dtype, device="cpu"))
    rows = table.index_select(0, torch.bucketize(fell, falls, right=True).flatten())
    growth, u, w, lead, slope = (column[:, None, None] for column in rows.unbind(1))
    u_first, lead_first = _QUINTIC
    first = Step(
        bound.mul(u_first / _GRAM),
        bound.square().reciprocal().mul(lead_first * FACTOR * _GRAM),
        bound.reciprocal().mul(_SECOND_GROWTH * _GRAM),
    )
    second = _SECOND._replace(lead=_SECOND.lead * FACTOR / _GRAM, growth=growth)
    last = Step(u, lead * (FACTOR / _GRAM), w=w, t=_LAST_T)
    product = joint_factor(matmuls.multiply, r, (first, second, last), squares, gram=_GRAM, unit=FACTOR)
    return product, fell.mul(slope)
