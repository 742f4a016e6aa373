"""DeviceIteration: the Newton–Schulz iteration on devices, in fp16 or wider, by products alone.

fp16 has three bits more than bf16, and a small range: its numbers are kept far from both ends by powers of two, which
change no bit. The norm of a matrix is in [2¹², 2¹³), a Gram matrix is 2¹⁰ times as large, and a polynomial of it is as
large as makes its largest possible value 2¹². So fp16 holds exactly what bf16 does down to 2⁻³⁰ of a norm.

With these bits three steps can go through one Gram matrix, and the identity can be part of a factor, so that X ← Q X is
a plain product (docs/internals/numerics.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log2, prod

import torch
from torch import Tensor

from muonmesh.numerics.coefficients import Polynomial, factored, height
from muonmesh.numerics.deflation import deflate
from muonmesh.numerics.iteration import Iteration
from muonmesh.numerics.kernels.toolchain import DTYPES
from muonmesh.numerics.normalize import normalize, store

_GRAM = 2.0**10
"""What Gram matrices are multiplied by. Their singular values are at most about 3 in a published set."""


class DeviceIteration(Iteration):
    """The iteration on a device; nothing waits for the CPU, unless the coefficients ask for deflation."""

    def _iterate(self, matrices: Tensor, out: Tensor) -> None:
        self._free: list[Tensor] = []
        narrow = torch.bfloat16 if self._dtype == torch.float16 else self._dtype
        second = self._next if len(self._segments) % 2 else self.x
        result = second.view(out.dtype if out.dtype.itemsize == narrow.itemsize else narrow)
        self._result = out if result.data_ptr() == out.data_ptr() else result
        self._normalize(matrices)
        if self._prepared.deflation is not None:
            deflate(self.x, self._prepared.deflation.vectors)
            self._bound_closer()
        self._of_gram = self._inverse_square * _GRAM
        self._take()
        if self.x is not out:
            store(self.x, out)

    def _normalize(self, matrices: Tensor) -> None:
        """Write matrices to X, with a norm ν in [2¹², 2¹³)."""
        by_kernel = self._matmuls.normalize
        if by_kernel is None or matrices.dtype not in DTYPES:
            self._inverse, self._inverse_square = normalize(matrices, self.x)
            return
        if matrices.shape != self._shape or not matrices.is_contiguous():
            wide = matrices if matrices.shape == self._shape else matrices.mT
            fits = wide.dtype.itemsize == self._dtype.itemsize
            matrices = (
                self.x.view(wide.dtype) if fits else torch.empty(self._shape, dtype=wide.dtype, device=wide.device)
            )
            matrices.copy_(wide)
        self._inverse, self._inverse_square = by_kernel(matrices, self.x)

    def _bound_closer(self) -> None:
        """Make ν the Schatten norm (Σσ⁸)^⅛, which bounds the largest singular value more closely."""
        self._of_gram = self._inverse_square * _GRAM
        a, square = self._gram(), self._square()
        self._matmuls.multiply(a, a, (), square, 2.0**14 / _GRAM**2)
        exact = torch.promote_types(self._dtype, torch.float32)
        norm = torch.linalg.vector_norm(square, dim=(1, 2), keepdim=True, dtype=exact) * 2.0**-14
        inverse = torch.where(norm == 0, 1.0, norm).rsqrt()
        self._inverse, self._inverse_square = self._inverse * inverse.sqrt(), self._inverse_square * inverse
        self._free += a, square

    def _take(self) -> None:
        """X ← p(X) for the polynomials of each segment, and the last result divided by ν."""
        for number, segment in enumerate(self._segments, 1):
            last = number == len(self._segments)
            out, scale = (self._result, self._inverse) if last else (self._next, 1.0)
            factor, constant, power = self._factor(segment)
            terms = ((self.x, constant),) if constant else ()
            self._matmuls.multiply(factor, self.x, terms, out, 1 / power, scale, symmetric=False)
            self._free.append(factor)
            self.x, self._next = out, self.x

    def _factor(self, polynomials: Sequence[Polynomial]) -> tuple[Tensor, float, float]:
        """Return Q, μ and s so that Q/s + μ is the factor of X of some steps, all on one Gram matrix."""
        multiply, r = self._matmuls.multiply, self._gram()
        factor: Tensor | None = None
        constant, power = 1.0, 1.0
        for number, p in enumerate(polynomials, 1):
            own, of_own, last = p[0], _power(height(p)), number == len(polynomials)
            if factor is None and last and len(p) > 2:  # the identity is part of the factor
                factor, constant, power = self._polynomial(p, r, of_own, identity=own), 0.0, of_own
                continue
            z = self._polynomial(p, r, of_own)
            joined = z
            if factor is None:
                constant, power = own, of_own
            else:  # (Z + p₀)(Q + μ)
                both = _power(prod(map(height, polynomials[:number])))
                terms = [(factor, own * both / power), (z, constant * both / of_own)]
                joined = self._square()
                more = {"identity": own * constant * both}
                multiply(z, factor, terms[: 2 if constant else 1], joined, both / (of_own * power), **more)
                self._free.append(factor)
                constant, power = 0.0, both
            if not last:  # the next Gram matrix, (Z + p₀) R (Z + p₀)
                half = self._square()
                multiply(z, r, ((r, own),), half, 1 / of_own)
                multiply(z, half, ((half, own),), r, 1 / of_own)
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
            both = (h, lead * w * power / _GRAM), (r, lead * t * power / _GRAM)
            multiply(h, h, both, out, lead * power / _GRAM**2, identity=identity * power)
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
        return self._matmuls.multiply(self.x, None, (), self._square(), scale=self._of_gram)

    def _square(self) -> Tensor:
        """Return memory for (batch, rows, rows) that is free."""
        batch, rows, _ = self._shape
        if self._free:
            return self._free.pop()
        return torch.empty(batch, rows, rows, dtype=self._dtype, device=self._device)


def _power(height: float) -> float:
    """Return the power of two that takes a number near 2¹²."""
    return 2.0 ** (12 - ceil(log2(height)))
