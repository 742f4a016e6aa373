"""Matmuls: the matrix products that the iteration uses. Each backend fills one such table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

Operand: TypeAlias = Tensor | None
"""A batch of matrices; None stands for the transpose of the first operand."""

Number: TypeAlias = float | Tensor
"""A number that is the same in every optimizer step, or a tensor with one number for each matrix, (batch, 1, 1)."""

Terms: TypeAlias = Sequence[tuple[Tensor, Number]]
"""What is added to a product: pairs of a batch of matrices C and a factor c."""

ALIGNMENT = 64
"""Alignment of matrices in bytes: that of torch's memory on a CPU. The bits of a product depend on it."""

SMALL_ROWS, SMALL_COLS = 64, 128
"""The largest matrix, rows ≤ cols, for which one program of a device computes all steps (`Small`). The program holds it
in registers, and a larger matrix would need more than there are (docs/internals/kernels.md has the figures)."""

TORCH_FROM = {torch.float16: 2048}
"""From how many rows and columns of the result on torch multiplies A B where nothing else is in it, by dtype.

Everything else is Triton's at every size, by tiles of `tiles.tile_for`: symmetric results, of which it computes half,
and sums. The table is the same on all devices and in all batches, so ranks need not compare it.
"""


@dataclass(frozen=True)
class Exact:
    """Operations of a backend that can keep rounding errors. All tensors are contiguous, in the compute dtype.

    If a table has these operations, its `Matmuls.multiply` takes up to two terms, and one argument more: ``low``, a
    tensor of the shape of ``out``. It receives the rounding error of the result, rounded to the compute dtype.

    Attributes:
        row_products: ``row_products(x, y)`` returns the sum of x * y over each row, fp32 (batch, rows).
        load: ``load(x, out)`` does `numerics.normalize.load` in one pass.
        store: ``store(x, out)`` does `numerics.normalize.store` in one pass.
    """

    row_products: Callable[[Tensor, Tensor], Tensor]
    load: Callable[[Tensor, Tensor], Tensor]
    store: Callable[[Tensor, Tensor], None]


@dataclass(frozen=True)
class Small:
    """All steps of small matrices in one call.

    Attributes:
        run: ``run(x, out, polynomials)`` orthogonalizes a batch. ``polynomials`` has three coefficients for each step,
            one step after the other. ``out`` is contiguous and has the shape and dtype of ``x``.
        dtypes: The dtypes of ``x`` that ``run`` accepts.
    """

    run: Callable[[Tensor, Tensor, tuple[float, ...]], None]
    dtypes: Sequence[torch.dtype]


@dataclass(frozen=True)
class SquareFunctions:
    """Functions of Gram matrices of up to `SMALL_ROWS` rows, each in one launch, which replace them; all in fp32.

    ``memory`` has three squares of `SMALL_ROWS` for each. ``steps`` are u, lead and growth of each step of an inverse
    root, ``slope`` is the root's at 0. `numerics.device_deflation` says what for, and does the same by products.

    Attributes:
        whiten: ``whiten(gram, memory, shift, slope, steps)`` makes the inverse root of G + shift·tr G.
        soften: ``soften(gram, inverse, memory, unit, slope, shares, steps)`` makes (1 − f(S)/S)/S² of S².
    """

    whiten: Callable[..., None]
    soften: Callable[..., None]


@dataclass(frozen=True)
class Matmuls:
    """The products of a backend, on batches of matrices. Nearly all time of an iteration is spent in `multiply`.

    Attributes:
        multiply: ``multiply(a, b, terms, out, alpha=1.0, scale=1.0, symmetric=True)`` writes
            scale · (alpha · A B + c · C) to ``out`` and returns ``out``. ``out`` is contiguous and shares no memory
            with an operand; on a device it may be the first C if ``symmetric`` is False. ``alpha`` is the same number
            in every optimizer step. ``symmetric`` says that the result is symmetric, so a backend may compute one
            triangle and mirror it, even if rounded A and B do not commute to the last bit. With X of shape (batch,
            rows, cols), and symmetric A, B and C of shape (batch, rows, rows):

            - s · X Xᵀ is ``multiply(x, None, [], out, scale=s)``.
            - b · A + c · A² is ``multiply(a, a, [(a, b)], out, alpha=c)``.
            - c · C + A B, if A and B commute, is ``multiply(a, b, [(c, factor)], out)``; with ``symmetric=False`` both
              triangles are computed.
            - s · (f · X + B X) is ``multiply(b, x, [(x, f)], out, scale=s, symmetric=False)``.

            On a device there may be none, one or two terms, and ``identity``, a number that is added to the diagonal
            before ``scale`` multiplies it.
        batch_limit: The largest number of matrices that one call should be given. It is 1 for large matrices on a CPU,
            because reductions and elementwise operations are faster on a single matrix there.
        one_thread: Whether a batch must be computed on one thread, because the bits depend on the number of threads.
        by_torch: Whether torch multiplies any of them, so that its settings count.
        normalize: ``normalize(x, out)`` multiplies each matrix by a power of two, so that its norm ν lies in
            [2¹², 2¹³). It returns 1/ν and 1/ν², (batch, 1, 1) each, fp32 or wider. Both are finite for a matrix of
            zeros, and NaN if an entry is not finite. None: `numerics.normalize.normalize` does this.
        norm: ``norm(x)`` returns the Frobenius norm of each matrix of a batch, (batch, 1, 1), fp32, whose bits do not
            depend on the batch; a positive number for a matrix of zeros. None: torch's operations are used.
        signs: ``signs(out)`` writes the signs of `numerics.deflation.signs`. None: torch's operations are used.
        exact: Operations of a backend that can keep rounding errors. None: torch's operations are used, and the error
            of each product is lost.
        small: All steps of matrices of this shape in one call. None: they are computed step by step.
        of_squares: Functions of small Gram matrices. None: products compute them.
    """

    multiply: Callable[..., Tensor]
    batch_limit: int
    one_thread: bool = False
    by_torch: bool = True
    normalize: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    norm: Callable[[Tensor], Tensor] | None = None
    signs: Callable[[Tensor], None] | None = None
    exact: Exact | None = None
    small: Small | None = None
    of_squares: SquareFunctions | None = None
