"""Orthogonalize whole matrices: M = UΣVᵀ becomes (nearly) UVᵀ by a Newton–Schulz iteration.

One step applies an odd polynomial p to the singular values of X, using products only: with A = X Xᵀ,
``X ← a·X + (b·A + c·A² + ...) X``. The Gram form of two steps (Dao-AILab's Gram Newton–Schulz, 2026) needs the
long side of X only to form A and to apply the result; between them everything is rows × rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
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
    segments_of,
)
from muonmesh.numerics.device_deflation import DEGREES
from muonmesh.numerics.device_iteration import DeviceIteration
from muonmesh.numerics.dtypes import COMPUTE_DTYPES, HELD_DTYPES, NEEDED_COMPUTE, NEEDED_HELD
from muonmesh.numerics.iteration import CpuIteration
from muonmesh.numerics.kernels import KernelName, Matmuls, is_compiled, resolve, select
from muonmesh.numerics.kernels.product_table import ALIGNMENT
from muonmesh.numerics.kernels.recording import run_again
from muonmesh.numerics.kernels.threads import alone, plain_modes, run_on_one_thread
from muonmesh.numerics.precision import exact_products
from muonmesh.numerics.working_memory import BatchShape, Needs, PlacedBatch, squares_at_once

Method: TypeAlias = Literal["auto", "standard", "gram"]
"""How the polynomials are applied to a matrix: "standard" step by step, "gram" through its Gram matrix, "auto" by the
better of the two."""

_AS_IT_IS = nullcontext()

# Where Gram is faster (measured): from so many rows on, if there are so many times as many columns.
_GRAM_FROM = ((384, 2), (256, 4))

ONE_BY_ONE_FROM = 2048
"""From how many rows on a device multiplies one matrix by its factor at a time: such a product fills it."""


@alone()
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
) -> Tensor:
    """Return the orthogonal factor of each matrix: same singular vectors, all singular values near 1.

    Only the direction counts: multiplying x by a power of two changes no bit, a matrix of zeros stays exactly zero, and
    there is no epsilon. A matrix with a non-finite entry becomes non-finite as a whole. Its neighbors in the batch do
    not. On the CPU the bits of a result do not depend on the other matrices of the batch. A transposed matrix that is
    not square gives the transposed result, bit for bit.

    Args:
        x: Shape (..., rows, cols), any strides; bf16, fp16, fp32 or fp64. Not written unless `overwrite` allows it.
        coefficients: A published set by name, or a sequence of odd polynomials, one tuple (a, b, ...) a step. "auto",
            the default of `Muon`, is "deflated" in bf16 and fp16 without `steps`, on a CPU from 384 rows on and on a
            device from 4,096 and 45 · 2²⁰ elements, and "polar_express" otherwise.
        steps: Number of steps, at least 1. None: the length of a sequence; for a published set 5, but 10 for
            "deepseekv4" and 3 for "deflated".
        method: "standard", "gram" or "auto", see `resolve_method`.
        dtype: Compute dtype: bf16, fp32 or fp64. A device computes in fp16 instead of bf16, which is more exact. There
            fp16 is the same; a CPU refuses it.
        kernels: The code that multiplies matrices. "auto": the code of this process that should be the fastest.
            "torch": torch's products. "triton", "compiled" and "amx": this code, or an error if it cannot run.
        out: Contiguous tensor of x's shape, dtype and device to write, not overlapping x.
        overwrite: Whether x may be used as working memory; its contents are lost then.

    Returns:
        `out`, or a new contiguous tensor of x's shape, dtype and device. It carries no gradient.

    Raises:
        ValueError: x has fewer than 2 dims or an empty matrix dim, an option is unknown, steps is smaller than 1, or
            the method is not possible here.
        TypeError: x is not a plain dense floating-point tensor, dtype is no compute dtype, or steps is no int.
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
    return resolved(x, out=out, overwrite=overwrite)


