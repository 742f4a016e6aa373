"""The table of matrix products that the iteration is written in; each kind of hardware has one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

Term: TypeAlias = tuple[Tensor, float | Tensor]
"""A batch of matrices, and what it is multiplied by: a number, or one for each matrix, (batch, 1, 1)."""


class Combine(Protocol):
    """See `Exact`."""

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        alpha: float | Tensor,
        terms: Sequence[Term],
        out: Tensor,
        low: Tensor | None = None,
        *,
        symmetric: bool = True,
    ) -> Tensor:
        """Return `out`."""
        ...


class Join(Protocol):
    """See `Matmuls`."""

    def __call__(
        self, z: Tensor, w: Tensor, p0: float, q0: float, out: Tensor, *, symmetric: bool
    ) -> tuple[Tensor, Tensor]:
        """Return Q and μ."""
        ...


@dataclass(frozen=True)
class Exact:
    """Products whose rounding can be kept, and one pass for what takes torch several; for contiguous batches.

    Attributes:
        combine: `combine(A, B, alpha, terms, out, low, symmetric=)`: alpha·A B plus at most two terms, rounded once; B
            may be Aᵀ of a matrix that is not square. `low`, shaped like `out`, takes what rounding leaves, rounded.
            `symmetric` says whether one triangle is computed and mirrored.
        row_products: `row_products(X, Y)`: the sum of X * Y over each row, fp32 (batch, rows).
        load: `load(X, out)`: as `numerics.normalize.load`, where both have the compute dtype.
        store: `store(X, out)`: as `numerics.normalize.store`, likewise.
    """

    combine: Combine
    row_products: Callable[[Tensor, Tensor], Tensor]
    load: Callable[[Tensor, Tensor], Tensor]
    store: Callable[[Tensor, Tensor], None]


@dataclass(frozen=True)
class Matmuls:
    """Five products on batches of matrices, the only place where Newton–Schulz spends its time.

    X has shape (batch, rows, cols); A, B and C have shape (batch, rows, rows) and are symmetric. `out` is
    contiguous, shares no memory with an operand, and is returned.

    Attributes:
        gram: `gram(X, s, out)`: s·X Xᵀ; `s` is one number a matrix, shape (batch, 1, 1).
        polynomial: `polynomial(A, b, c, out)`: b·A + c·A².
        product: `product(A, B, C, c, out)`: c·C + A B, for A and B that commute, so the result is symmetric.
        full: `full(A, B, C, c, out)`: the same, but no element is copied from its mirror image; c may be 0.
        apply: `apply(X, B, a, s, out)`: s·(a·X + B X); each of `a` and `s` is a number that is the same at
            every optimizer step, or a tensor with one number a matrix, as above.
        at_once: How many matrices of this shape one call should be given at most.
        together: Whether reductions and elementwise operations should take all matrices at once: on a CPU only where
            matrices are small, since for one alone there are faster operations.
        one_thread: Whether a batch must be computed on one thread, since the bits depend on how many share a product.
        join: `join(Z, W, p, q, out, symmetric=)`: (q + W)(p + Z) as μ + Q, where the diagonal of Q has zero mean: Q in
            `out`, and μ, fp32 (batch, 1, 1). `symmetric` says whether one triangle is computed and mirrored. None: it
            is put together from products and elementwise operations.
        normalize: `normalize(X)`: multiplies each matrix in place by a power of two, if that is needed to multiply it
            safely, and returns 1/ν and 1/ν² of what it is then, fp32 (batch, 1, 1) each; ν counts as 1 for a matrix of
            zeros, and as NaN where an entry is not finite. None: likewise.
        exact: What else this hardware can do; None: products rounded to the compute dtype, and torch's operations.
        small: `small(X, out, polynomials, times)`: all steps of small matrices at once, written to contiguous memory;
            three coefficients a step, and what results are multiplied by, (batch, 1, 1) or None. None: it cannot.
        sparing: Whether memory traffic is what elementwise operations cost, as on a device. Then a number that follows
            from the data is divided out of B instead of multiplied by X, and left to the last product.
    """

    gram: Callable[[Tensor, Tensor, Tensor], Tensor]
    polynomial: Callable[[Tensor, float, float, Tensor], Tensor]
    product: Callable[[Tensor, Tensor, Tensor, float, Tensor], Tensor]
    full: Callable[[Tensor, Tensor, Tensor, float, Tensor], Tensor]
    apply: Callable[[Tensor, Tensor, float | Tensor, float | Tensor, Tensor], Tensor]
    at_once: int
    together: bool
    one_thread: bool = False
    join: Join | None = None
    normalize: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    exact: Exact | None = None
    small: Callable[[Tensor, Tensor, Sequence[float], Tensor | None], None] | None = None
    sparing: bool = False
