"""Finds the matrices whose gradient is exactly zero on this rank, before the ranks agree on it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from muonmesh.comm.storage import local_of
from muonmesh.comm.views import view_in_storage
from muonmesh.layout.piece_table import PieceTable, Row
from muonmesh.numerics.kernels.fused import mark_nonzero
from muonmesh.numerics.kernels.memory import upload
from muonmesh.numerics.kernels.rows import SEARCHED, PieceRows, Place, in_three_dims
from muonmesh.numerics.kernels.toolchain import DTYPES, is_usable
from muonmesh.step.parameter_steps import ParameterStep
from muonmesh.step.planning import Planned

_PROBE = 64
"""Number of elements of a gradient that are checked first for being exactly zero; nearly always enough."""


_ROWS = "rows of matrices"


def nonzero_of(
    planned: Planned, entries: Sequence[ParameterStep | None], *, waits: bool, version: object = None
) -> list[bool] | Tensor:
    """Return for each Matrix whether this rank's gradient has an element in it that is not zero, or is NaN.

    Args:
        planned: The plan.
        entries: The parameters in the order of the plan.
        waits: Whether the CPU waits for a device.
        version: The same object as long as all gradients are where they were; None if that is unknown.

    Returns:
        A list if the CPU knows; else bool (matrices,) on the device.
    """
    given = [None if entry is None else entry.gradient for entry in entries]
    gradients = [of if of is None or type(of) is Tensor else local_of(of) for of in given]
    if planned.device.type == "cpu" and waits:
        return _on_host(planned, gradients)
    # Counts of int32: with uint8, 256 non-zero pieces of one matrix would be none.
    found = torch.zeros(len(planned.plan.assignments), dtype=torch.int32, device=planned.device)
    left = _by_kernel(planned.gradient_table, gradients, found, version) if is_usable(planned.device) else None
    rows = planned.gradient_table.rows if left is None else left
    pairs = [(row, gradient) for row in rows if (gradient := gradients[row.parameter]) is not None]
    if pairs:
        norms = torch._foreach_norm([view_in_storage(gradient, row.piece) for row, gradient in pairs], float("inf"))
        numbers = upload([row.assignment for row, _ in pairs], dtype=torch.int64, device=planned.device)
        found.index_add_(0, numbers, (torch.stack(norms) != 0).to(torch.int32))
    return found != 0


def _on_host(planned: Planned, gradients: Sequence[Tensor | None]) -> list[bool]:
    """Look at the first elements of each matrix, of many matrices at once, and only then at all others."""
    table, found = planned.gradient_table, [False] * len(planned.plan.assignments)
    rows_of: dict[int, list[Row]] = table.kept.get(_ROWS) or table.once(_ROWS, lambda: _rows_of(table))
    probes: dict[tuple[int, torch.dtype], tuple[list[int], list[Tensor]]] = {}
    for number, (first, *_) in rows_of.items():
        if (gradient := gradients[first.parameter]) is not None:  # all rows of a matrix are of one parameter
            count, strides = min(first.piece.shape[-1], _PROBE), first.piece.storage_strides[-1:]
            numbers, views = probes.setdefault((count, gradient.dtype), ([], []))
            numbers.append(number)
            start = gradient.storage_offset() + first.piece.storage_start
            views.append(gradient.as_strided((count,), strides, start))
    for numbers, views in probes.values():
        some = views[0].any().unsqueeze(0) if len(views) == 1 else torch.stack(views).any(1)
        for number, any_nonzero in zip(numbers, some.tolist(), strict=True):
            found[number] = any_nonzero or any(_has_nonzero(row, gradients[row.parameter]) for row in rows_of[number])
    return found


def _rows_of(table: PieceTable) -> dict[int, list[Row]]:
    """Return the rows of each matrix."""
    found: dict[int, list[Row]] = {}
    for row in table.rows:
        found.setdefault(row.assignment, []).append(row)
    return found


def _has_nonzero(row: Row, gradient: Tensor | None) -> bool:
    return gradient is not None and bool(view_in_storage(gradient, row.piece).any())


def _by_kernel(table: PieceTable, gradients: Sequence[Tensor | None], found: Tensor, version: object) -> Sequence[Row]:
    """Look by one launch for each dtype, and return the rows that no kernel takes."""
    held = [gradients[number] for number in table.parameters]
    forms = tuple([None if gradient is None else gradient.dtype for gradient in held])
    found_once: tuple[list[tuple[list[int], PieceRows]], list[Row]]
    found_once = table.once(("nonzero", forms), lambda: _launches(table, forms))
    launches, left = found_once
    for places, pieces in launches:
        pieces.version = version
        mark_nonzero(pieces, [gradient for place in places if (gradient := held[place]) is not None], found)
    return left


def _launches(
    table: PieceTable, forms: Sequence[torch.dtype | None]
) -> tuple[list[tuple[list[int], PieceRows]], list[Row]]:
    """Return the launches, each with the places of its parameters in the table; and the other rows with a gradient."""
    taken: dict[torch.dtype, list[Row]] = {}
    left = list[Row]()
    for row in table.rows:
        dtype = forms[table.parameters[row.parameter]]
        if dtype is not None and row.piece.numel:
            fits = dtype in DTYPES and in_three_dims(row.piece.shape, row.piece.storage_strides) is not None
            (taken.setdefault(dtype, []) if fits else left).append(row)
    launches = []
    for rows in taken.values():
        places, tensors = table.numbered(rows)
        pieces = []
        for row, tensor in zip(rows, tensors, strict=True):
            where = row.piece.storage_start, row.piece.storage_strides
            pieces.append(Place(tensor, 0, row.assignment, row.piece.shape, *where, *where))
        launches.append((places, PieceRows(pieces, SEARCHED)))
    return launches, left