@dataclass(frozen=True)
class Orthogonalizer:
    """The orthogonalization of matrices of one shape, with the options of `orthogonalize` resolved once.

    Attributes:
        rows, cols: The size of each matrix in the iteration, rows ≤ cols.
        coefficients: The coefficients of these matrices: the name of a set, or polynomials.
        prepared: The coefficient set, with the operations before and after the polynomials.
        method: How the polynomials are applied.
        segments: The polynomials, grouped by the product with X that applies them.
        whole: Whether all steps use a single Gram matrix: after deflation, on a device by its table, on a CPU with
            kernels that keep the matrix's rounding error.
        kernels: The ``kernels`` option.
        dtype: Compute dtype.
        device: The device of the matrices.
        in_place: Whether nothing reads the matrices afterwards.
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
    in_place: bool = False
    _recordings: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

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
        in_place: bool = False,
    ) -> Orthogonalizer:
        """Resolve the options of `orthogonalize` for matrices of one shape."""
        rows, cols = sorted((rows, cols))
        form = form_of(device, kernels)
        if dtype == torch.float16 and form == "cpu":
            write = "Write torch.bfloat16, which devices compute in fp16 too"
            raise TypeError(explain_error("compute dtype", f"{dtype} on a CPU", "bf16, fp32 or fp64 there", write))
        if dtype == torch.bfloat16 and form == "device":
            dtype = torch.float16
        coefficients = choose(coefficients, steps, rows, cols, form=form, dtype=dtype)
        coefficients, steps = for_rows(coefficients, steps, rows)
        prepared, schedule = coefficient_set(coefficients), coefficient_schedule(coefficients, steps)
        chosen = resolve_method(rows, cols, coefficients=coefficients, steps=steps, method=method, dtype=dtype)
        deflation, whole, as_made = prepared.deflation, False, steps in (None, prepared.steps)
        if deflation is not None and form == "device":
            whole = deflation.has_table and as_made and dtype.itemsize == 2 and method != "standard"
            chosen = "gram" if whole else chosen
        elif deflation is not None:
            whole = chosen == "gram" and is_compiled(
                resolve(kernels, device=device, dtype=dtype, rows=rows, whole=True)
            )
            if not as_made:
                prepared = replace(prepared, deflation=replace(deflation, finish=()))
        segments = (schedule,) if whole else tuple(segments_of(schedule, chosen, half=form == "device"))
        resolved = rows, cols, coefficients, prepared, chosen, segments, whole, kernels, dtype, device
        return Orthogonalizer(*resolved, in_place=in_place)

    @property
    def on_device(self) -> bool:
        """Whether this is done by `DeviceIteration`, as on a device and in Triton's interpreter."""
        return form_of(self.device, self.kernels) == "device"

    @property
    def joins(self) -> Hashable:
        """What is equal for shapes that `orthogonalize_batches` takes, if their settings are; None: one shape alone.

        A shape is alone if another one behind it would not begin at a multiple of `ALIGNMENT`, and so be copied.
        """
        alone = not self.on_device or (self.products.small is not None and self.quintics)
        alone = alone or self.rows * self.cols * self.dtype.itemsize % ALIGNMENT != 0
        return None if alone else (self.rows, self.segments)

    @property
    def description(self) -> str:
        """The coefficient set and, on a device, the dtype between products, as `explain` shows them."""
        name = self.coefficients if isinstance(self.coefficients, str) else "polynomials"
        if self.dtype != torch.float16:
            return name
        return f"{name} in {'bf16' if self.products.small is not None and self.quintics else 'fp16'}"

    @property
    def degrees(self) -> list[list[int]]:
        """The number of coefficients of each step's polynomial, for each segment; `layout.cost` takes them."""
        if self.on_device and self.whole:
            return [list(DEGREES)]
        return [list(map(len, segment)) for segment in self.segments]

    @property
    def deflated(self) -> int:
        """The number of singular values that are reduced first; `layout.cost` takes it."""
        return 0 if self.prepared.deflation is None else self.prepared.deflation.vectors

    @cached_property
    def quintics(self) -> tuple[float, ...]:
        """Three coefficients for each step, if the set has only such steps and one kernel can take them; else empty."""
        steps = [polynomial for segment in self.segments for polynomial in segment]
        fits = not self.deflated and self.method == "standard" and self.dtype.itemsize == 2
        fits = fits and max(map(len, steps)) <= 3
        # At most 16 steps, because the coefficients are part of the kernel's code.
        return tuple(c for step in steps for c in (*step, 0.0)[:3]) if fits and len(steps) <= 16 else ()

    @cached_property
    def needs(self) -> Needs:
        """What a device needs for a batch, of which every shape has the same `joins`."""
        squares = tuple(map(squares_at_once, self.degrees))
        in_place = self.in_place and self.joins is not None
        return Needs(squares, self.rows >= ONE_BY_ONE_FROM, in_place, self.deflated)

    @cached_property
    def products(self) -> Matmuls:
        """The table of products. Raises a ValueError if the kernels are not available."""
        rows, cols = self.rows, self.cols
        return select(self.kernels, device=self.device, dtype=self.dtype, rows=rows, cols=cols, whole=self.whole)

    @cached_property
    def repeats(self) -> bool:
        """Whether the started kernels do not depend on values, so that `run_again` can repeat recorded launches."""
        return self.products.normalize is not None and not self.deflated

    def exactly(self) -> AbstractContextManager[None]:
        """Return a block in which torch multiplies this dtype as such, whatever is set for the model."""
        counts = self.dtype in (torch.float32, torch.float16) and self.products.by_torch
        return exact_products(self.dtype) if counts else _AS_IT_IS

    def __call__(self, x: Tensor, *, out: Tensor | None = None, overwrite: bool = False) -> Tensor:
        """Return the orthogonal factor of each matrix of this shape, in `plain_modes`; see `orthogonalize`."""
        like_x = out is None or (out.shape, out.dtype, out.device) == (x.shape, x.dtype, x.device)
        if out is not None and not (like_x and out.is_contiguous()):
            actual = f"{tuple(out.shape)}, strides {out.stride()}, {out.dtype} on {out.device}"
            needed = f"x's {tuple(x.shape)}, {x.dtype} on {x.device}, contiguous"
            write = "Write out=torch.empty_like(x, memory_format=torch.contiguous_format)"
            raise ValueError(explain_error("out", actual, needed, write))
        matrices = x if x.ndim == 3 else x.reshape(x.shape[:-2].numel(), *x.shape[-2:])
        result = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
        self.orthogonalize_batches(
            [matrices], [result if x.ndim == 3 else result.view(matrices.shape)], overwrite=overwrite
        )
        return result

    def orthogonalize_batches(
        self,
        matrices: Sequence[Tensor],
        out: Sequence[Tensor],
        *,
        overwrite: bool,
        memory: Tensor | None = None,
    ) -> None:
        """Write the orthogonal factors of matrices, (batch, m, n) for each shape, to ``out``, in `plain_modes`.

        Of several shapes, each has an orthogonalizer with the same `joins`; their bits are those of each alone. If both
        lie in one ``memory``, they lie there as `needs` says.
        """
        run: Callable[..., None] = partial(self._run, overwrite=overwrite)
        tensors: Sequence[Tensor] = (*matrices, *out)
        facts: Hashable = overwrite
        limit, count = self.products.batch_limit, len(out[0])
        if memory is not None:
            facts = tuple((len(x), *x.shape[1:]) for x in matrices)
            run, tensors = partial(self._run_in_memory, facts), (memory,)
        elif len(out) == 1 and not 0 < count <= limit:
            for start in range(0, count, limit):
                run(*(tensor[start : start + limit] for tensor in tensors))
            return
        if self.repeats:
            with self.exactly():
                run_again(self._recordings, run, tensors, facts)
        else:
            run(*tensors)

    def _run_in_memory(self, shapes: BatchShape, memory: Tensor) -> None:
        """Orthogonalize matrices that lie in a memory as `needs` says."""
        layout = self.needs.layout(shapes)
        assert layout is not None
        with self.exactly():
            self.iteration().run_in_place(PlacedBatch(memory, layout))

    def iteration(self, products: Matmuls | None = None) -> DeviceIteration:
        """Return the iteration on a device, by products of its own or by others."""
        form: Any = {"deflated": self.deflated, "by_table": self.whole}
        return DeviceIteration(self.segments, products or self.products, self.dtype, **form)

    def _run(self, *tensors: Tensor, overwrite: bool) -> None:
        """Orthogonalize the first half of the tensors, one for each shape, into the others."""
        matrices, out = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
        small = self.products.small
        if small is not None and self.quintics and matrices[0].dtype in small.dtypes:
            small.run(matrices[0], out[0], self.quintics)
        elif self.products.one_thread:
            run_on_one_thread(partial(self._iterate, matrices, out, overwrite), device=self.device)
        else:
            self._iterate(matrices, out, overwrite)

    def _iterate(self, matrices: Sequence[Tensor], out: Sequence[Tensor], overwrite: bool) -> None:
        with self.exactly():
            if self.on_device:
                self.iteration().run(matrices, out, overwrite=overwrite)
            else:
                alone = CpuIteration(self.prepared, self.segments, self.products, self.dtype)
                alone.run(matrices[0], out[0], overwrite=overwrite)


