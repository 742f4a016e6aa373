"""The table of matrix products that the iteration is written in; each kind of hardware has one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


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
    """

    gram: Callable[[Tensor, Tensor, Tensor], Tensor]
    polynomial: Callable[[Tensor, float, float, Tensor], Tensor]
    product: Callable[[Tensor, Tensor, Tensor, float, Tensor], Tensor]
    full: Callable[[Tensor, Tensor, Tensor, float, Tensor], Tensor]
    apply: Callable[[Tensor, Tensor, float | Tensor, float | Tensor, Tensor], Tensor]
    at_once: int
    together: bool
