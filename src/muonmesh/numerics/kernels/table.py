"""The table of matrix products that the iteration is written in; each kind of hardware has one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

Operand: TypeAlias = Tensor | None
"""A batch of matrices, which may be missing."""

Number: TypeAlias = float | Tensor
"""A number that is the same at every optimizer step, or a tensor with one number a matrix, shape (batch, 1, 1)."""


@dataclass(frozen=True)
class Exact:
    """Products whose rounding can be kept, and one pass for what takes torch several; for contiguous batches.

    Attributes:
        combine: `combine(A, B, alpha, terms, out, low=None, symmetric=True)`: alpha·A B plus at most two terms, rounded
            once. A term is a batch of matrices and what it is multiplied by: a number, or one for each matrix, as alpha
            is. B may be Aᵀ of a matrix that is not square. `low`, shaped like `out`, takes what rounding leaves,
            rounded. `symmetric` says whether one triangle is computed and mirrored.
        row_products: `row_products(X, Y)`: the sum of X * Y over each row, fp32 (batch, rows).
        load: `load(X, out)`: as `numerics.normalize.load`, where both have the compute dtype.
        store: `store(X, out)`: as `numerics.normalize.store`, likewise.
    """

    combine: Callable[..., Tensor]
    row_products: Callable[[Tensor, Tensor], Tensor]
    load: Callable[[Tensor, Tensor], Tensor]
    store: Callable[[Tensor, Tensor], None]


@dataclass(frozen=True)
class Matmuls:
    """One product on batches of matrices, the only place where Newton–Schulz spends its time, and its five uses.

    X has shape (batch, rows, cols); A, B and C have shape (batch, rows, rows) and are symmetric. `out` is
    contiguous, shares no memory with an operand, and is returned.

    Attributes:
        multiply: `multiply(A, B, C, out, alpha, factor, scale, symmetric)`: scale·(alpha·A B + factor·C), where alpha
            is the same at every optimizer step. B and C may be None: then it is A Aᵀ. `symmetric` says that the result
            is, so that its elements may be copied from their mirror images; A and B need not commute to the last bit.
            C is B where factor or scale is a tensor.
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

    multiply: Callable[..., Tensor]
    at_once: int
    together: bool
    one_thread: bool = False
    join: Callable[..., tuple[Tensor, Tensor]] | None = None
    normalize: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    exact: Exact | None = None
    small: Callable[[Tensor, Tensor, Sequence[float], Tensor | None], None] | None = None
    sparing: bool = False

    def gram(self, x: Tensor, scale: Number, out: Tensor) -> Tensor:
        """scale·X Xᵀ."""
        return self.multiply(x, None, None, out, alpha=1.0, factor=0.0, scale=scale, symmetric=True)

    def polynomial(self, a: Tensor, b: float, c: float, out: Tensor) -> Tensor:
        """b·A + c·A²."""
        return self.multiply(a, a, a, out, alpha=c, factor=b, scale=1.0, symmetric=True)

    def product(self, a: Tensor, b: Tensor, c: Tensor, factor: float, out: Tensor) -> Tensor:
        """factor·C + A B, for A and B that commute, so the result is symmetric."""
        return self.multiply(a, b, c, out, alpha=1.0, factor=factor, scale=1.0, symmetric=True)

    def full(self, a: Tensor, b: Tensor, c: Tensor, factor: float, out: Tensor) -> Tensor:
        """The same, but no element is copied from its mirror image; the factor may be 0."""
        return self.multiply(a, b, c, out, alpha=1.0, factor=factor, scale=1.0, symmetric=False)

    def apply(self, x: Tensor, b: Tensor, a: Number, s: Number, out: Tensor) -> Tensor:
        """s·(a·X + B X)."""
        return self.multiply(b, x, x, out, alpha=1.0, factor=a, scale=s, symmetric=False)
