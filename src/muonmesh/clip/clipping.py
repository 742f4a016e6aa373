"""Clipping: one call of `Muon.clip_grad_norm_`, also on a rank whose parameters no longer fit the plan."""

from __future__ import annotations

from functools import partial

import torch.distributed as dist
from torch.optim import Optimizer

from muonmesh.clip.limits import GradNorms, Limits, scale_groups
from muonmesh.clip.squares import (
    AGREEMENT,
    SCALE_INVARIANT,
    SCALE_SENSITIVE,
    add_squares,
    reduce_squares,
    zeros_for,
)
from muonmesh.comm.agreement import standing
from muonmesh.comm.gather_objects import gather_objects
from muonmesh.errors import PlanError, explain_error
from muonmesh.step.planning import StepPlan
from muonmesh.step.preflight import host_waits
from muonmesh.step.runtime import UNCLIPPED, Clip, Runtime


def clip_gradients(
    planned: StepPlan,
    optimizer: Optimizer | None,
    error: Exception | None,
    limits: Limits,
    runtime: Runtime,
    process_group: dist.ProcessGroup | None,
) -> tuple[GradNorms, Clip] | None:
    """Implement `Muon.clip_grad_norm_`: measure the gradients, add up one fp64 vector over the ranks, and scale.

    Squares and sums are fp64, and a coefficient is rounded once. With fp32 sums, it would differ between shardings.

    Args:
        planned: The plan that all ranks have compared.
        optimizer: The optimizer whose gradients are measured and scaled. None if this rank's parameters no longer fit
            the plan: it then takes part in the sum for which the others wait, and reports this in the sum. If the CPUs
            of the other ranks do not wait for the result, and their parameters have not changed, `Muon.step` raises an
            error on all ranks.
        error: An error in the groups of this rank; None if there is none.
        limits: The arguments of the call.
        runtime: The runtime of the optimizer.
        process_group: Other ranks to clip with by a common norm, over which the vector is added up too; None if there
            are none.

    Returns:
        The norms, and what the next step needs of them; None if the parameters of some rank have changed, so that all
        ranks must plan again first.

    Raises:
        Exception: the error of this rank, after it has taken part in the sum for which the others wait.
        PlanError: another rank found an error. No gradient has been scaled then.
    """
    exchange, source, waits = planned.exchange, runtime.source, host_waits(runtime, planned)
    apart, follows = source.norms_apart, optimizer is not None
    sums = zeros_for(apart, planned.device)
    if not _reduces(planned, limits, process_group):
        if error is not None and not follows:
            raise error
        if not follows:
            return None
        limits.check()
        return limits.decide(sums, [], apart).norms, UNCLIPPED
    wrong: Exception | None = None  # a wrong argument, which all ranks have
    if optimizer is not None:
        error = add_squares(planned, optimizer.param_groups, source, limits.measured, sums)
        try:
            limits.check()
        except (TypeError, ValueError) as found:
            error = wrong = found
    if error is not None and sums.is_meta:
        raise error  # parameters on the meta device: no communication is possible
    arguments = limits.bits if follows and wrong is None else None
    answers = {**standing(error, follows=follows), "arguments": arguments}
    reduce = partial(reduce_squares, exchange=exchange, group=process_group)
    sums, agreed = AGREEMENT.ask(answers, sums, reduce)
    if wrong is not None and not waits:
        raise wrong
    if waits and bool(agreed.any("error")):
        gather_objects(None, error, group=exchange.group)
        problem, write = "an error on another rank of process_group=", "Read that rank's message, which names it"
        raise PlanError(explain_error("clip_grad_norm_", problem, "no error on any rank", write))
    if agreed.plan_again(waits=waits, follows=follows):
        return None
    unequal = agreed.differs().any()
    if waits and bool(unequal):
        settings = f"policy={limits.policy!r}, max_norm={limits.max_norm}, skip_above={limits.skip_above}"
        write = "Call it with the same arguments everywhere, or replicas would drift apart"
        other, needed = f"{settings} here and other arguments on other ranks", "the same arguments on every rank"
        raise PlanError(explain_error("clip_grad_norm_", other, needed, write))
    stops = agreed.any("error", "replan") | unequal
    decision = limits.decide(sums, [] if optimizer is None else optimizer.param_groups, apart, stops)
    if optimizer is not None and error is None:
        scale_groups(optimizer.param_groups, source, decision.coefficients)
    return decision.norms, Clip(decision.norms.skipped, decision.means, error)


def _reduces(planned: StepPlan, limits: Limits, process_group: dist.ProcessGroup | None) -> bool:
    """Return whether this rank or another rank may have gradients to measure."""
    # Other ranks of the set, or of the process group, may have AdamW's parameters even if this rank has none.
    if planned.plan.elementwise or process_group is not None:
        return True
    kinds = {SCALE_INVARIANT if parameter.scale_invariant else SCALE_SENSITIVE for parameter in planned.plan.parameters}
    if any(planned.adamw):
        kinds.add(SCALE_SENSITIVE)
    return bool(kinds & limits.measured)
