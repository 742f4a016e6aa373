"""Matrix: one matrix to orthogonalize, and the ways in which a parameter splits into matrices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from muonmesh.errors import explain_error
from muonmesh.layout.region import Block, Region, row_major

MatrixSpec = Any
"""``"whole"``, ``"stack"``, ``"flatten"``, ``("rows", …)``, ``("cols", …)``, ``("heads", n, dim)``,
``("interleaved", k, dim[, block])``, ``("interleaved", (runs…), dim)``, ``("transposed", spec)``,
``("flatten", spec)`` or ``("stack", spec)``; see `split_matrices`."""


def as_tuples(spec: Any) -> Any:
    """Return nested lists, as in JSON, as nested tuples."""
    return tuple(map(as_tuples, spec)) if isinstance(spec, list | tuple) else spec


_FORMS = (
    '"whole", "stack", "flatten", ("rows", sizes...), ("cols", sizes...), ("heads", n, dim), '
    '("interleaved", k, dim[, block]), ("interleaved", (runs...), dim), ("transposed", spec), ("flatten", spec) or '
    '("stack", spec)'
)


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix to orthogonalize: number ``index`` of its parameter, ``rows`` × ``cols`` (out × in).

    ``blocks`` give the places of its elements in the parameter's global index space and in the assembled matrix. The
    assembled matrix is row-major in the canonical orientation ``shape``, which never has more rows than columns.
    """

    parameter: str
    index: int
    rows: int
    cols: int
    blocks: tuple[Block, ...]
    shape: tuple[int, int] = field(init=False, repr=False, compare=False)
    numel: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Compute the shape once, because steps read it often."""
        object.__setattr__(self, "shape", (min(self.rows, self.cols), max(self.rows, self.cols)))
        object.__setattr__(self, "numel", self.rows * self.cols)

    @property
    def name(self) -> str:
        """The parameter's name with the number of the matrix, such as "w[0]"."""
        return f"{self.parameter}[{self.index}]"


@dataclass(frozen=True, slots=True)
class View:
    """The dims that form rows and columns when a parameter, or a slice of a stack, is read as a matrix."""

    shape: tuple[int, ...]
    fixed: tuple[tuple[int, int], ...]  # (dim, index) pairs of the stack
    row_dims: tuple[int, ...]
    col_dims: tuple[int, ...]


Span = tuple[int, int, int]
"""Indices along one side of a view: (first, step, count)."""


Part = tuple[View, list[tuple[Span, Span]]]
"""A view and the (row span, column span) pairs that one matrix consists of, in order."""


class _Misfit(Exception):
    """The reason why a spec does not fit; `split_matrices` composes the message."""


def split_matrices(name: str, shape: Sequence[int], spec: MatrixSpec = None) -> tuple[Matrix, ...]:
    """Return the matrices of a parameter of global ``shape``, in order. They cover each element exactly once.

    Args:
        name: The parameter's name, for messages and for the result.
        shape: Global shape.
        spec: How the parameter splits. ``"whole"``: it is one matrix (default for 2-D). ``"stack"``: leading dims are a
            batch (default for 3-D). ``"flatten"``: (out, …) is read as out × rest, for convolutions; ``("flatten",
            spec)`` then splits this matrix by ``spec``. ``("rows", a, b)`` and ``("cols", a, b)``: consecutive blocks
            of these sizes. ``("heads", n, dim)``: n equal blocks along dim 0 or 1. ``("interleaved", k, dim, block)``:
            k matrices alternate along dim in runs of ``block`` (default 1). ``("interleaved", (q, k, v), dim)``:
            matrices alternate along dim in runs of these lengths, repeated until dim is full. ``("transposed",
            spec)``: stored as in × out. ``("stack", spec)``: each slice of the leading dims splits by ``spec``.

    Raises:
        ValueError: the spec is unknown or does not fit the shape.
    """
    return assemble(name, parts_of(name, shape, spec))


