"""Nonzero: finds the matrices whose gradient is exactly zero on this rank. A step may leave them alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from muonmesh.comm.storage import local_of
from muonmesh.layout import Piece, Plan
from muonmesh.numerics.kernels.memory import upload
from muonmesh.numerics.kernels.toolchain import DTYPES, is_usable
from muonmesh.numerics.kernels.zeros import mark_nonzero
from muonmesh.step.parameter_steps import ParameterStep, view_in_storage
from muonmesh.step.planning import Holdings

_PROBE = 64
"""Elements looked at first when asking whether a gradient is exactly zero; nearly always enough."""


def nonzero_on_host(plan: Plan, holdings: Holdings, entries: Sequence[ParameterStep | None]) -> list[int]:
    """Return for each Matrix whether this rank's gradient has a non-zero (or NaN) element in it."""
    found = [0] * len(plan.assignments)
    gradients = [None if entry is None or entry.gradient is None else local_of(entry.gradient) for entry in entries]
    probes: dict[tuple[int, torch.dtype], tuple[list[int], list[Tensor]]] = {}
    for number, (assignment, parts) in enumerate(zip(plan.assignments, holdings, strict=True)):
        gradient = gradients[assignment.parameter]
        if gradient is not None and parts:
            # Some of its first piece's first row: in each matrix as many, to look at all together.
            row, first = parts[0].shape[-1], gradient.storage_offset() + parts[0].storage_start
            count = min(row, _PROBE)
            numbers, views = probes.setdefault((count, gradient.dtype), ([], []))
            numbers.append(number)
            views.append(gradient.as_strided((count,), parts[0].storage_strides[-1:], first))
    for numbers, views in probes.values():
        for number, any_nonzero in zip(numbers, torch.stack(views).any(1).tolist(), strict=True):
            gradient = gradients[plan.assignments[number].parameter]
            found[number] = int(any_nonzero or (gradient is not None and _any_nonzero(gradient, holdings[number])))
    return found


def nonzero_on_device(
    plan: Plan, holdings: Holdings, entries: Sequence[ParameterStep | None], device: torch.device
) -> Tensor:
    """Return the same as a uint8 tensor, without waiting for the device."""
    numbers, views = list[int](), list[Tensor]()
    for number, (assignment, parts) in enumerate(zip(plan.assignments, holdings, strict=True)):
        entry = entries[assignment.parameter]
        if entry is None or entry.gradient is None:
            continue
        gradient = local_of(entry.gradient)
        for piece in parts:
            numbers.append(number)
            views.append(view_in_storage(gradient, piece))
    # Counts of int32: with uint8, 256 non-zero pieces of one matrix would be none.
    found = torch.zeros(len(plan.assignments), dtype=torch.int32, device=device)
    if views and can_mark(views):
        mark_nonzero(views, numbers, found)
    elif views:
        norms = torch.stack(torch._foreach_norm(views, float("inf")))
        if numbers == list(range(len(plan.assignments))):
            found = (norms != 0).to(torch.uint8)
        else:
            index = upload(numbers, dtype=torch.int64, device=device)
            found.index_add_(0, index, (norms != 0).to(torch.int32))
    return found.clamp_(max=1).to(torch.uint8)


def _any_nonzero(gradient: Tensor, parts: Sequence[Piece]) -> bool:
    return any(bool(view_in_storage(gradient, piece).any()) for piece in parts)


def can_mark(gradients: Sequence[Tensor]) -> bool:
    """Whether `mark_nonzero` takes these: contiguous, and of dtypes that Triton reads."""
    known = {gradient.dtype for gradient in gradients} <= set(DTYPES)
    return known and is_usable(gradients[0].device) and all(map(Tensor.is_contiguous, gradients))
