"""Orthogonalize whole matrices: M = UΣVᵀ becomes (nearly) UVᵀ by a Newton–Schulz iteration.

One step applies an odd polynomial p to the singular values of X, using products only: with A = X Xᵀ,
``X ← a·X + (b·A + c·A² + ...) X``. The Gram form of two steps (Dao-AILab's Gram Newton–Schulz, 2026) needs the
long side of X only to form A and to apply the result; between them everything is rows × rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from muonmesh.errors import explain_error
from muonmesh.numerics.coefficients import (
    Coefficients,
    CoefficientSet,
    Polynomial,
    choose,
    coefficient_schedule,
    coefficient_set,
    for_rows,
)
from muonmesh.numerics.deflation import deflate, departure
from muonmesh.numerics.dtypes import COMPUTE_DTYPES, HELD_DTYPES, NEEDED_COMPUTE, NEEDED_HELD
from muonmesh.numerics.gram_form import factor_of_all, factored
from muonmesh.numerics.graphs import Graphs
from muonmesh.numerics.kernels import Exact, KernelName, Matmuls, resolve, select
from muonmesh.numerics.kernels.dense import scaled
from muonmesh.numerics.kernels.memory import scratch
from muonmesh.numerics.kernels.recording import run_again
from muonmesh.numerics.kernels.threads import run_on_one_thread
from muonmesh.numerics.kernels.toolchain import DTYPES
from muonmesh.numerics.normalize import load, rescale_rows, store, sums
from muonmesh.numerics.precision import exact_fp32, plain_modes
from muonmesh.numerics.rational import rational_step
from muonmesh.numerics.square_matrices import (
    add_scaled,
    row_products,
    row_squares,
    set_centred_diagonal,
    symmetric_part,
)

Method: TypeAlias = Literal["auto", "standard", "gram"]
"""How the polynomials are applied to a matrix: "standard" step by step, "gram" through its Gram matrix, "auto" by
whichever is better."""

_ALIGNMENT = 64

# What was deflated is near enough to its polar factor if the Schatten norm is so much smaller than the norm before,
# for then small values are raised as far as by "polar_express", or if the mean of (1 − σ²)² is at most this (measured).
_NARROWED, _DEPARTURE = 11, 0.03

# Where Gram is faster (measured): from so many rows on, if there are so many times as many columns.
_GRAM_FROM = ((384, 2), (256, 4))


@plain_modes()
def orthogonalize(
    x: Tensor,
    *,
    coefficients: Coefficients = "polar_express",
    steps: int | None = None,
    method: Method = "auto",
    dtype: torch.dtype = torch.bfloat16,
    kernels: KernelName = "auto",
    out: Tensor | None = None,
    overwrite: bool = False,
    times: Tensor | None = None,
) -> Tensor:
    """Return the orthogonal factor of each matrix: same singular vectors, all singular values near 1.

    Only the direction counts: multiplying x by a power of two changes no bit, a matrix of zeros stays exactly
    zero, and there is no epsilon. A matrix with a non-finite entry becomes non-finite as a whole, its neighbors
    in the batch do not. On the CPU the bits of a result do not depend on the batch the matrix is in, and those of a
    transposed matrix (not square) are those of the transposed result.

    Args:
        x: Shape (..., rows, cols), any strides; bf16, fp16, fp32 or fp64. Not written unless `overwrite` allows it.
        coefficients: A published set by name, or a sequence of odd polynomials, one tuple (a, b, ...) a step. "auto",
            an optimizer's default, is "deflated" on a CPU in bf16 without `steps`, and else "polar_express".
        steps: Number of steps, at least 1. None: as many as a sequence has polynomials; of a published set 5, of
            "deepseekv4" 10, of "aol" 4, of "deflated" 3, of "qdwh" 1 after its rational step.
        method: "standard", "gram" or "auto", see `resolve_method`.
        dtype: Compute dtype: bf16, fp32 or fp64.
        kernels: What multiplies. "auto": what is expected to be the fastest of what this process has. "torch": torch's
            products. "triton" and "compiled": those, or an error where they cannot be.
        out: Contiguous tensor of x's shape, dtype and device to write, not overlapping x.
        overwrite: Whether x may be used as working memory; its contents are lost then.
        times: What the results are multiplied by, 1-D fp32 or wider, one number for each matrix. It is multiplied
            into 1/ν, so it takes no operation of its own, and no rounding.

    Returns:
        `out`, or a new contiguous tensor of x's shape, dtype and device. It carries no gradient.

    Raises:
        ValueError: x has fewer than 2 dims or an empty matrix dim, an option is unknown, steps is smaller than 1,
            or the method cannot be met.
        TypeError: x is not a plain dense floating-point tensor, dtype cannot be computed in, or steps is no int.
    """
    _check_input(x)
    resolved = Orthogonalizer.of(
        *x.shape[-2:],
        coefficients=coefficients,
        steps=steps,
        method=method,
        dtype=dtype,
        kernels=kernels,
        device=x.device,
    )
    return resolved(x, out=out, overwrite=overwrite, times=times)


@dataclass(frozen=True)
class Orthogonalizer:
    """How matrices of one shape are orthogonalized: what `orthogonalize` was asked for, resolved once.

    Attributes:
        rows, cols: Of each matrix as it is iterated on, rows ≤ cols.
        coefficients: What such matrices get: a set by name, or polynomials.
        prepared: That set: what they need before and after the polynomials.
        method: How the polynomials are applied.
        segments: The polynomials, those together that one product with X applies.
        whole: Whether all steps are taken on one Gram matrix: those after deflation, by kernels that keep its rounding.
        kernels: What was asked to multiply.
        dtype: Compute dtype.
        device: Where the matrices are.
    """

    rows: int
    cols: int
    coefficients: Coefficients
    prepared: CoefficientSet
    method: Literal["standard", "gram"]
    segments: tuple[tuple[Polynomial, ...], ...]
    whole: bool
    kernels: KernelName
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(
        rows: int,
        cols: int,
        *,
        coefficients: Coefficients,
        steps: int | None,
        method: Method,
        dtype: torch.dtype,
        kernels: KernelName,
        device: torch.device,
    ) -> Orthogonalizer:
        """Resolve what was asked for; see `orthogonalize`."""
        rows, cols = sorted((rows, cols))
        coefficients = choose(coefficients, steps, device=device, dtype=dtype)
        coefficients, steps = for_rows(coefficients, steps, rows)
        chosen = resolve_method(rows, cols, coefficients=coefficients, steps=steps, method=method, dtype=dtype)
        prepared, schedule = coefficient_set(coefficients), coefficient_schedule(coefficients, steps)
        deflates = chosen == "gram" and prepared.deflated > 0
        whole = deflates and resolve(kernels, device=device, dtype=dtype, rows=rows, whole=True) == "compiled"
        segments = (schedule,) if whole else tuple(_segments(schedule, chosen))
        finishes = device.type == "cpu" and steps in (None, prepared.steps)  # else somebody asks for another number
        prepared = replace(prepared, finish=prepared.finish if finishes else ())
        return Orthogonalizer(rows, cols, coefficients, prepared, chosen, segments, whole, kernels, dtype, device)

    @property
    def degrees(self) -> list[int]:
        """What the steps cost as `layout.cost` counts it: the number of coefficients of each step's polynomial.

        A rational step costs what a quintic costs: X Xᵀ, rows³ operations, and a product with X. Its rows³ operations
        are a Cholesky factorisation and what makes the inverse of it.
        """
        rational = [] if self.prepared.rational is None else [3]
        return rational + [len(polynomial) for segment in self.segments for polynomial in segment]

    @cached_property
    def quintics(self) -> tuple[float, ...]:
        """Three coefficients a step, if that is all there is to do and a kernel may hold them; else nothing."""
        steps = [polynomial for segment in self.segments for polynomial in segment]
        alone = self.prepared.begins_with_polynomials and self.prepared.preconditioner == "none"
        fits = alone and self.method == "standard" and self.dtype == torch.bfloat16 and max(self.degrees) <= 3
        # More would make much code: they are part of it.
        return tuple(c for step in steps for c in (*step, 0.0)[:3]) if fits and len(steps) <= 16 else ()

    @property
    def squares(self) -> int:
        """How many rows × rows buffers a device needs for a matrix."""
        if max(self.degrees) > 3:
            return 4
        return 2 if self.method == "standard" else 4 - (self.products().join is not None)

    def products(self) -> Matmuls:
        """Return the products, for one thread: they have memory. Raises ValueError where the kernels cannot be."""
        rows, cols = self.rows, self.cols
        return select(self.kernels, device=self.device, dtype=self.dtype, rows=rows, cols=cols, whole=self.whole)

    @cached_property
    def at_once(self) -> int:
        """How many matrices are best orthogonalized together."""
        return self.products().at_once

    @cached_property
    def repeats(self) -> bool:
        """Whether kernels are started that do not depend on values, so that they can be started again (`run_again`)."""
        return self.products().normalize is not None and self.prepared.begins_with_polynomials

    @cached_property
    def _recordings(self) -> dict[Hashable, Any]:
        return {}

    def __call__(
        self,
        x: Tensor,
        *,
        out: Tensor | None = None,
        overwrite: bool = False,
        times: Tensor | None = None,
        room: Tensor | None = None,
        graphs: Graphs | None = None,
    ) -> Tensor:
        """Return the orthogonal factor of each matrix of this shape, in `plain_modes`; see `orthogonalize`.

        With `graphs` a batch that comes again may be captured and replayed. With `room`, that of `room_for`, which
        holds x, the result is columns of it, so x is lost: for one matrix, of a set that begins with polynomials, on a
        device, without `out`.
        """
        like_x = out is None or (out.shape, out.dtype, out.device) == (x.shape, x.dtype, x.device)
        if out is not None and not (like_x and out.is_contiguous()):
            found = f"{tuple(out.shape)}, strides {out.stride()}, {out.dtype} on {out.device}"
            needed = f"x's {tuple(x.shape)}, {x.dtype} on {x.device}, contiguous"
            write = "Write out=torch.empty_like(x, memory_format=torch.contiguous_format)"
            raise ValueError(explain_error("out", found, needed, write))
        numbers = None if times is None else times.to(torch.promote_types(self.dtype, torch.float32))[:, None, None]
        if room is not None:
            with exact_fp32(self.dtype):
                return _Iteration(self, 1, self.products()).run_in(room, numbers)
        matrices = x.reshape(x.shape[:-2].numel(), *x.shape[-2:])
        result = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
        target = result.view(matrices.shape)
        given = [tensor for tensor in (matrices, target, numbers) if tensor is not None]
        run_one, fits = partial(self._run, overwrite=overwrite), 0 < len(matrices) <= self.at_once
        if graphs is not None and fits and self.prepared.begins_with_polynomials:
            key = self.graph_key(matrices.shape, matrices.dtype, overwrite=overwrite, timed=times is not None)
            with exact_fp32(self.dtype):
                if graphs.run(run_one, given, *key):
                    return result
        if self.repeats and fits:
            with exact_fp32(self.dtype):
                run_again(self._recordings, run_one, given, overwrite)
            return result
        matmuls = self.products()
        at_once = max(1, min(matmuls.at_once, len(matrices)))

        def run() -> None:
            iteration = _Iteration(self, at_once, matmuls)
            for start in range(0, len(matrices), at_once):
                some = [tensor[start : start + at_once] for tensor in given]
                iteration.run(*some, overwrite=overwrite)

        with exact_fp32(self.dtype):
            if matmuls.one_thread:
                run_on_one_thread(run, device=self.device)
            else:
                run()
        return result

    def graph_key(
        self, shape: Sequence[int], dtype: torch.dtype, *, overwrite: bool, timed: bool
    ) -> tuple[Hashable, ...]:
        """Return what a batch is known by in `Graphs`; it says which method this is."""
        return id(self), tuple(shape), dtype, overwrite, timed

    def _run(self, *given: Tensor, overwrite: bool) -> None:
        _Iteration(self, len(given[0]), self.products()).run(*given, overwrite=overwrite)


def room_for(rows: int, cols: int, *, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return memory for one large matrix and its result, which takes a sixteenth more than the matrix.

    A product X ← a·X + B X makes each column of what was there in that column. So it may take the columns by panels,
    each written beside the memory it was read from, where nothing is needed any more: X moves by a panel to the left,
    and with the next product back to the right.

    Returns:
        The memory, (1, rows, cols + a panel), and where to write the matrix in it, (1, rows, cols).
    """
    least = -(-cols // (16 * _ALIGNMENT)) * _ALIGNMENT
    # No last panel that is so narrow that a kernel would take other tiles for it.
    width = next(width for width in range(least, cols + least, _ALIGNMENT) if not 0 < cols % width < min(least, 512))
    room = torch.empty(1, rows, cols + width, dtype=dtype, device=device)
    return room, room[..., width:]


def resolve_method(
    rows: int,
    cols: int,
    *,
    coefficients: Coefficients = "polar_express",
    steps: int | None = None,
    method: Method = "auto",
    dtype: torch.dtype = torch.bfloat16,
) -> Literal["standard", "gram"]:
    """Say which method `orthogonalize` uses for a rows × cols matrix.

    "auto" takes Gram where it is faster, from 384 rows and twice as many columns on or 256 rows and four times as
    many, and where its error is known to be at most 1.1 times that of the standard method on spectra of four
    decades and on recorded momentum: in bf16, with "polar_express" at 3 to 10 steps, "quintic" and "aol" at 3 to 5,
    "deepseekv4" at 10, "deflated" at 3. fp32 and fp64 are chosen for exactness, so there "auto" is "standard".

    Args:
        rows: Rows of the whole matrix.
        cols: Columns of the whole matrix.
        coefficients: As for `orthogonalize`.
        steps: As for `orthogonalize`.
        method: What was asked for.
        dtype: Compute dtype.

    Returns:
        "standard" or "gram".

    Raises:
        ValueError: An option is unknown, or "gram" was asked for with a polynomial that does not rise at 0 or with a
            set that has a rational step.
        TypeError: `dtype` is not a compute dtype, or steps is no int.
    """
    if method not in get_args(Method):
        known = ", ".join(repr(name) for name in get_args(Method))
        raise ValueError(explain_error("method", f"{method!r}", f"one of {known}", 'Write method="auto"'))
    if dtype not in COMPUTE_DTYPES:
        raise TypeError(explain_error("dtype", f"{dtype}", NEEDED_COMPUTE, "Write dtype=torch.bfloat16"))
    short, long = sorted((rows, cols))
    coefficients, steps = for_rows(choose(coefficients, steps), steps, short)
    schedule = coefficient_schedule(coefficients, steps)
    if method == "gram":
        if coefficient_set(coefficients).rational is not None:
            found, needed = f"'gram' with {coefficients!r}", "a set without a rational step, whose Gram matrix is fp32"
            raise ValueError(explain_error("method", found, needed, 'Write method="standard"'))
        for polynomial in schedule:
            if polynomial[0] <= 0:
                found = f"'gram' with the polynomial {polynomial}"
                needed = "polynomials that rise at 0, with a first coefficient above 0"
                raise ValueError(explain_error("method", found, needed, 'Write method="standard"'))
        return "gram"
    gram_is_better = (
        method == "auto"
        and isinstance(coefficients, str)
        and len(schedule) in coefficient_set(coefficients).gram_steps
        and dtype == torch.bfloat16
        and any(short >= rows_from and long >= aspect * short for rows_from, aspect in _GRAM_FROM)
    )
    return "gram" if gram_is_better else "standard"


def _check_input(x: Tensor) -> None:
    """Raise for what is not a batch of dense floating-point matrices held whole by this process."""
    if not isinstance(x, Tensor):
        raise TypeError(explain_error("x", type(x).__name__, "a torch.Tensor", "Write torch.as_tensor(x)"))
    if hasattr(x, "device_mesh"):
        found = f"{type(x).__name__}, a matrix spread over ranks"
        write = "Write orthogonalize(x.full_tensor()), or let muonmesh.Muon gather it"
        raise TypeError(explain_error("x", found, "the whole matrix", write))
    if x.layout != torch.strided:
        raise TypeError(explain_error("x", f"a tensor of layout {x.layout}", "a dense one", "Write x.to_dense()"))
    if x.dtype not in HELD_DTYPES:
        raise TypeError(explain_error("x", f"dtype {x.dtype}", NEEDED_HELD, "Write x.float()"))
    if x.ndim < 2:
        needed = "at least 2 dims (..., rows, cols): a vector has no orthogonal factor"
        raise ValueError(explain_error("x", f"shape {tuple(x.shape)}", needed, "Leave it to AdamW"))
    if 0 in x.shape[-2:]:
        found = f"shape {tuple(x.shape)}, an empty matrix"
        raise ValueError(explain_error("x", found, "at least 1 row and 1 column", "Leave it out"))


def _segments(
    schedule: tuple[Polynomial, ...], method: Literal["standard", "gram"]
) -> Iterator[tuple[Polynomial, ...]]:
    """Cut the schedule into single steps and, for Gram, pairs: two steps through A, one direct, two through A, ...

    In bf16 the rounding of A grows by a² with every step that is taken on A itself, until it drowns the small
    singular values. Two steps are harmless, and a direct step between two pairs keeps their errors from adding up:
    5 steps as 2 + 1 + 2 are more accurate than 2 + 2 + 1 on every decaying spectrum (docs/internals/numerics.md).
    """
    length = 2 if method == "gram" else 1
    while schedule:
        yield schedule[:length]
        schedule = schedule[length:]
        length = 3 - length if method == "gram" else 1


class _Iteration:
    """Matrices on their way to orthogonality, in buffers that the next batch uses again.

    What is loaded is only multiplied by a power of two. Its norm ν is not divided out of it, but of X Xᵀ before the
    polynomials, and of the result by the last product. To divide a bf16 matrix by its norm first would round every
    entry once more, and the slope of the polynomials at 0 amplifies that a thousandfold: it doubles the error on
    recorded momentum, as docs/internals/numerics.md shows.

    Each buffer is contiguous and begins at a multiple of 64 bytes, so a product of some shape always meets the same
    alignment: its last bits depend on it. The caller's memory is used as a buffer where it is suitable, because fewer
    buffers leave more of the matrix in the cache that the threads share.

    Attributes:
        x: The iterates of matrices of norm 1, each times ν: at first what was loaded, as it is. Shape (batch, rows,
            cols), rows ≤ cols, compute dtype.
    """

    def __init__(self, resolved: Orthogonalizer, batch: int, matmuls: Matmuls) -> None:
        """Work on at most so many matrices, in memory that is the thread's own."""
        self._resolved, self._matmuls = resolved, matmuls
        self._row_products = row_products if matmuls.exact is None else matmuls.exact.row_products
        self._shape = batch, resolved.rows, resolved.cols
        self._dtype, self._device = resolved.dtype, resolved.device
        self._memory: dict[str, Tensor] = {}
        self._squares: dict[str, Tensor] = {}
        self._panels: list[slice] = []  # of columns that are multiplied one after the other; empty: all at once

    def run(self, matrices: Tensor, out: Tensor, times: Tensor | None = None, *, overwrite: bool) -> None:
        """Orthogonalize `matrices`, shape (batch, m, n), into `out`: at most as many as there is memory for.

        The results are multiplied by `times`, (batch, 1, 1).
        """
        small, quintics, prepared = self._matmuls.small, self._resolved.quintics, self._resolved.prepared
        if small is not None and quintics and matrices.dtype in DTYPES:
            small(matrices, out, quintics, times)
            return
        count = len(matrices)
        first = matrices if overwrite and self._serves(matrices) else self._long(0, count)
        second = out if self._serves(out) else self._long(1, count)
        # X alternates between the two, and should end in `out`.
        moves = len(self._resolved.segments) + (prepared.rational is not None)
        self.x, self._next = (first, second) if moves % 2 else (second, first)
        self._iterate(matrices, times)
        if self.x is not out:
            exact = self._exact_for(out)
            (store if exact is None else exact.store)(self.x, out)

    def run_in(self, room: Tensor, times: Tensor | None) -> Tensor:
        """Orthogonalize the matrix in the last columns of a room, and return in which columns the result is."""
        _, _, cols = self._shape
        width = room.shape[2] - cols
        self.x, self._next = room[..., width:], room[..., :cols]
        self._panels = [slice(start, min(start + width, cols)) for start in range(0, cols, width)]
        self._iterate(self.x, times)
        return self.x

    def _begin(self, count: int) -> None:
        self._count = count
        self._squares.clear()
        self._square_term: Tensor | None = None

    def _iterate(self, matrices: Tensor, times: Tensor | None) -> None:
        prepared, segments = self._resolved.prepared, self._resolved.segments
        self._begin(len(matrices))
        if self._matmuls.normalize is not None and prepared.begins_with_polynomials and matrices.dtype == self.x.dtype:
            if self.x is not matrices:
                self.x.copy_(matrices if matrices.shape == self.x.shape else matrices.mT)
            self._inverse, self._inverse_square = self._matmuls.normalize(self.x)
        else:
            self._norm_is(self._load(matrices))
        self._last, self._times = False, times
        if prepared.preconditioner == "aol":
            rescale_rows(self.x, self._gram())
        if prepared.rational is not None:
            self.rational_step(prepared.rational)
        if prepared.deflated:
            before = self._norm
            deflate(self.x, prepared.deflated)
            if len(segments) == 1 and self._matmuls.exact is not None:
                self._last = True
                given = self.x, self._inverse_square, segments[0], self._matmuls, self._square
                factor, mean, norm = factor_of_all(*given)  # two products of X altogether
                self._norm_is(self._norm * norm)
                self._apply(factor, mean)
            else:
                self.begin(segments[0][0])
                self._take(segments)
            if prepared.finish and not before > _NARROWED * self._norm:
                self.finish(prepared, "gram" if len(segments) < prepared.steps else "standard")
        else:
            self._take(segments)

    def _take(self, segments: Sequence[tuple[Polynomial, ...]]) -> None:
        for number, segment in enumerate(segments, 1):
            self._last = number == len(segments)
            if len(segment) == 2:
                self.gram_steps(*segment, last=self._last)
            else:
                self.step(*segment)

    def finish(self, prepared: CoefficientSet, method: Literal["standard", "gram"]) -> None:
        """Apply what a set has for it to a result that is not yet near its polar factor, one matrix on a CPU.

        Only the result shows how many values the polynomials left low. To decide, the host reads a number, for which
        it would wait on a device.
        """
        times = 1.0 if self._times is None else self._times.item()
        if not departure(self.x[0], times, prepared.deflated) > _DEPARTURE:  # NaN too, as where `times` is 0
            return
        scaled(self.x, 1 / times)
        self._begin(1)
        self._norm_is(torch.ones_like(self._norm))
        self._take(tuple(_segments(prepared.finish, method)))

    def _square(self, name: str) -> Tensor:
        """Return a buffer (count, rows, rows), the same for each name while `run` runs; taken where it is needed."""
        if name not in self._squares:
            if name not in self._memory:
                batch, rows, _ = self._shape
                shape = batch, rows, rows
                self._memory[name] = scratch(f"square {name}", shape, dtype=self._dtype, device=self._device)
            self._squares[name] = self._memory[name][: self._count]
        return self._squares[name]

    def _serves(self, memory: Tensor) -> bool:
        """Whether the caller's memory can hold X."""
        _, rows, cols = self._shape
        fits = memory.shape[1:] == (rows, cols) and memory.dtype == self._dtype and memory.is_contiguous()
        return fits and memory.data_ptr() % _ALIGNMENT == 0

    def _load(self, matrices: Tensor) -> Tensor:
        """Write matrices to X times a power of two, and return their norms; see `load`."""
        exact, same = self._matmuls.exact, self._exact_for(matrices)
        norms = None if same else load(matrices, self.x, together=self._matmuls.together)
        if exact is not None:  # in one pass, or for the norms, so that they are summed in one way
            return exact.load(matrices if same else self.x, self.x)
        assert norms is not None
        return norms

    def _exact_for(self, memory: Tensor) -> Exact | None:
        """Return the operations of the table that read or write the caller's memory in one pass, if they can."""
        return self._matmuls.exact if memory.dtype == self._dtype and memory.is_contiguous() else None

    def _long(self, number: int, count: int) -> Tensor:
        return scratch(f"long {number}", self._shape, dtype=self._dtype, device=self._device)[:count]

    def _norm_is(self, norm: Tensor) -> None:
        self._norm, self._inverse = norm, norm.reciprocal()
        self._inverse_square = self._inverse.square() if self._matmuls.together else norm.square().reciprocal()

    def rational_step(self, abc: tuple[float, float, float]) -> None:
        """X ← x (a + b·x²) / (1 + c·x²) of X divided by a bound of its largest singular value."""
        self._norm_is(self._norm * rational_step(self.x, self._norm, abc, self._resolved.kernels))

    def begin(self, p: Polynomial) -> None:
        """Divide X by ‖A²‖^½ (Frobenius) of its Gram matrix A: (Σσ⁸)^⅛, which bounds its largest singular value.

        A and A² are what the first quintic needs too, so they are kept for it.
        """
        a = self._gram()
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
            self._apply(*self._degree_9(p, self._gram()))
        else:
            z = self._without_constant(p, self._gram(), "b", "c")
            self._apply(z, p[0])

    def _degree_9(self, p: Polynomial, a: Tensor) -> tuple[Tensor, Tensor]:
        """Return Z less the mean of its diagonal, and that mean plus p₀, of p₀ + Z = p₀ + p₁·A + … + p₄·A⁴.

        With H = A² + u·A and u = p₃/2p₄, Z = p₄·(H² + w·H + t·A): two products instead of three, and numbers of the
        size of the result. The powers of A themselves have factors many times as large, by which their rounding to bf16
        would be multiplied. The diagonal is computed in fp32 as in `gram_steps`.
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
        repair it. Nothing comes after the last two steps, so these multiply in full.
        """
        matmuls, p0, q0 = self._matmuls, p[0], q[0]
        a = self._gram()
        z = self._without_constant(p, a, "b", "c")
        spare = "c" if z is self._square("b") else "b"
        pa = matmuls.multiply(z, a, [(a, p0)], self._square(spare))
        # As few squares at once as there can be, for a square of a wide model is large: `held` has pap, `free` nothing.
        if last:
            full = matmuls.multiply(z, pa, [(pa, p0)], self._square("a"), symmetric=False)
            held, free = spare, "a"
            transposed = self._square("d") if self._device.type == "cpu" else None
            pap = symmetric_part(full, transposed, self._square(held))
        else:
            held, free = "a", spare
            pap = matmuls.multiply(z, pa, [(pa, p0)], self._square(held))
        w = self._without_constant(q, pap, free, "d")
        if matmuls.join is not None:
            self._apply(*matmuls.join(z, w, p0, q0, self._square(held), symmetric=not last))
            return
        other = self._square(free if w is self._squares.get("d") else "d")
        if last and not matmuls.sparing:
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

    def _gram(self) -> Tensor:
        """A = X Xᵀ of the matrices with norm 1, in buffer "a"."""
        if self._square_term is not None:
            return self._square("a")
        return self._matmuls.multiply(self.x, None, [], self._square("a"), scale=self._inverse_square)

    def _apply(self, b: Tensor, a: float | Tensor) -> None:
        """X ← a·X + B X, in the last segment divided by ν and multiplied by what the caller asks for.

        Where a is from the data and the products can only add what the host multiplies, it is X + B/a X, and ν takes a:
        the sum is rounded once, and B, which is smaller than X, instead of X an element more.
        """
        if isinstance(a, Tensor) and self._matmuls.sparing:  # a is left to the products that divide by ν
            self._norm_is(self._norm / a)
            b, a = b.div_(a), 1.0
        factor: float | Tensor = self._inverse if self._last else 1.0
        if self._last and self._times is not None:
            factor = self._inverse * self._times
        for some in self._panels or [slice(None)]:
            x = self.x[..., some]
            self._matmuls.multiply(b, x, [(x, a)], self._next[..., some], scale=factor, symmetric=False)
        self._panels.reverse()  # X goes back the way it came, its last panel first
        self.x, self._next = self._next, self.x

    def _without_constant(self, p: Polynomial, a: Tensor, out: str, spare: str) -> Tensor:
        """p₁·A + p₂·A² + ..., in the buffer `out` or `spare`; Horner's scheme from the highest power down."""
        if self._square_term is not None:
            term, self._square_term = self._square_term, None
            # Not by `add`, with which a CPU rounds the end of what a thread has otherwise than the rest.
            return torch.lerp(term, a, p[1], out=self._square(out))
        if len(p) == 2:
            return torch.mul(a, p[1], out=self._square(out))
        result = self._matmuls.multiply(a, a, [(a, p[-2])], self._square(out), p[-1])
        for coefficient in reversed(p[1:-2]):
            out, spare = spare, out
            result = self._matmuls.multiply(result, a, [(a, coefficient)], self._square(out))
        return result
