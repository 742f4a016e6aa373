"""Clipping: one call of `Muon.clip_grad_norm_`, also on a rank that cannot follow the plan."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

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
from muonmesh.comm.telling import tell_all
from muonmesh.errors import PlanError, explain_error
from muonmesh.numerics.kernels.memory import upload
from muonmesh.step.planning import Connected, Planned
from muonmesh.step.runtime import Clip, Runtime


class PlanAgain(Exception):
    """Some rank must plan again, and all of them know."""


def clip_gradients(
    connected: Connected,
    here: Optimizer | None,
    error: Exception | None,
    limits: Limits,
    runtime: Runtime,
    process_group: dist.ProcessGroup | None,
    slots: Slots | None = None,
) -> tuple[GradNorms, Clip]:
    """Implement `Muon.clip_grad_norm_`: measure the gradients, add up one fp64 vector over the ranks, and scale.

    Squares and sums are fp64 and a coefficient is rounded once: with fp32 sums it differs between shardings.

    Args:
        connected: The plan that all ranks know of, with its exchange.
        here: The optimizer, whose gradients are measured and scaled. None if this rank has other parameters than
            planned: it takes part in the sum that the others wait for, and tells them. If their hosts do not wait and
            some of them have not changed, `Muon.step` ends in an error on all ranks.
        error: What is wrong with the groups.
        limits: The arguments of the call.
        runtime: Of the optimizer.
        process_group: Other ranks to be clipped with, over which the head of the vector is added up too.
        slots: The places of this set's matrices in that sum, if their squares are added up there too.

    Raises:
        Exception: what this rank found wrong, after it has taken part in what the others wait for.
        PlanError: another rank found something wrong. Nothing has been scaled then.
        PlanAgain: a rank must plan again, or ``slots`` are those of another plan than it has now.
    """
    (planned, exchange), source, waits = connected, runtime.source, runtime.host_waits(connected.planned)
    apart, matrices, sums = source.norms_apart, matrices_from(source), zeros_for(planned, source)
    if not _reduces(planned, limits, process_group):
        if here is None:
            raise error or PlanAgain
        limits.check()
        return limits.told(sums, torch.zeros_like(sums[0], dtype=torch.bool), apart), Clip()
    by_matrix, said = limits.policy == "per_matrix", dict.fromkeys(range(matrices), 0)
    wrong: Exception | None = None  # an argument, which is the same everywhere
    if here is not None:
        error = add_squares(planned, here.param_groups, source, limits.measured, sums, matrices=by_matrix)
        try:
            limits.check()
            said[RANKS], said[ALIKE], said[SQUARED] = 1, limits.digest, limits.digest**2
        except (TypeError, ValueError) as found:
            error = wrong = found
    if error is not None and sums.is_meta:
        raise error  # nothing here has data, so nothing can be asked of the others
    unplaced = here is None or (slots is not None and slots.planned is not planned)
    said[ERRORS], said[REPLAN] = int(error is not None), int(unplaced and error is None)
    sums[:matrices] += upload(list(said.values()), dtype=sums.dtype, device=sums.device)
    reduce_squares(sums, exchange, source, process_group, matrices=by_matrix and not unplaced, slots=slots)
    if wrong is not None and not waits:
        raise wrong
    if waits and float(sums[ERRORS]):
        tell_all(None, error, group=exchange.group)
        told, write = "an error on another rank of process_group=", "Read that rank's message, which names it"
        raise PlanError(explain_error("clip_grad_norm_", told, "no error on any rank", write))
    if float(sums[REPLAN]) if waits else here is None and not float(sums[RANKS] + sums[ERRORS]):
        raise PlanAgain
    if waits and bool(unequal(sums)):
        arguments = f"policy={limits.policy!r}, max_norm={limits.max_norm}, skip_above={limits.skip_above}"
        write = "Call it with the same arguments everywhere, or replicas would drift apart"
        other, needed = f"{arguments} here and other arguments on other ranks", "the same arguments on every rank"
        raise PlanError(explain_error("clip_grad_norm_", other, needed, write))
    skip = limits.skips(sums, apart) | stops(sums)
    running: tuple[tuple[Tensor, Tensor], ...] = ()
    if here is not None and error is None:
        scale_groups(here.param_groups, source, limits.coefficients(sums, skip, apart))
        if by_matrix:
            running = limit_matrices(planned, here.state, source, sums[matrices:], skip, limits.max_norm)
    return limits.told(sums, skip, apart), Clip(skip, running, error)


def _reduces(planned: Planned, limits: Limits, process_group: dist.ProcessGroup | None) -> bool:
    """Whether there is anything to measure, or others that may have something."""
    # Others of the set, or in the process group, may have an AdamW half where this rank has none.
    if planned.plan.elementwise or process_group is not None:
        return True
    halves = {INVARIANT if parameter.scale_invariant else FELT for parameter in planned.plan.parameters}
    if any(planned.adamw):
        halves.add(FELT)
    return bool(halves & limits.measured)
