"""The table of matrix products that the iteration uses; each kind of hardware has its own table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

Operand: TypeAlias = Tensor | None
"""A batch of matrices, which may be missing."""

Number: TypeAlias = float | Tensor
"""A number that is the same in every optimizer step, or a tensor with one number for each matrix, (batch, 1, 1)."""

Terms: TypeAlias = Sequence[tuple[Tensor, Number]]
"""The summands of a product's result: batches of matrices, each with its factor."""

ALIGNMENT = 64
"""Alignment of matrices in bytes: that of torch's memory on a CPU. The bits of a product depend on it."""

SMALL_ROWS, SMALL_COLS = 64, 128
"""The largest matrix of `Small` on a device, which one program holds from its first step to its last, rows ≤ cols; more
would leave its threads without registers (docs/internals/kernels.md has the figures)."""


@dataclass(frozen=True)
class Exact:
    """Products whose rounding can be kept, and one pass for what takes torch several; for contiguous batches.

    With it `Matmuls.multiply` takes two terms, and ``low``, shaped like `out`: what rounding leaves, rounded.

    Attributes:
        row_products: `row_products(X, Y)`: the sum of X * Y over each row, fp32 (batch, rows).
        load: `load(X, out)`: as `numerics.normalize.load`, where both have the compute dtype.
        store: `store(X, out)`: as `numerics.normalize.store`, likewise.
    """

    row_products: Callable[[Tensor, Tensor], Tensor]
    load: Callable[[Tensor, Tensor], Tensor]
    store: Callable[[Tensor, Tensor], None]


@dataclass(frozen=True)
class Small:
    """All steps of small matrices in one call.

    Attributes:
        run: `run(X, out, polynomials)`: three coefficients a step; ``out`` is contiguous, of X's shape and dtype.
        dtypes: The dtypes of matrices that it takes.
    """

    run: Callable[[Tensor, Tensor, tuple[float, ...]], None]
    dtypes: Sequence[torch.dtype]


@dataclass(frozen=True)
class Matmuls:
    """One product on batches of matrices, the only place where Newton–Schulz spends its time.

    X has shape (batch, rows, cols); A, B and C have shape (batch, rows, rows) and are symmetric. `out` is
    contiguous, shares no memory with an operand, and is returned.

    Attributes:
        multiply: `multiply(A, B, [(C, c)], out, alpha=1.0, scale=1.0, symmetric=True)`: scale·(alpha·A B + c·C), where
            alpha is the same at every optimizer step. `symmetric` says that the result is, so that its elements may be
            copied from their mirror images; A and B need not commute to the last bit. These are its five uses:
            s·X Xᵀ, `(X, None, [], out, scale=s)`; b·A + c·A², `(A, A, [(A, b)], out, alpha=c)`; c·C + A B of A and B
            that commute, `(A, B, [(C, c)], out)`, and likewise with both triangles, `symmetric=False`; and
            s·(a·X + B X), `(B, X, [(X, a)], out, scale=s, symmetric=False)`. On a device there may be none, one or two
            terms, and ``identity``, a number that is added to the diagonal before `scale` multiplies.
        at_once: How many matrices of this shape one call should be given at most. A CPU is given one where matrices are
            large, since for one alone there are faster reductions and elementwise operations.
        one_thread: Whether a batch must be computed on one thread, because the bits depend on the number of threads.
        normalize: `normalize(X, out)`: writes each matrix times the power of two that takes its norm ν into
            [2¹², 2¹³), and returns 1/ν and 1/ν² of what it is then, (batch, 1, 1) each, fp32 or wider; both are finite
            for a matrix of zeros, and NaN where an entry is not finite. None: `numerics.normalize.normalize` does it.
        exact: Further operations of this hardware; None: products are rounded to the compute dtype, and torch's
            operations are used.
        small: All steps of matrices of this shape in one call; None: they are computed step by step.
    """

    multiply: Callable[..., Tensor]
    at_once: int
    one_thread: bool = False
    normalize: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    exact: Exact | None = None
    small: Small | None = None
