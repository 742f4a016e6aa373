"""DeviceIteration: the Newton–Schulz iteration on devices, in fp16 or wider, by products alone.

fp16 has three bits more than bf16, and a small range: its numbers are kept far from both ends by powers of two, which
change no bit. The norm of a matrix is in [2¹², 2¹³), a Gram matrix is 2¹⁰ times as large, and a polynomial of it is as
large as makes its largest possible value 2¹². So fp16 holds exactly what bf16 does down to 2⁻³⁰ of a norm.

With these bits three steps can go through one Gram matrix, and the identity can be part of a factor, so that X ← Q X is
a plain product (docs/internals/numerics.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import ceil, log2, prod

import torch
from torch import Tensor

from muonmesh.numerics.coefficients import Polynomial, factored, height
from muonmesh.numerics.device_deflation import FACTOR, FIRST_GRAM, deflate, factor_by_table, norm_of
from muonmesh.numerics.iteration import buffers_of
from muonmesh.numerics.kernels import Matmuls
from muonmesh.numerics.kernels.toolchain import DTYPES
from muonmesh.numerics.normalize import normalize, store
from muonmesh.numerics.working_memory import PlacedBatch, Squares

_GRAM = 2.0**10
"""What Gram matrices are multiplied by. Their singular values are at most about 3 in a published set."""


class _Iterates:
    """Matrices of one shape.

    Args:
        x, following: Memory for X and the next X, which take turns; as `buffers_of` returns it.
        out: Where the result should lie.
        turns: How often X becomes the next X.

    Attributes:
        x: The iterates of the matrices divided by their norm ν, times ν; at first the loaded matrices.
        following: Memory for the next iterates.
        result: Memory for the last iterates, of a dtype that can hold the result.
        inverse: 1/ν, (batch, 1, 1).
        inverse_square: 1/ν², likewise.
    """

    inverse: Tensor
    inverse_square: Tensor

    def __init__(self, x: Tensor, following: Tensor, out: Tensor, *, turns: int) -> None:
        self.x, self.following = x, following
        narrow = torch.bfloat16 if x.dtype == torch.float16 else x.dtype
        last = self.following if turns % 2 else self.x
        result = last.view(out.dtype if out.dtype.itemsize == narrow.itemsize else narrow)
        self.result = out if result.data_ptr() == out.data_ptr() else result

    def load(self, matrices: Tensor, by_kernel: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None) -> None:
        """Write matrices to X, with a norm ν in [2¹², 2¹³); ``by_kernel`` is `Matmuls.normalize`."""
        if by_kernel is None or matrices.dtype not in DTYPES:
            self.inverse, self.inverse_square = normalize(matrices, self.x)
        else:
            shape, dtype = self.x.shape, matrices.dtype
            if matrices.shape != shape or not matrices.is_contiguous():
                fits = dtype.itemsize == self.x.dtype.itemsize
                wide = self.x.view(dtype) if fits else torch.empty(shape, dtype=dtype, device=matrices.device)
                matrices = wide.copy_(matrices if matrices.shape == shape else matrices.mT)
            self.inverse, self.inverse_square = by_kernel(matrices, self.x)

    def divide(self, inverse: Tensor) -> None:
        """Multiply 1/ν² by numbers, and 1/ν by their roots."""
        self.inverse, self.inverse_square = self.inverse * inverse.sqrt(), self.inverse_square * inverse


class DeviceIteration:
    """The iteration on a device; the CPU waits for nothing.

    It takes matrices of several shapes, if they have equally many rows: only the products with X know its columns. All
    others are one launch each for all matrices.

    Args:
        segments: The polynomials, grouped by the product with X that applies them.
        matmuls, dtype: The products and dtype that an `Orthogonalizer` has resolved.
        deflated: How many singular values are reduced first.
        by_table: Whether each matrix then takes the polynomials of its row of a table, in place of those of the only
            segment.
    """

    def __init__(
        self,
        segments: Sequence[tuple[Polynomial, ...]],
        matmuls: Matmuls,
        dtype: torch.dtype,
        *,
        deflated: int = 0,
        by_table: bool = False,
    ) -> None:
        self._segments, self._matmuls, self._dtype = segments, matmuls, dtype
        self._deflated, self._by_table = deflated, by_table

    def run(self, matrices: Sequence[Tensor], out: Sequence[Tensor], *, overwrite: bool) -> None:
        """Orthogonalize ``matrices`` into ``out``, for each shape (batch, m, n).

        Args:
            matrices, out: The matrices, and where the results go.
            overwrite: Whether the memory of the matrices may be used.
        """
        turns = len(self._segments)
        pairs = [
            buffers_of(x, into, self._dtype, turns=turns, overwrite=overwrite, shape_number=number)
            for number, (x, into) in enumerate(zip(matrices, out, strict=True))
        ]
        self._run(matrices, out, pairs, None)

    def run_in_place(self, batch: PlacedBatch) -> None:
        """Orthogonalize a batch in the memory that it lies in, whose dtype is of the size of the compute dtype."""
        placed = PlacedBatch(batch.memory.view(self._dtype), batch.layout)
        pairs = list(zip(placed.matrices(0), placed.matrices(1), strict=True))
        self._run(batch.matrices(0), batch.results, pairs, placed)

    def _run(
        self,
        matrices: Sequence[Tensor],
        out: Sequence[Tensor],
        pairs: Sequence[tuple[Tensor, Tensor]],
        placed: PlacedBatch | None,
    ) -> None:
        """Orthogonalize matrices with memory for X and the next X of each shape; squares lie where a batch says."""
        self._counts, self._placed = list(map(len, matrices)), placed
        turns = len(self._segments)
        self._iterates = [_Iterates(*pair, into, turns=turns) for pair, into in zip(pairs, out, strict=True)]
        for iterates, x in zip(self._iterates, matrices, strict=True):
            iterates.load(x, self._matmuls.normalize)
        if self._deflated:
            self._deflate()
        x, count = self._iterates[0].x, sum(self._counts)
        # No method of this object, or it and the memory of the batch would live until Python looks for cycles.
        self._new_square = partial(torch.empty, (count, x.shape[1], x.shape[1]), dtype=self._dtype, device=x.device)
        self._squares = Squares(self._new_square)
        self._begin(0)
        if self._deflated and not self._by_table:
            self._bound_closer()
        self._take()
        for iterates, into in zip(self._iterates, out, strict=True):
            if iterates.x is not into:
                store(iterates.x, into)

    def _deflate(self) -> None:
        """Bring the largest singular values of X down, in place."""
        device, placed = self._iterates[0].x.device, self._placed
        inverses = [iterates.inverse for iterates in self._iterates]
        deflate(
            [iterates.x for iterates in self._iterates],
            torch.cat(inverses) if len(inverses) > 1 else inverses[0],
            self._deflated,
            self._matmuls,
            (lambda shape, dtype: torch.empty(shape, dtype=dtype, device=device))
            if placed is None
            else placed.take_in_turn(),
        )

    def _begin(self, product_number: int) -> None:
        """Begin with the memory that squares have after so many products X ← Q X."""
        if self._placed is not None:
            lasting, *free = self._placed.squares(product_number)
            self._squares = Squares(self._new_square, free, lasting)

    def _by_shape(self, squares: Tensor) -> Iterator[tuple[_Iterates, Tensor]]:
        """Iterate over the shapes, each with its part of what there is for each matrix."""
        return zip(self._iterates, torch.split(squares, self._counts), strict=True)

    def _bound_closer(self) -> None:
        """Make ν the Schatten norm (Σσ⁸)^⅛, which bounds the largest singular value more closely."""
        a, square = self._gram(), self._squares.take(lasts=True)
        self._matmuls.multiply(a, a, (), square, 2.0**14 / _GRAM**2)
        for iterates, inverse in self._by_shape(norm_of(square, self._matmuls).mul(2.0**-14).rsqrt()):
            iterates.divide(inverse)
        self._squares.give(a, square)

    def _take(self) -> None:
        """X ← p(X) for the polynomials of each segment, and the last result divided by ν."""
        one_by_one = self._placed is not None and self._placed.layout.one_by_one
        for product_number, segment in enumerate(self._segments):
            last = product_number + 1 == len(self._segments)
            if product_number:
                self._begin(product_number)
            factors, constant, power = self._factor_by_table() if self._by_table else self._factor(segment)
            parts = list[tuple[Tensor, ...]]()  # in the order of the matrices
            for iterates, factor in self._by_shape(factors):
                of_shape = [factor, iterates.x, iterates.result if last else iterates.following]
                of_shape += [iterates.inverse] if last else []
                parts += (
                    zip(*(torch.split(whole, 1) for whole in of_shape), strict=True)
                    if one_by_one
                    else [tuple(of_shape)]
                )
            for factor, x, into, *scale in parts[::-1] if product_number % 2 else parts:
                terms = ((x, constant),) if constant else ()
                self._matmuls.multiply(factor, x, terms, into, 1 / power, *scale, symmetric=False)
            for iterates in self._iterates:
                iterates.x, iterates.following = iterates.result if last else iterates.following, iterates.x
            self._squares.give(factors)

    def _factor_by_table(self) -> tuple[Tensor, float, float]:
        """As `_factor`, of three polynomials of X/(n·ν), where n·ν is (Σσ⁸)^⅛ and each matrix has its own row."""
        factor, scales = factor_by_table(self._gram(FIRST_GRAM, lasts=True), self._squares, self._matmuls)
        for iterates, scale in self._by_shape(scales):
            iterates.inverse = iterates.inverse * scale
        return factor, 0.0, FACTOR

    def _factor(self, polynomials: Sequence[Polynomial]) -> tuple[Tensor, float, float]:
        """Return Q, μ and s so that Q/s + μ is the factor of X of some steps, all on one Gram matrix."""
        multiply, single = self._matmuls.multiply, len(polynomials) == 1
        # The result goes to the memory that stays while X moves: a polynomial of R, or at last what has been R's.
        r = self._gram(lasts=not single)
        factor: Tensor | None = None
        constant, power = 1.0, 1.0
        for number, p in enumerate(polynomials, 1):
            p0, step_power, last = p[0], _power(height(p)), number == len(polynomials)
            if factor is None and last and len(p) > 2:  # the identity is part of the factor
                factor, constant, power = self._polynomial(p, r, step_power, identity=p0, lasts=True), 0.0, step_power
                continue
            z = self._polynomial(p, r, step_power, lasts=single)
            joined = z
            if factor is None:
                constant, power = p0, step_power
            else:  # (Z + p₀)(Q + μ)
                joint_power = _power(prod(map(height, polynomials[:number])))
                terms = [(factor, p0 * joint_power / power), (z, constant * joint_power / step_power)]
                joined = r if last else self._squares.take()
                more = {"identity": p0 * constant * joint_power}
                multiply(z, factor, terms[: 2 if constant else 1], joined, joint_power / (step_power * power), **more)
                self._squares.give(factor)
                constant, power = 0.0, joint_power
            if not last:  # the next Gram matrix, (Z + p₀) R (Z + p₀)
                half = self._squares.take()
                multiply(z, r, ((r, p0),), half, 1 / step_power)
                multiply(z, half, ((half, p0),), r, 1 / step_power)
                self._squares.give(half)
            if joined is not z:
                self._squares.give(z)
            factor = joined
        assert factor is not None
        if factor is not r:
            self._squares.give(r)
        return factor, constant, power

    def _polynomial(
        self, p: Polynomial, r: Tensor, power: float, *, identity: float = 0.0, lasts: bool = False
    ) -> Tensor:
        """Return p₁A + p₂A² + …, plus a multiple of the identity, all times a power of two; A is R / `_GRAM`.

        ``lasts`` says that it must stay while X moves.
        """
        multiply, take = self._matmuls.multiply, self._squares.take
        if len(p) == 2:
            return torch.mul(r, p[1] * power / _GRAM, out=take(lasts=lasts))
        if len(p) == 5 and p[4]:
            lead, u, w, t = factored(p)
            h, out = take(), take(lasts=lasts)
            multiply(r, r, ((r, u),), h, 1 / _GRAM)
            summands = (h, lead * w * power / _GRAM), (r, lead * t * power / _GRAM)
            multiply(h, h, summands, out, lead * power / _GRAM**2, identity=identity * power)
            self._squares.give(h)
            return out
        powers = range(len(p) - 3, 0, -1)  # Horner's scheme; two memories take turns
        out = take(lasts=lasts and not len(powers) % 2)
        terms, alpha = ((r, p[-2] * power / _GRAM),), p[-1] * power / _GRAM**2
        multiply(r, r, terms, out, alpha, identity=0.0 if powers else identity * power)
        for number in powers:
            out, before = take(lasts=lasts and bool(number % 2)), out
            more = {"identity": identity * power if number == 1 else 0.0}
            multiply(before, r, ((r, p[number] * power / _GRAM),), out, 1 / _GRAM, **more)
            self._squares.give(before)
        return out

    def _gram(self, scale: float = _GRAM, *, lasts: bool = False) -> Tensor:
        """Return X Xᵀ of the matrices divided by their norm, times a power of two."""
        squares = self._squares.take(lasts=lasts)
        for iterates, square in self._by_shape(squares):
            self._matmuls.multiply(iterates.x, None, (), square, scale, iterates.inverse_square)
        return squares


def _power(height: float) -> float:
    """Return the power of two that takes a number near 2¹²."""
    return 2.0 ** (12 - ceil(log2(height)))
