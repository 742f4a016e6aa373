"""Squares: the vector of squared gradient norms that all ranks add up when gradients are clipped."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muonmesh.comm.agreement import STANDING, Agreement, Field
from muonmesh.comm.exchange import Exchange
from muonmesh.comm.gradients import GradientSource, whole_gradient
from muonmesh.errors import LayoutError, explain_error
from muonmesh.numerics.dtypes import real_of
from muonmesh.numerics.kernels.pinned_copies import upload
from muonmesh.numerics.normalize import sums_of_squares
from muonmesh.numerics.rules import RULES
from muonmesh.step.planning import StepPlan

SCALE_INVARIANT, SCALE_SENSITIVE = range(2)
"""Kinds of gradients, as places in the vector of squares, which is fp64. Both come again for each of the source's
`norms_apart`.

- SCALE_INVARIANT: gradients of groups whose rule is `scale_invariant`; their norm is reported as "muon".
- SCALE_SENSITIVE: all other gradients: AdamW's, and those of rules for matrices that depend on the scale of gradients;
  their norm is reported as "adamw".
"""

AGREEMENT = Agreement(*STANDING, Field("arguments", 64, "equal"))
"""What ranks ask each other together with the squares. The questions are the same for every policy, so ranks with
different policies can still add their vectors up, and raise."""


def scale_kind_of(group: Mapping[str, Any]) -> int:
    """Return the kind of a group's gradients: SCALE_INVARIANT if its rule ignores their scale, else SCALE_SENSITIVE."""
    return SCALE_INVARIANT if RULES[group["algorithm"]].scale_invariant else SCALE_SENSITIVE


def zeros_for(apart: Sequence[str], device: torch.device) -> Tensor:
    """Return a vector of zeros, fp64, for the usual norms and those of the names ``apart``."""
    return torch.zeros(2 + 2 * len(apart), dtype=torch.float64, device=device)


def place_of(group: Mapping[str, Any], name: str, parameter: Tensor, source: GradientSource) -> int:
    """Return the place in the vector of a gradient: that of its group, among the usual norms or those measured apart.

    Raises:
        LayoutError: the source names a norm that its ``norms_apart`` does not have.
    """
    apart = source.norm_apart(parameter)
    if apart is not None and apart not in source.norms_apart:
        problem = f"norm_apart() = {apart!r}"
        needed = f"one of the names in norms_apart: {', '.join(source.norms_apart) or 'it has none'}"
        write = "Correct norm_apart() of the GradientSource, or its norms_apart"
        raise LayoutError(explain_error(name, problem, needed, write))
    return scale_kind_of(group) + (0 if apart is None else 2 + 2 * list(source.norms_apart).index(apart))


def norms_of(sums: Tensor, number: int = 0) -> dict[str, Tensor]:
    """Return the norms "total", "muon" and "adamw" of the vector, 0-d fp64 each.

    ``number`` selects the usual norms (0), or norms that are measured apart (1 + index in ``norms_apart``).
    """
    muon, adamw = sums[SCALE_INVARIANT + 2 * number], sums[SCALE_SENSITIVE + 2 * number]
    return {"total": (muon + adamw).sqrt(), "muon": muon.sqrt(), "adamw": adamw.sqrt()}


def add_squares(
    planned: StepPlan,
    groups: Sequence[Mapping[str, Any]],
    source: GradientSource,
    measured: set[int],
    sums: Tensor,
) -> Exception | None:
    """Add the squared norms of this rank's gradients to the sums.

    If n ranks store the same elements, each rank adds 1/n of their squares, so that every element counts once.

    Args:
        planned: The plan whose gradients are measured.
        groups: The param groups.
        source: The source of the gradients.
        measured: The kinds of gradients to measure, as places in the sums.
        sums: The fp64 vector to add to; see `SCALE_SENSITIVE` for its places.

    Returns:
        The first error in a gradient, or None. All other gradients are still read, since ranks may have to reduce a
        partial gradient together.
    """
    error: Exception | None = None
    measured_parts = list[tuple[int, Tensor, int]]()  # place in the sums, elements, ranks that store them
    for member in itertools.chain(planned.muon, *planned.adamw):
        if member is None or scale_kind_of(groups[member.group]) not in measured or not source.counted(member.tensor):
            continue
        try:
            gradient = whole_gradient(member.name, member.tensor, source)
            position = place_of(groups[member.group], member.name, member.tensor, source)
        except Exception as wrong:  # whatever a source raises: the other ranks wait for this rank
            error = error or wrong
            continue
        if gradient is None:
            continue
        storage = member.gradient_storage
        measured_parts += [(position, part, storage.copies) for part in map(real_of, storage.parts(gradient))]
    if measured_parts:
        places, parts, copies = zip(*measured_parts, strict=True)
        index = upload(places, dtype=torch.int64, device=sums.device)
        stored_by = upload(copies, dtype=torch.float64, device=sums.device)
        sums.index_add_(0, index, sums_of_squares(parts) / stored_by)
    return error


def reduce_squares(vector: Tensor, exchange: Exchange, group: dist.ProcessGroup | None) -> Tensor:
    """Add a vector up over the ranks, in place: over the connected set of ranks, and over other sets in a group.

    If the group has all ranks of the set, one reduction over the group does both. Else the set adds up first, and each
    of its ranks in the group contributes an equal part of the result.

    Args:
        vector: The squares, and what this rank says.
        exchange: The exchange of the connected set.
        group: The process group with other sets to clip with; None if there are none.
    """
    ranks = [] if group is None else dist.get_process_group_ranks(group)
    count = sum(rank in exchange.plan.ranks for rank in ranks)
    if count == len(ranks):
        return exchange.reduce_sums(vector)
    if count < len(exchange.plan.ranks):
        exchange.reduce_sums(vector)
        vector /= count
    return reduce_beyond(vector, group)


def reduce_beyond(vector: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Add a vector up over a process group, in place, without an exchange: a rank that has none takes part so."""
    dist.all_reduce(vector, group=group)
    return vector