def form_of(device: torch.device, kernels: KernelName) -> Literal["cpu", "device"]:
    """Return the form that the iteration has: a device's in Triton's interpreter, too, which computes on a CPU."""
    return "cpu" if device.type == "cpu" and kernels != "triton" else "device"


def resolve_method(
    rows: int,
    cols: int,
    *,
    coefficients: Coefficients = "polar_express",
    steps: int | None = None,
    method: Method = "auto",
    dtype: torch.dtype = torch.bfloat16,
) -> Literal["standard", "gram"]:
    """Return the method that `orthogonalize` uses for a rows × cols matrix.

    "auto" takes "gram" if it is faster and accurate enough. It is faster from 384 rows and twice as many columns on, or
    from 256 rows and four times as many. Accurate enough means an error of at most 1.1 times that of "standard" on
    spectra of four decades and on recorded momentum. This holds in bf16 for "polar_express" at 3 to 10 steps, "quintic"
    at 3 to 5, "deepseekv4" at 10, and "deflated" at 3. For fp32 and fp64, which are chosen for exactness, "auto" is
    "standard".

    Args:
        rows: Rows of the whole matrix.
        cols: Columns of the whole matrix.
        coefficients: The coefficients, as for `orthogonalize`.
        steps: The number of steps, as for `orthogonalize`.
        method: "auto", "standard" or "gram".
        dtype: Compute dtype.

    Returns:
        "standard" or "gram".

    Raises:
        ValueError: An option is unknown, or "gram" was asked for with a polynomial that does not rise at 0.
        TypeError: `dtype` is not a compute dtype, or steps is no int.
    """
    if method not in get_args(Method):
        method_names = ", ".join(repr(name) for name in get_args(Method))
        raise ValueError(explain_error("method", f"{method!r}", f"one of {method_names}", 'Write method="auto"'))
    if dtype not in COMPUTE_DTYPES:
        raise TypeError(explain_error("dtype", f"{dtype}", NEEDED_COMPUTE, "Write dtype=torch.bfloat16"))
    short, long = sorted((rows, cols))
    coefficients, steps = for_rows(choose(coefficients, steps), steps, short)
    schedule = coefficient_schedule(coefficients, steps)
    if method == "gram":
        for polynomial in schedule:
            if polynomial[0] <= 0:
                actual = f"'gram' with the polynomial {polynomial}"
                needed = "polynomials that rise at 0, with a first coefficient above 0"
                raise ValueError(explain_error("method", actual, needed, 'Write method="standard"'))
        return "gram"
    gram_is_better = (
        method == "auto"
        and isinstance(coefficients, str)
        and len(schedule) in coefficient_set(coefficients).gram_steps
        and dtype.itemsize == 2
        and any(short >= rows_from and long >= aspect * short for rows_from, aspect in _GRAM_FROM)
    )
    return "gram" if gram_is_better else "standard"


