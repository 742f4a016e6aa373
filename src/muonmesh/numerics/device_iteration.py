"""DeviceIteration: the Newton–Schulz iteration on devices, in fp16 or wider, by products alone.

fp16 has three bits more than bf16, and a small range: its numbers are kept far from both ends by powers of two, which
change no bit. The norm of a matrix is in [2¹², 2¹³), a Gram matrix is 2¹⁰ times as large, and a polynomial of it is as
large as makes its largest possible value 2¹². So fp16 holds exactly what bf16 does down to 2⁻³⁰ of a norm.

With these bits three steps can go through one Gram matrix, and the identity can be part of a factor, so that X ← Q X is
a plain product (docs/internals/numerics.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import ceil, log2, prod
from typing import Any

import torch
from torch import Tensor

from muonmesh.numerics.coefficients import CoefficientSet, Polynomial, factored, height
from muonmesh.numerics.device_deflation import FACTOR, FIRST_GRAM, Squares, deflate, factor_by_table, norm_of
from muonmesh.numerics.iteration import buffers_of
from muonmesh.numerics.kernels import Matmuls
from muonmesh.numerics.kernels.toolchain import DTYPES
from muonmesh.numerics.normalize import normalize, store

_GRAM = 2.0**10
"""What Gram matrices are multiplied by. Their singular values are at most about 3 in a published set."""


class _Iterates:
    """Matrices of one shape.

    Args:
        matrices, out, dtype, turns, overwrite: See `buffers_of`.

    Attributes:
        x: The iterates of the matrices divided by their norm ν, times ν; at first the loaded matrices.
        following: Memory for the next iterates.
        result: Memory for the last iterates, of a dtype that can hold the result.
        inverse: 1/ν, (batch, 1, 1).
        of_gram: `_GRAM`/ν², likewise.
    """

    inverse: Tensor
    of_gram: Tensor

    def __init__(self, matrices: Tensor, out: Tensor, dtype: torch.dtype, *, turns: int, overwrite: bool) -> None:
        self.x, self.following = buffers_of(matrices, out, dtype, turns=turns, overwrite=overwrite)
        narrow = torch.bfloat16 if dtype == torch.float16 else dtype
        last = self.following if turns % 2 else self.x
        result = last.view(out.dtype if out.dtype.itemsize == narrow.itemsize else narrow)
        self.result = out if result.data_ptr() == out.data_ptr() else result

    def load(self, matrices: Tensor, by_kernel: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None) -> None:
        """Write matrices to X, with a norm ν in [2¹², 2¹³); ``by_kernel`` is `Matmuls.normalize`."""
        if by_kernel is None or matrices.dtype not in DTYPES:
            self.inverse, inverse_square = normalize(matrices, self.x)
        else:
            shape, dtype = self.x.shape, matrices.dtype
            if matrices.shape != shape or not matrices.is_contiguous():
                fits = dtype.itemsize == self.x.dtype.itemsize
                wide = self.x.view(dtype) if fits else torch.empty(shape, dtype=dtype, device=matrices.device)
                matrices = wide.copy_(matrices if matrices.shape == shape else matrices.mT)
            self.inverse, inverse_square = by_kernel(matrices, self.x)
        self.of_gram = inverse_square * _GRAM

    def divide(self, inverse: Tensor) -> None:
        """Multiply 1/ν² by numbers, and 1/ν by their roots."""
        self.inverse, self.of_gram = self.inverse * inverse.sqrt(), self.of_gram * inverse


class DeviceIteration:
    """The iteration on a device; the CPU waits for nothing.

    It takes matrices of several shapes, if they have equally many rows: only the products with X know its columns. All
    others are one launch each for all matrices.

    Args:
        prepared, segments, matmuls, dtype: The coefficients, products and dtype that an `Orthogonalizer` has resolved.
    """

    def __init__(
        self, prepared: CoefficientSet, segments: Sequence[tuple[Polynomial, ...]], matmuls: Matmuls, dtype: torch.dtype
    ) -> None:
        self._prepared, self._segments, self._matmuls, self._dtype = prepared, segments, matmuls, dtype

    def run(self, matrices: Sequence[Tensor], out: Sequence[Tensor], *, overwrite: bool) -> None:
        """Orthogonalize ``matrices`` into ``out``, for each shape (batch, m, n)."""
        self._free, self._counts = list[Tensor](), list(map(len, matrices))
        deflation = self._prepared.deflation
        options: Any = {"turns": len(self._segments) + (deflation is not None), "overwrite": overwrite}
        pairs = zip(matrices, out, strict=True)
        self._iterates = [_Iterates(x, into, self._dtype, **options) for x, into in pairs]
        for iterates, x in zip(self._iterates, matrices, strict=True):
            iterates.load(x, self._matmuls.normalize)
        if deflation is not None:
            for iterates in self._iterates:
                x, into = iterates.x, iterates.following
                deflate(x, iterates.inverse, into, deflation.vectors, self._matmuls)
                iterates.x, iterates.following = into, x
        if deflation is not None and deflation.by_table:
            self._take_by_table()
        else:
            if deflation is not None:
                self._bound_closer()
            self._take()
        for iterates, into in zip(self._iterates, out, strict=True):
            if iterates.x is not into:
                store(iterates.x, into)

    def _by_shape(self, squares: Tensor) -> Iterator[tuple[_Iterates, Tensor]]:
        """Iterate over the shapes, each with its part of what there is for each matrix."""
        return zip(self._iterates, torch.split(squares, self._counts), strict=True)

    def _bound_closer(self) -> None:
        """Make ν the Schatten norm (Σσ⁸)^⅛, which bounds the largest singular value more closely."""
        a, square = self._gram(), self._square()
        self._matmuls.multiply(a, a, (), square, 2.0**14 / _GRAM**2)
        for iterates, inverse in self._by_shape(norm_of(square, self._matmuls).mul(2.0**-14).rsqrt()):
            iterates.divide(inverse)
        self._free += a, square

    def _take_by_table(self) -> None:
        """X ← three polynomials of X/(n·ν) on one Gram matrix, where n·ν is (Σσ⁸)^⅛ and a matrix has its own row."""
        multiply, x = self._matmuls.multiply, self._iterates[0].x
        squares = Squares(sum(self._counts), x.shape[1], self._dtype, x.device)
        r = squares.take()
        for iterates, part in self._by_shape(r):
            multiply(iterates.x, None, (), part, FIRST_GRAM / _GRAM, iterates.of_gram)
        product, scales = factor_by_table(r, squares, self._matmuls)
        for (iterates, part), (_, scale) in zip(self._by_shape(product), self._by_shape(scales), strict=True):
            last = iterates.inverse * scale
            multiply(part, iterates.x, (), iterates.result, 1 / FACTOR, last, symmetric=False)
            iterates.x = iterates.result

    def _take(self) -> None:
        """X ← p(X) for the polynomials of each segment, and the last result divided by ν."""
        for number, segment in enumerate(self._segments, 1):
            last = number == len(self._segments)
            factors, constant, power = self._factor(segment)
            for iterates, factor in self._by_shape(factors):
                x, into = iterates.x, iterates.result if last else iterates.following
                terms, scale = ((x, constant),) if constant else (), iterates.inverse if last else 1.0
                self._matmuls.multiply(factor, x, terms, into, 1 / power, scale, symmetric=False)
                iterates.x, iterates.following = into, x
            self._free.append(factors)

    def _factor(self, polynomials: Sequence[Polynomial]) -> tuple[Tensor, float, float]:
        """Return Q, μ and s so that Q/s + μ is the factor of X of some steps, all on one Gram matrix."""
        multiply, r = self._matmuls.multiply, self._gram()
        factor: Tensor | None = None
        constant, power = 1.0, 1.0
        for number, p in enumerate(polynomials, 1):
            p0, step_power, last = p[0], _power(height(p)), number == len(polynomials)
            if factor is None and last and len(p) > 2:  # the identity is part of the factor
                factor, constant, power = self._polynomial(p, r, step_power, identity=p0), 0.0, step_power
                continue
            z = self._polynomial(p, r, step_power)
            joined = z
            if factor is None:
                constant, power = p0, step_power
            else:  # (Z + p₀)(Q + μ)
                joint_power = _power(prod(map(height, polynomials[:number])))
                terms = [(factor, p0 * joint_power / power), (z, constant * joint_power / step_power)]
                joined = self._square()
                more = {"identity": p0 * constant * joint_power}
                multiply(z, factor, terms[: 2 if constant else 1], joined, joint_power / (step_power * power), **more)
                self._free.append(factor)
                constant, power = 0.0, joint_power
            if not last:  # the next Gram matrix, (Z + p₀) R (Z + p₀)
                half = self._square()
                multiply(z, r, ((r, p0),), half, 1 / step_power)
                multiply(z, half, ((half, p0),), r, 1 / step_power)
                self._free.append(half)
            if joined is not z:
                self._free.append(z)
            factor = joined
        self._free.append(r)
        assert factor is not None
        return factor, constant, power

    def _polynomial(self, p: Polynomial, r: Tensor, power: float, *, identity: float = 0.0) -> Tensor:
        """Return p₁A + p₂A² + …, plus a multiple of the identity, all times a power of two; A is R / `_GRAM`."""
        multiply, out = self._matmuls.multiply, self._square()
        if len(p) == 2:
            return torch.mul(r, p[1] * power / _GRAM, out=out)
        if len(p) == 5 and p[4]:
            lead, u, w, t = factored(p)
            h = self._square()
            multiply(r, r, ((r, u),), h, 1 / _GRAM)
            summands = (h, lead * w * power / _GRAM), (r, lead * t * power / _GRAM)
            multiply(h, h, summands, out, lead * power / _GRAM**2, identity=identity * power)
            self._free.append(h)
            return out
        terms, alpha = ((r, p[-2] * power / _GRAM),), p[-1] * power / _GRAM**2
        multiply(r, r, terms, out, alpha, identity=identity * power if len(p) == 3 else 0.0)
        for number in range(len(p) - 3, 0, -1):  # Horner's scheme
            out, before = self._square(), out
            more = {"identity": identity * power if number == 1 else 0.0}
            multiply(before, r, ((r, p[number] * power / _GRAM),), out, 1 / _GRAM, **more)
            self._free.append(before)
        return out

    def _gram(self) -> Tensor:
        """Return X Xᵀ of the matrices divided by their norm, times `_GRAM`."""
        squares = self._square()
        for iterates, square in self._by_shape(squares):
            self._matmuls.multiply(iterates.x, None, (), square, scale=iterates.of_gram)
        return squares

    def _square(self) -> Tensor:
        """Return memory for a square of each matrix, (matrices, rows, rows), that is free."""
        if self._free:
            return self._free.pop()
        x = self._iterates[0].x
        return torch.empty(sum(self._counts), x.shape[1], x.shape[1], dtype=self._dtype, device=x.device)


def _power(height: float) -> float:
    """Return the power of two that takes a number near 2¹²."""
    return 2.0 ** (12 - ceil(log2(height)))
