"""Clipping: one call of `Muon.clip_grad_norm_`, and what a rank does that cannot follow it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muonmesh.clip.limits import GradNorms, Limits, scale_groups
from muonmesh.clip.running import limit_matrices
from muonmesh.clip.squares import (
    ALIKE,
    ERRORS,
    FELT,
    INVARIANT,
    RANKS,
    REPLAN,
    SQUARED,
    Slots,
    add_squares,
    matrices_from,
    reduce_squares,
    stops,
    unequal,
    zeros_for,
)
from muonmesh.comm.agreement import agree_on_plan
from muonmesh.comm.exchange import Exchange
from muonmesh.comm.gradients import GradientSource
from muonmesh.errors import LayoutError, PlanError, explain_error
from muonmesh.numerics.kernels.memory import upload
from muonmesh.step.planning import Planned
from muonmesh.step.runtime import Clip


class PlanAgain(Exception):
    """Some rank must plan again, and all of them know."""


def clip_gradients(
    planned: Planned,
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[Tensor, Mapping[str, Any]],
    exchange: Exchange,
    limits: Limits,
    *,
    source: GradientSource,
    process_group: dist.ProcessGroup | None,
    waits: bool,
    slots: Slots | None = None,
) -> tuple[GradNorms, Clip]:
    """Implement `Muon.clip_grad_norm_`: measure the gradients, add up one fp64 vector over the ranks, and scale.

    With ``process_group`` the head of the vector is added up over that; with ``slots`` the matrices too.

    Squares and sums are fp64 and a coefficient is rounded once: with fp32 sums it differs between shardings.

    Raises:
        Exception: what this rank found wrong, after it has taken part in what the others wait for.
        PlanError: another rank found something wrong. Nothing has been scaled then.
        PlanAgain: a rank must plan again, or ``slots`` are those of another plan than it has now.
    """
    apart, matrices, sums = source.norms_apart, matrices_from(source), zeros_for(planned, source)
    if not _reduces(planned, limits, process_group):
        limits.check()
        return limits.told(sums, torch.zeros_like(sums[0], dtype=torch.bool), apart), Clip()
    by_matrix = limits.policy == "per_matrix"
    error = add_squares(planned, groups, source, limits.measured, sums, matrices=by_matrix)
    said = dict.fromkeys(range(matrices), 0)
    try:
        limits.check()
        said[RANKS], said[ALIKE], said[SQUARED] = 1, limits.digest, limits.digest**2
    except (TypeError, ValueError) as found:
        error = found
    if error is not None and sums.is_meta:
        raise error  # nothing here has data, so nothing can be asked of the others
    said[ERRORS] = int(error is not None)
    said[REPLAN] = unplaced = int(slots is not None and slots.planned is not planned)
    sums[:matrices] += upload(list(said.values()), dtype=sums.dtype, device=sums.device)
    reduce_squares(sums, exchange, source, process_group, matrices=by_matrix and not unplaced, slots=slots)
    if isinstance(error, ValueError) and not isinstance(error, LayoutError) and not waits:
        raise error  # an argument, which is the same everywhere
    if waits and float(sums[ERRORS]):
        agree_on_plan(exchange.group, exchange.plan, error)
        told, write = "an error on another rank of process_group=", "Read that rank's message, which names it"
        raise PlanError(explain_error("clip_grad_norm_", told, "none on any", write))
    if waits and float(sums[REPLAN]):
        raise PlanAgain
    if waits and bool(unequal(sums)):
        arguments = f"policy={limits.policy!r}, max_norm={limits.max_norm}, skip_above={limits.skip_above}"
        write = "Call it alike everywhere: replicas would drift apart"
        needed = "the same arguments on every rank"
        raise PlanError(explain_error("clip_grad_norm_", f"{arguments} here and others on other ranks", needed, write))
    skip = limits.skips(sums, apart) | stops(sums)
    running: tuple[tuple[Tensor, Tensor], ...] = ()
    if error is None:
        scale_groups(groups, source, limits.coefficients(sums, skip, apart))
        if by_matrix:
            running = limit_matrices(planned, state, source, sums[matrices:], skip, limits.max_norm)
    return limits.told(sums, skip, apart), Clip(skip, running, error)


def stand_aside_from_sums(
    planned: Planned,
    exchange: Exchange,
    error: Exception | None,
    limits: Limits,
    *,
    source: GradientSource,
    process_group: dist.ProcessGroup | None,
    waits: bool,
) -> GradNorms | None:
    """Take part in the sum that the others wait for, and tell them that this rank cannot follow the plan.

    Args:
        planned: What this rank had planned before, as the others still may have.
        exchange: The exchange of that plan.
        error: What is wrong with its groups; None: they have changed, so that all must plan again.
        limits: The arguments of the call.
        source: Where gradients are.
        process_group: Ranks of other pipeline stages to be clipped with, as in `Muon.clip_grad_norm_`.
        waits: Whether the others' hosts read what is said. If not and some have not changed, `Muon.step` ends in an
            error on all ranks.

    Returns:
        None if all ranks plan again now; else what the call returns.

    Raises:
        Exception: ``error``, unless the others do not wait and `Muon.step` has to say it.
        PlanError: another rank found an error.
    """
    matrices, sums = matrices_from(source), zeros_for(planned, source)
    if not _reduces(planned, limits, process_group):
        if error is not None:
            raise error
        return None
    place = ERRORS if error is not None else REPLAN
    sums[:matrices] += upload([int(n == place) for n in range(matrices)], dtype=sums.dtype, device=sums.device)
    reduce_squares(sums, exchange, source, process_group, matrices=False)
    if waits and float(sums[ERRORS]):
        agree_on_plan(exchange.group, exchange.plan, error)
    if waits or not float(sums[RANKS] + sums[ERRORS]):
        return None
    return limits.told(sums, torch.ones_like(sums[0], dtype=torch.bool), source.norms_apart)


def _reduces(planned: Planned, limits: Limits, process_group: dist.ProcessGroup | None) -> bool:
    """Whether there is anything to measure, or others that may have something."""
    # Others of the set, or in the process group, may have an AdamW half where this rank has none.
    if planned.plan.elementwise or process_group is not None:
        return True
    halves = {INVARIANT if parameter.scale_invariant else FELT for parameter in planned.plan.parameters}
    if any(planned.adamw):
        halves.add(FELT)
    return bool(halves & limits.measured)
