"""CpuIteration: the Newton–Schulz iteration of a batch of matrices on a CPU: norms, steps and products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from muonmesh.numerics.coefficients import CoefficientSet, Polynomial, factored, segments_of
from muonmesh.numerics.deflation import deflate
from muonmesh.numerics.kernels import Exact, Matmuls
from muonmesh.numerics.kernels.dense import scaled
from muonmesh.numerics.kernels.product_table import ALIGNMENT
from muonmesh.numerics.kernels.threads import scratch
from muonmesh.numerics.normalize import load, store, sums
from muonmesh.numerics.square_matrices import (
    add_scaled,
    row_products,
    row_squares,
    set_centred_diagonal,
    symmetric_part,
)


def buffers_of(
    matrices: Tensor, out: Tensor, dtype: torch.dtype, *, turns: int, overwrite: bool, shape_number: int = 0
) -> tuple[Tensor, Tensor]:
    """Return memory for X of a batch and for the next X, (batch, rows, cols) with rows ≤ cols, of the compute dtype.

    Each is contiguous and begins at a multiple of 64 bytes, so that products of equal shape always have the same
    alignment, because their last bits depend on it. The caller's memory is used if it is suitable, because fewer
    buffers leave more of the matrix in the cache that the threads of a CPU share.

    Args:
        matrices: The matrices, (batch, m, n).
        out: Where the result should lie after both have taken turns.
        dtype: The compute dtype.
        turns: How often X becomes the next X.
        overwrite: Whether the memory of the matrices may be used.
        shape_number: The number of the shape, if several are computed together.
    """
    shape = torch.Size((len(matrices), *sorted(matrices.shape[1:])))

    def memory(candidate: Tensor | None, number: int) -> Tensor:
        fits = candidate is not None and candidate.shape == shape and candidate.is_contiguous()
        if (
            candidate is None
            or not fits
            or candidate.dtype.itemsize != dtype.itemsize
            or candidate.data_ptr() % ALIGNMENT
        ):
            return scratch(f"long {shape_number} {number}", shape, dtype=dtype, device=matrices.device)
        return candidate if candidate.dtype == dtype else candidate.view(dtype)

    first, second = memory(matrices if overwrite else None, 0), memory(out, 1)
    return (first, second) if turns % 2 else (second, first)


class CpuIteration:
    """The iteration on a CPU, in buffers that the next batch reuses.

    A loaded matrix is only multiplied by a power of two. The division by its norm ν is applied to X Xᵀ before the
    polynomials, and to the result by the last product. Dividing a bf16 matrix by its norm first would round every entry
    once more, and the slope of the polynomials at 0 amplifies this error a thousandfold. It would double the error on
    recorded momentum (docs/internals/numerics.md).

    Args:
        prepared, segments, matmuls, dtype: The coefficients, products and dtype that an `Orthogonalizer` has resolved.

    Attributes:
        x: The iterates of the matrices divided by ν, times ν; at first the loaded matrices. Shape (batch, rows, cols),
            rows ≤ cols, compute dtype.
    """

    _square_term: Tensor | None = None
    _last = False  # whether the segment is the last

    def __init__(
        self, prepared: CoefficientSet, segments: Sequence[tuple[Polynomial, ...]], matmuls: Matmuls, dtype: torch.dtype
    ) -> None:
        self._prepared, self._segments, self._matmuls, self._dtype = prepared, segments, matmuls, dtype

    def run(self, matrices: Tensor, out: Tensor, *, overwrite: bool) -> None:
        """Orthogonalize `matrices`, shape (batch, m, n), into `out`."""
        turns = len(self._segments)
        self.x, self._next = buffers_of(matrices, out, self._dtype, turns=turns, overwrite=overwrite)
        self._shape, self._device = self.x.shape, matrices.device
        exact, deflation = self._matmuls.exact, self._prepared.deflation
        self._row_products = row_products if exact is None else exact.row_products
        self._squares, self._as_batch = dict[str, Tensor](), self._matmuls.batch_limit > 1
        loaded = self._load(matrices)
        self._norm_is(loaded)
        if deflation is None:
            self._take(self._segments)
        else:
            deflate(self.x, deflation.vectors)
            if len(self._segments) == 1 and exact is not None:
                self.all_steps(self._segments[0])
            else:
                self.begin(self._segments[0][0])
                self._take(self._segments)
            if deflation.falls_short(self.x, loaded, self._norm):
                by_gram = len(self._segments) < self._prepared.steps
                self._norm_is(torch.ones_like(self._norm))
                self._take(tuple(segments_of(deflation.finish, "gram" if by_gram else "standard")))
        if self.x is not out:
            exact = self._exact_for(out)
            (store if exact is None else exact.store)(self.x, out)

    def _take(self, segments: Sequence[tuple[Polynomial, ...]]) -> None:
        for number, segment in enumerate(segments, 1):
            self._last = number == len(segments)
            if len(segment) == 2:
                self.gram_steps(*segment, last=self._last)
            else:
                self.step(*segment)

    def _square(self, name: str) -> Tensor:
        """Return the buffer (batch, rows, rows) with this name; it is allocated at its first use."""
        if name not in self._squares:
            count, rows, _ = self._shape
            shape = count, rows, rows
            self._squares[name] = scratch(f"square {name}", shape, dtype=self._dtype, device=self._device)
        return self._squares[name]

    def _load(self, matrices: Tensor) -> Tensor:
        """Write matrices to X times a power of two, and return their norms; see `load`."""
        exact = self._matmuls.exact
        if exact is None:
            return load(matrices, self.x, as_batch=self._as_batch)
        if self._exact_for(matrices) is None:  # not in one pass; the norms are summed in one way all the same
            load(matrices, self.x, as_batch=self._as_batch)
            matrices = self.x
        return exact.load(matrices, self.x)

    def _exact_for(self, memory: Tensor) -> Exact | None:
        """Return the operations that read or write the caller's memory in one pass; None if there are none for it."""
        return self._matmuls.exact if memory.dtype == self._dtype and memory.is_contiguous() else None

    def _norm_is(self, norm: Tensor) -> None:
        self._norm, self._inverse = norm, norm.reciprocal()
        self._inverse_square = self._inverse.square() if self._as_batch else norm.square().reciprocal()

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
        self._norm_is(self._norm * fourth.sqrt().sqrt())

    def step(self, p: Polynomial) -> None:
        """X ← p(X), two products of X and those of the polynomial."""
        if len(p) == 5 and p[4]:
            self._apply(*self._degree_9(p, self.gram()))
        else:
            z = self._without_constant(p, self.gram(), "b", "c")
            self._apply(z, p[0])

    def _degree_9(self, p: Polynomial, a: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return Z less the mean of its diagonal, and that mean plus p₀, of p₀ + Z = p₀ + p₁·A + … + p₄·A⁴.

        Z is computed as `factored` says, in ``out`` by products that take two terms. The diagonal is computed in fp32
        as in `gram_steps`.
        """
        lead, u, w, t = factored(p)
        h = self._matmuls.multiply(a, a, [(a, u)], self._square("b" if out is None else "c"))
        products = row_squares(h) if self._matmuls.exact is None else self._row_products(h, h)
        diagonal = lead * (products + w * _diagonal(h) + t * _diagonal(a))
        rest = 1 - lead * t
        if out is not None:
            z = self._matmuls.multiply(h, h, [(h, lead * w), (a, lead * t)], out, lead)
        elif rest > 0.5:  # one operation, where that divides by nothing small
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
        # As few squares at once as there can be, for a square of a wide model is large: `free` has nothing.
        if last:
            full = matmuls.multiply(z, pa, [(pa, p0)], self._square("a"), symmetric=False)
            pap_buffer, free = spare, "a"
            pap = symmetric_part(full, self._square("d"), self._square(pap_buffer))
        else:
            pap_buffer, free = "a", spare
            pap = matmuls.multiply(z, pa, [(pa, p0)], self._square(pap_buffer))
        w = self._without_constant(q, pap, free, "d")
        other = self._square(free if w is self._squares.get("d") else "d")
        if last:
            factor = matmuls.multiply(w, z, [(z, 0.0)], self._square(pap_buffer), symmetric=False)
            factor = add_scaled(factor, z, q0, w, p0, other)
        else:
            summand = torch.lerp(z, w, p0 / (p0 + q0), out=self._square(pap_buffer))
            factor = matmuls.multiply(w, z, [(summand, p0 + q0)], other)

        self._apply(factor, p0 * q0 + self._centre(factor, z, p0, w, q0))

    def _centre(self, factor: Tensor, z: Tensor, p: float | Tensor, w: Tensor, q: float | Tensor) -> Tensor:
        """Write the diagonal of (q + W)(p + Z) − p·q anew, less its mean, in fp32 and rounded once; return the mean."""
        return set_centred_diagonal(factor, self._row_products(z, w) + q * _diagonal(z) + p * _diagonal(w))

    def all_steps(self, polynomials: Sequence[Polynomial]) -> None:
        """X ← all polynomials of X/(n·ν) with two products of X for any number of steps, one of which is X Xᵀ.

        n·ν is (Σσ⁸)^⅛, which bounds the largest singular value. If F is the product of the factors so far, the Gram
        matrix of F X is F X Xᵀ Fᵀ, so no step needs X. With a bf16 matrix alone this is too inaccurate from the third
        step on: a Gram matrix holds the squares of the singular values, and each step amplifies its rounding error
        where they are small. So each Gram matrix is held as two bf16 matrices: the rounded matrix, and the rounding
        error (`Exact`). Where singular values are small, a factor is nearly its constant. So the second matrix is
        needed only in sums, not in products.

        Args:
            polynomials: Of degree 5 or 9, the first a quintic.
        """
        multiply, square = self._matmuls.multiply, self._square
        r, low, zr, zr_low = square("a"), square("a low"), square("b"), square("b low")
        multiply(self.x, None, (), r, scale=self._inverse_square, low=low)
        first, *others = polynomials
        squared = multiply(r, r, (), square("c"))
        # So that the Schatten-4 norm of scale·R is 1. On a CPU reading a number needs no wait.
        scale = (self._row_products(squared, squared).sum().sqrt().item() or 1.0) ** -0.5
        self._norm_is(self._norm * scale**-0.5)
        weight = first[1] * scale
        squared.mul_(first[2] * scale**2 / (1 - weight))
        # Not by `add`: on a CPU it rounds the last elements of a thread differently from the others.
        factor = z = torch.lerp(squared, r, weight, out=square("step first"))
        mean = constant = _number(first[0])
        for number, p in enumerate(others):
            # R ← (c + Z) R (c + Z), where c + Z is the previous step. Rounded Z and R commute only nearly, so a
            # mirrored half of Z R has errors where large entries cancel. In the first step, where most cancel, it is
            # computed in full.
            with_r = ((r, scale * constant), (low, scale * constant))
            multiply(z, r, with_r, zr, scale, symmetric=number > 0, low=zr_low)
            multiply(zr, z, ((zr, constant), (zr_low, constant)), r, low=low)
            scale, step, joint = 1.0, square(f"step {number % 2}"), square(f"factor {number % 2}")
            if len(p) == 3:
                z, constant = multiply(r, r, ((r, p[1]),), step, p[2]), _number(p[0])
            else:
                z, constant = self._degree_9(p, r, step)
            # Both triangles: rounded matrices commute only nearly, and no later product of X corrects the error.
            multiply(z, factor, ((factor, constant), (z, mean)), joint, symmetric=False)
            mean, factor = constant * mean + self._centre(joint, factor, mean[..., 0], z, constant[..., 0]), joint
        self._last = True
        self._apply(factor, mean)

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


def _number(value: float) -> Tensor:
    return torch.full((1, 1, 1), value, dtype=torch.float32, device="cpu")


def _diagonal(square: Tensor) -> Tensor:
    """Return the diagonals, fp32 or wider."""
    return square.diagonal(dim1=-2, dim2=-1).to(torch.promote_types(square.dtype, torch.float32))