def assemble(name: str, parts: Sequence[Part]) -> tuple[Matrix, ...]:
    """Return the matrices of a parameter from its parts (`parts_of`)."""
    return tuple(Matrix(name, index, *_assembled(view, tuple(spans))) for index, (view, spans) in enumerate(parts))


def parts_of(name: str, shape: Sequence[int], spec: MatrixSpec) -> list[Part]:
    """Return the parts of a parameter, one for each matrix. Errors are those of `split_matrices`."""
    shape = tuple(int(size) for size in shape)
    if spec is None:
        if len(shape) not in (2, 3):
            write = "Write muonmesh.from_model(model), which gives it to AdamW; or put the parameter in a group with "
            write += f'"algorithm": "adamw", or say how it splits into matrices: one of {_FORMS}'
            raise ValueError(explain_error(name, f"shape {shape} in a Muon group", "a matrix", write))
        spec = "whole" if len(shape) == 2 else "stack"
    if 0 in shape:
        needed, write = "sizes of at least 1", "Leave empty parameters out"
        raise ValueError(explain_error(name, f"shape {shape}", needed, write))
    try:
        return _parse(shape, _normalised(spec))
    except (_Misfit, ValueError, TypeError) as error:
        problem, needed = f"matrices {spec!r} for shape {shape}: {error}", "a form that fits the shape"
        raise ValueError(explain_error(name, problem, needed, f"Write one of {_FORMS}")) from None


def _normalised(spec: MatrixSpec) -> tuple[Any, ...]:
    """Return a spec as a tuple; checkpoints and configuration files turn tuples into lists."""
    if isinstance(spec, str):
        return (spec,)
    if isinstance(spec, (tuple, list)) and spec and isinstance(spec[0], str):
        return tuple(spec)
    raise _Misfit("unknown form")


def _parse(shape: tuple[int, ...], spec: tuple[Any, ...]) -> list[Part]:
    match spec:
        case ("flatten", *inner):
            if len(shape) < 2:
                raise _Misfit("flatten needs at least two dims")
            parts = _split(View(shape, (), (0,), tuple(range(1, len(shape)))), _inner(inner))
            columns = [(view, cols) for view, spans in parts for _, cols in spans]
            if any(view.row_dims != (0,) or cols[2] != math.prod(shape[1:]) for view, cols in columns):
                raise _Misfit("inside flatten stands what cuts dim 0")
            return parts
        case ("stack", *inner):
            if len(shape) < 3:
                raise _Misfit("a stack needs at least three dims")
            leading = len(shape) - 2
            return [
                part
                for index in itertools.product(*(range(size) for size in shape[:leading]))
                for part in _split(View(shape, tuple(enumerate(index)), (leading,), (leading + 1,)), _inner(inner))
            ]
    if len(shape) != 2:
        raise _Misfit(f"{spec[0]} needs two dims; for a stack of such matrices nest it: ('stack', …)")
    return _split(View(shape, (), (0,), (1,)), spec)


