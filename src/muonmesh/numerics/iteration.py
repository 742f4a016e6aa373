"""Iteration: the Newton–Schulz iteration of a batch of matrices on a CPU: norms, steps and products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from muonmesh.numerics.coefficients import CoefficientSet, Polynomial, segments_of
from muonmesh.numerics.gram_form import factor_of_all, factored
from muonmesh.numerics.kernels import Exact, Matmuls
from muonmesh.numerics.kernels.dense import scaled
from muonmesh.numerics.kernels.memory import ALIGNMENT
from muonmesh.numerics.kernels.threads import scratch
from muonmesh.numerics.normalize import load, store, sums
from muonmesh.numerics.square_matrices import (
    add_scaled,
    row_products,
    row_squares,
    set_centred_diagonal,
    symmetric_part,
)


class Iteration:
    """The iteration of a batch of matrices on a CPU, in buffers that the next batch reuses.

    A loaded matrix is only multiplied by a power of two. The division by its norm ν is applied to X Xᵀ before the
    polynomials, and to the result by the last product. Dividing a bf16 matrix by its norm first would round every entry
    once more, and the slope of the polynomials at 0 amplifies this error a thousandfold. It would double the error on
    recorded momentum (docs/internals/numerics.md).

    Each buffer is contiguous and begins at a multiple of 64 bytes, so that products of equal shape always have the same
    alignment, because their last bits depend on it. The caller's memory is used as a buffer if it is suitable, because
    fewer buffers leave more of the matrix in the cache that the threads share.

    Attributes:
        x: The iterates of the matrices divided by ν, times ν; at first the loaded matrices. Shape (batch, rows, cols),
            rows ≤ cols, compute dtype.
        loaded_norm, norm: See `Iterates`.
    """

    def __init__(
        self,
        prepared: CoefficientSet,
        segments: Sequence[tuple[Polynomial, ...]],
        matmuls: Matmuls,
        dtype: torch.dtype,
    ) -> None:
        """Set the coefficients, products and dtype that an `Orthogonalizer` has resolved."""
        self._prepared, self._segments, self._matmuls = prepared, segments, matmuls
        self._dtype = dtype
        self._row_products = row_products if matmuls.exact is None else matmuls.exact.row_products
        self._squares: dict[str, Tensor] = {}
        self._square_term: Tensor | None = None

    def run(self, matrices: Tensor, out: Tensor, *, overwrite: bool) -> None:
        """Orthogonalize `matrices`, shape (batch, m, n), into `out`."""
        self._shape = len(matrices), *sorted(matrices.shape[1:])
        self._device = matrices.device
        first = matrices if overwrite and self._serves(matrices) else self._long(0)
        second = out if self._serves(out) else self._long(1)
        # X alternates between the two, and should end in `out`.
        self.x, self._next = (first, second) if len(self._segments) % 2 else (second, first)
        self._iterate(matrices)
        if self.x is not out:
            exact = self._exact_for(out)
            (store if exact is None else exact.store)(self.x, out)

    def _iterate(self, matrices: Tensor) -> None:
        conditioner = self._prepared.preconditioner
        self._norm_is(self._load(matrices))
        self.loaded_norm = self.norm
        self._last = False
        conditioner.before(self)
        if conditioner.bounds_closer and len(self._segments) == 1 and self._matmuls.exact is not None:
            self._last = True
            given = self.x, self._inverse_square, self._segments[0], self._matmuls, self._square
            factor, mean, norm = factor_of_all(*given)  # two products of X in total
            self._norm_is(self.norm * norm)
            self._apply(factor, mean)
        else:
            if conditioner.bounds_closer:
                self.begin(self._segments[0][0])
            self._take(self._segments)
        conditioner.after(self)

    def _take(self, segments: Sequence[tuple[Polynomial, ...]]) -> None:
        for number, segment in enumerate(segments, 1):
            self._last = number == len(segments)
            if len(segment) == 2:
                self.gram_steps(*segment, last=self._last)
            else:
                self.step(*segment)

    def take_more(self, polynomials: tuple[Polynomial, ...]) -> None:
        """Do `Iterates.take_more`."""
        self._norm_is(torch.ones_like(self.norm))
        by_gram = len(self._segments) < self._prepared.steps
        self._take(tuple(segments_of(polynomials, "gram" if by_gram else "standard")))

    def _square(self, name: str) -> Tensor:
        """Return the buffer (batch, rows, rows) with this name; it is allocated at its first use."""
        if name not in self._squares:
            count, rows, _ = self._shape
            shape = count, rows, rows
            self._squares[name] = scratch(f"square {name}", shape, dtype=self._dtype, device=self._device)
        return self._squares[name]

    def _serves(self, memory: Tensor) -> bool:
        """Whether the caller's memory can hold X."""
        _, rows, cols = self._shape
        fits = memory.shape[1:] == (rows, cols) and memory.dtype == self._dtype and memory.is_contiguous()
        return fits and memory.data_ptr() % ALIGNMENT == 0

    def _load(self, matrices: Tensor) -> Tensor:
        """Write matrices to X times a power of two, and return their norms; see `load`."""
        exact = self._matmuls.exact
        if exact is None:
            return load(matrices, self.x, together=self._matmuls.together)
        if self._exact_for(matrices) is None:  # not in one pass; the norms are summed in one way all the same
            load(matrices, self.x, together=self._matmuls.together)
            matrices = self.x
        return exact.load(matrices, self.x)

    def _exact_for(self, memory: Tensor) -> Exact | None:
        """Return the operations that read or write the caller's memory in one pass; None if there are none for it."""
        return self._matmuls.exact if memory.dtype == self._dtype and memory.is_contiguous() else None

    def _long(self, number: int) -> Tensor:
        return scratch(f"long {number}", self._shape, dtype=self._dtype, device=self._device)

    def _norm_is(self, norm: Tensor) -> None:
        self.norm, self._inverse = norm, norm.reciprocal()
        self._inverse_square = self._inverse.square() if self._matmuls.together else norm.square().reciprocal()

    def begin(self, p: Polynomial) -> None:
        """Divide X by ‖A²‖^¼ (Frobenius) of its Gram matrix A: (Σσ⁸)^⅛, which bounds its largest singular value.

        The first quintic also needs A and A², so they are kept.
        """
        a = self.gram()
        square = self._matmuls.multiply(a, a, [(a, 0.0)], self._square("c"))
        squares = row_squares(square) if self._matmuls.exact is None else self._row_products(square, square)
        fourth = sums(squares)[:, None, None].sqrt_()
        fourth = torch.where(fourth == 0, 1.0, fourth)
        scaled(square, p[2] / (1 - p[1]) / fourth)  # for the lerp that adds p₁·A
        scaled(a, fourth.rsqrt())
        self._square_term = square
        self._norm_is(self.norm * fourth.sqrt().sqrt())

    def step(self, p: Polynomial) -> None:
        """X ← p(X), two products of X and those of the polynomial."""
        if len(p) == 5 and p[4]:
            self._apply(*self._degree_9(p, self.gram()))
        else:
            z = self._without_constant(p, self.gram(), "b", "c")
            self._apply(z, p[0])

    def _degree_9(self, p: Polynomial, a: Tensor) -> tuple[Tensor, Tensor]:
        """Return Z less the mean of its diagonal, and that mean plus p₀, of p₀ + Z = p₀ + p₁·A + … + p₄·A⁴.

        With H = A² + u·A and u = p₃/2p₄, Z = p₄·(H² + w·H + t·A). This takes two products instead of three, and its
        numbers have the size of the result. The powers of A have much larger factors, which would multiply their
        rounding errors. The diagonal is computed in fp32 as in `gram_steps`.
        """
        lead, u, w, t = factored(p)
        h = self._matmuls.multiply(a, a, [(a, u)], self._square("b"))
        products = row_squares(h) if self._matmuls.exact is None else self._row_products(h, h)
        h_diagonal, a_diagonal = (square.diagonal(dim1=-2, dim2=-1).to(products.dtype) for square in (h, a))
        diagonal = lead * (products + w * h_diagonal + t * a_diagonal)
        rest = 1 - lead * t
        if rest > 0.5:  # one operation, where that divides by nothing small
            z = self._matmuls.multiply(h, h, [(h, lead * w / rest)], self._square("c"), lead / rest)
            z = torch.lerp(z, a, lead * t, out=self._square("d"))
        else:
            z = self._matmuls.multiply(h, h, [(h, lead * w)], self._square("c"), lead)
            z = add_scaled(z, a, lead * t, a, 0.0, self._square("d"))
        return z, p[0] + set_centred_diagonal(z, diagonal)

    def gram_steps(self, p: Polynomial, q: Polynomial, *, last: bool) -> None:
        """X ← q(p(X)) with two products of X instead of four.

        With p(X) = P X and P = p₀ + Z, the next Gram matrix is P A P and q(p(X)) = (q₀ + W)(p₀ + Z) X. The factor is
        held as μ + Q with zero mean on Q's diagonal: in bf16 a diagonal of nearly equal entries rounds the same way
        in every entry, which shifts all singular values together and can push them past where q diverges.

        Rounded matrices commute only nearly, so mirroring one triangle of their product is an error too. Later steps
        correct it. No step follows the last two steps, so these compute both triangles.
        """
        matmuls, p0, q0 = self._matmuls, p[0], q[0]
        a = self.gram()
        z = self._without_constant(p, a, "b", "c")
        spare = "c" if z is self._square("b") else "b"
        pa = matmuls.multiply(z, a, [(a, p0)], self._square(spare))
        # As few squares at once as there can be, for a square of a wide model is large: `held` has pap, `free` nothing.
        if last:
            full = matmuls.multiply(z, pa, [(pa, p0)], self._square("a"), symmetric=False)
            held, free = spare, "a"
            pap = symmetric_part(full, self._square("d"), self._square(held))
        else:
            held, free = "a", spare
            pap = matmuls.multiply(z, pa, [(pa, p0)], self._square(held))
        w = self._without_constant(q, pap, free, "d")
        other = self._square(free if w is self._squares.get("d") else "d")
        if last:
            factor = matmuls.multiply(w, z, [(z, 0.0)], self._square(held), symmetric=False)
            factor = add_scaled(factor, z, q0, w, p0, other)
        else:
            both = torch.lerp(z, w, p0 / (p0 + q0), out=self._square(held))
            factor = matmuls.multiply(w, z, [(both, p0 + q0)], other)

        # The diagonal of the factor again, in fp32 and rounded once.
        products = self._row_products(z, w)
        z_diagonal, w_diagonal = (t.diagonal(dim1=-2, dim2=-1).to(products.dtype) for t in (z, w))
        diagonal = products + q0 * z_diagonal + p0 * w_diagonal
        self._apply(factor, p0 * q0 + set_centred_diagonal(factor, diagonal))

    def gram(self) -> Tensor:
        """Return A = X Xᵀ of the matrices divided by their norm, in buffer "a"."""
        if self._square_term is not None:
            return self._square("a")
        return self._matmuls.multiply(self.x, None, [], self._square("a"), scale=self._inverse_square)

    def _apply(self, b: Tensor, a: float | Tensor) -> None:
        """X ← a·X + B X; in the last segment also divided by ν."""
        factor: float | Tensor = self._inverse if self._last else 1.0
        self._matmuls.multiply(b, self.x, [(self.x, a)], self._next, scale=factor, symmetric=False)
        self.x, self._next = self._next, self.x

    def _without_constant(self, p: Polynomial, a: Tensor, out: str, spare: str) -> Tensor:
        """p₁·A + p₂·A² + ..., in the buffer `out` or `spare`; Horner's scheme from the highest power down."""
        if self._square_term is not None:
            term, self._square_term = self._square_term, None
            # Not by `add`: on a CPU it rounds the last elements of a thread differently from the others.
            return torch.lerp(term, a, p[1], out=self._square(out))
        if len(p) == 2:
            return torch.mul(a, p[1], out=self._square(out))
        result = self._matmuls.multiply(a, a, [(a, p[-2])], self._square(out), p[-1])
        for coefficient in reversed(p[1:-2]):
            out, spare = spare, out
            result = self._matmuls.multiply(result, a, [(a, coefficient)], self._square(out))
        return result
