"""Clipping: one call of `Muon.clip_grad_norm_`, also on a rank whose parameters no longer fit the plan."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from muonmesh.clip.limits import GradNorms, Limits, scale_groups
from muonmesh.clip.norm_means import counted, means_of
from muonmesh.clip.squares import (
    ALIKE,
    ERRORS,
    FELT,
    INVARIANT,
    RANKS,
    REPLAN,
    SQUARED,
    add_squares,
    norms_of,
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
    """Raised on all ranks if one of them must make a new plan."""


def clip_gradients(
    connected: Connected,
    here: Optimizer | None,
    error: Exception | None,
    limits: Limits,
    runtime: Runtime,
    process_group: dist.ProcessGroup | None,
) -> tuple[GradNorms, Clip]:
    """Implement `Muon.clip_grad_norm_`: measure the gradients, add up one fp64 vector over the ranks, and scale.

    Squares and sums are fp64, and a coefficient is rounded once. With fp32 sums, it would differ between shardings.

    Args:
        connected: The plan on which all ranks have agreed, with its exchange.
        here: The optimizer whose gradients are measured and scaled. None if this rank's parameters no longer fit the
            plan: it then takes part in the sum for which the others wait, and reports this in the sum. If the CPUs of
            the other ranks do not wait for the result, and their parameters have not changed, `Muon.step` raises an
            error on all ranks.
        error: An error in the groups of this rank; None if there is none.
        limits: The arguments of the call.
        runtime: The runtime of the optimizer.
        process_group: Other ranks to clip with by a common norm, over which the vector is added up too; None if there
            are none.

    Raises:
        Exception: the error of this rank, after it has taken part in the sum for which the others wait.
        PlanError: another rank found an error. No gradient has been scaled then.
        PlanAgain: a rank must make a new plan.
    """
    (planned, exchange), source, waits = connected, runtime.source, runtime.driver.host_waits(connected.planned.device)
    apart, sums = source.norms_apart, zeros_for(source, planned.device)
    if not _reduces(planned, limits, process_group):
        if here is None:
            raise error or PlanAgain
        limits.check()
        return limits.told(sums, torch.zeros_like(sums[0], dtype=torch.bool), apart), Clip()
    said = dict.fromkeys(range(len(sums)), 0)
    wrong: Exception | None = None  # a wrong argument, which all ranks have
    if here is not None:
        error = add_squares(planned, here.param_groups, source, limits.measured, sums)
        try:
            limits.check()
            said[RANKS], said[ALIKE], said[SQUARED] = 1, limits.digest, limits.digest**2
        except (TypeError, ValueError) as found:
            error = wrong = found
    if error is not None and sums.is_meta:
        raise error  # parameters on the meta device: no communication is possible
    said[ERRORS], said[REPLAN] = int(error is not None), int(here is None and error is None)
    sums += upload(list(said.values()), dtype=sums.dtype, device=sums.device)
    reduce_squares(sums, exchange, process_group)
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
    means = fresh = None
    if limits.multiple is not None:
        means = means_of([] if here is None else here.param_groups, sums.device)
        fresh = torch.where(stops(sums), means, counted(means, torch.stack([*norms_of(sums).values()])))
    skip = limits.skips(sums, apart, means) | stops(sums)
    if here is not None and error is None:
        scale_groups(here.param_groups, source, limits.coefficients(sums, skip, apart))
    return limits.told(sums, skip, apart), Clip(skip, fresh, error)


def _reduces(planned: Planned, limits: Limits, process_group: dist.ProcessGroup | None) -> bool:
    """Return whether this rank or another rank may have gradients to measure."""
    # Other ranks of the set, or of the process group, may have AdamW's parameters even if this rank has none.
    if planned.plan.elementwise or process_group is not None:
        return True
    halves = {INVARIANT if parameter.scale_invariant else FELT for parameter in planned.plan.parameters}
    if any(planned.adamw):
        halves.add(FELT)
    return bool(halves & limits.measured)