def _check_input(x: Tensor) -> None:
    """Raise an error unless x is a batch of dense floating-point matrices that this process holds whole."""
    if not isinstance(x, Tensor):
        raise TypeError(explain_error("x", type(x).__name__, "a torch.Tensor", "Write torch.as_tensor(x)"))
    if hasattr(x, "device_mesh"):
        actual = f"{type(x).__name__}, a matrix spread over ranks"
        write = "Write orthogonalize(x.full_tensor()), or let muonmesh.Muon gather it"
        raise TypeError(explain_error("x", actual, "the whole matrix", write))
    if x.layout != torch.strided:
        raise TypeError(explain_error("x", f"a tensor of layout {x.layout}", "a dense one", "Write x.to_dense()"))
    if x.dtype not in HELD_DTYPES:
        raise TypeError(explain_error("x", f"dtype {x.dtype}", NEEDED_HELD, "Write x.float()"))
    if x.ndim < 2:
        needed = "at least 2 dims (..., rows, cols): a vector has no orthogonal factor"
        raise ValueError(explain_error("x", f"shape {tuple(x.shape)}", needed, "Leave it to AdamW"))
    if 0 in x.shape[-2:]:
        actual = f"shape {tuple(x.shape)}, an empty matrix"
        raise ValueError(explain_error("x", actual, "at least 1 row and 1 column", "Leave it out"))