def _split(view: View, spec: tuple[Any, ...]) -> list[Part]:
    """Split one rows × cols view by a spec."""
    rows, cols = sizes = tuple(math.prod(view.shape[dim] for dim in dims) for dims in (view.row_dims, view.col_dims))
    whole = (0, 1, rows), (0, 1, cols)
    match spec:
        case ("whole",):
            return [(view, [whole])]
        case ("transposed", *inner):
            if (nested := _inner(inner))[0] in ("stack", "flatten"):
                raise _Misfit(f"{nested[0]} cannot stand inside transposed; nest them the other way round")
            return _split(View(view.shape, view.fixed, view.col_dims, view.row_dims), nested)
        case ("rows" | "cols" as side, *parts):
            dim = int(side == "cols")
            return [(view, [_along(dim, span, whole)]) for span in _blocks(_positive(parts), sizes[dim])]
        case ("heads", count, dim):
            (count,), size = _positive([count]), sizes[_dim(dim)]
            if size % count:
                raise _Misfit(f"{size} is not a multiple of {count} heads")
            return [(view, [_along(dim, span, whole)]) for span in _blocks([size // count] * count, size)]
        case ("interleaved", tuple() | list() as parts, dim):
            return _interleaved(view, _positive(parts), _dim(dim), sizes, whole)
        case ("interleaved", int() as count, dim, *block) if len(block) < 2:
            return _interleaved(view, _positive([count])[0] * _positive(block or [1]), _dim(dim), sizes, whole)
    raise _Misfit("unknown form, or wrong number of values")


def _interleaved(view: View, runs: list[int], dim: int, sizes: tuple[int, ...], whole: tuple[Span, Span]) -> list[Part]:
    """Split a view into matrices that alternate along a dim in runs of these lengths."""
    size, period = sizes[dim], sum(runs)
    if size % period:
        raise _Misfit(f"{size} is not a multiple of {period}, the length of one turn")
    if period == len(runs):
        return [(view, [_along(dim, (i, period, size // period), whole)]) for i in range(period)]
    starts = itertools.accumulate(runs, initial=0)
    return [
        (view, [_along(dim, (first, 1, run), whole) for first in range(start, size, period)])
        for start, run in zip(starts, runs, strict=False)
    ]


def _inner(arguments: Sequence[Any]) -> tuple[Any, ...]:
    if len(arguments) > 1:
        raise _Misfit("wrong number of values")
    return _normalised(arguments[0]) if arguments else ("whole",)


def _positive(values: Sequence[Any]) -> list[int]:
    if not values or not all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in values):
        raise _Misfit("sizes must be positive integers")
    return list(values)


def _dim(value: Any) -> int:
    if value not in (0, 1) or isinstance(value, bool):
        raise _Misfit("dim must be 0 or 1")
    return int(value)


def _blocks(sizes: list[int], total: int) -> list[Span]:
    if sum(sizes) != total:
        raise _Misfit(f"the sizes add up to {sum(sizes)}, not {total}")
    starts = itertools.accumulate(sizes, initial=0)
    return [(start, 1, size) for start, size in zip(starts, sizes, strict=False)]


def _along(dim: int, span: Span, whole: tuple[Span, Span]) -> tuple[Span, Span]:
    return (whole[0], span) if dim else (span, whole[1])


@lru_cache(maxsize=65536)
def _assembled(view: View, spans: tuple[tuple[Span, Span], ...]) -> tuple[int, int, tuple[Block, ...]]:
    """Return rows, cols and blocks of a matrix. The result is cached, so that equal parameters share it."""
    # More than one span along a side means consecutive runs in the matrix.
    along_cols = len({s[1] for s in spans}) > 1
    rows = spans[0][0][2] if along_cols else sum(s[0][2] for s in spans)
    cols = sum(s[1][2] for s in spans) if along_cols else spans[0][1][2]
    row_stride, col_stride = (cols, 1) if rows <= cols else (1, rows)
    blocks = []
    start = 0
    for row_span, col_span in spans:
        offset, shape, step = [0] * len(view.shape), list(view.shape), [1] * len(view.shape)
        strides = [0] * len(view.shape)
        for dim, at in view.fixed:
            offset[dim], shape[dim] = at, 1
        for dims, span, unit in (
            (view.row_dims, row_span, row_stride),
            (view.col_dims, col_span, col_stride),
        ):
            for dim, stride in zip(dims, row_major(tuple(view.shape[d] for d in dims)), strict=True):
                strides[dim] = stride * unit
            if len(dims) == 1:
                offset[dims[0]], step[dims[0]], shape[dims[0]] = span
        blocks.append(Block(Region(tuple(offset), tuple(shape), tuple(step)), start, tuple(strides)))
        start += col_span[2] * col_stride if along_cols else row_span[2] * row_stride
    return rows, cols, tuple(blocks)
