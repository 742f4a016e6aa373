"""Comparison: what the ranks of a connected set tell each other once for a plan, so that all have the same one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from muonmesh.comm.copies import Claim, Gradients, Sums, added
from muonmesh.comm.same_plan import View, insist
from muonmesh.comm.storage import this_rank
from muonmesh.comm.telling import tell_all
from muonmesh.errors import about, warn
from muonmesh.numerics.kernels import KernelName, auto_takes
from muonmesh.step.members import unknown_matrix
from muonmesh.step.planning import Planned, Planner, widened
from muonmesh.step.replicas import claims_of
from muonmesh.step.runtime import Runtime


class Facts(NamedTuple):
    """What one rank tells the others of its connected set before they compare plans.

    Attributes:
        claims: Its parameters of which other ranks may hold copies.
        products: The ``kernels`` that its user set, and the compiled products that "auto" stands for there.
        machine: The number of ranks of a machine that its launcher reports.
        averages: Sums of the gradients of replicas (`added`).
    """

    claims: Sequence[Claim]
    products: tuple[KernelName, object]
    machine: int
    averages: Mapping[int, Sums]


def facts_of(planned: Planned, ranks: Sequence[int], runtime: Runtime, sums: Gradients, *, gradients: bool) -> Facts:
    """Return what this rank tells the others when they compare plans; ``sums`` are `gradients_of_replicas`."""
    bf16 = planned.device.type == "cpu" and runtime.precision.compute == torch.bfloat16
    return Facts(
        claims_of(planned, ranks, runtime.source if gradients else None),
        (runtime.asked.kernels, auto_takes() if bf16 else None),
        runtime.ranks.machine,
        added(sums),
    )


def take_what_all_have(runtime: Runtime, told: Mapping[int, Facts]) -> bool:
    """Make all ranks use the same kernels and the same number of ranks of a machine; return whether this rank changes.

    If ``kernels="auto"`` on all ranks stands for different compiled products, all ranks use torch's products. If the
    launchers report different numbers of ranks of a machine, the number becomes 0 (unknown).

    Args:
        runtime: The runtime state of the optimizer; its ``precision`` and ``ranks.machine`` are written.
        told: What each rank of the connected set has told.
    """
    machine, (first, mine), *_ = runtime.ranks.machine, *told.items()
    runtime.ranks.machine = machine if len({each.machine for each in told.values()}) == 1 else 0
    other = next((rank for rank, each in told.items() if each.products != mine.products), None)
    free = all(each.products[0] == "auto" for each in told.values())
    kernels: KernelName = "torch" if free and other is not None else runtime.asked.kernels
    if kernels == runtime.precision.kernels:
        return runtime.ranks.machine != machine
    runtime.precision = replace(runtime.precision, kernels=kernels)
    if kernels != runtime.asked.kernels and this_rank() == first:
        what = f"The ranks {first} and {other} have different compiled products, so all ranks use torch's products. "
        what += 'Install the same wheel on machines with the same kind of CPU, or write kernels="torch"'
        warn(about('kernels="auto"', what))
    return True


def plan_of_all(
    planned: Planned | None,
    error: Exception | None,
    ranks: tuple[int, ...],
    group: dist.ProcessGroup | None,
    planner: Planner,
) -> Planned:
    """Return the plan of all ranks of a connected set, after they have compared theirs; ``error`` is of this rank.

    Raises:
        Exception: ``error``, on its rank; a PlanError on the others.
        PlanError: on every rank, if plans of the same parameters differ.
    """
    error = error or unknown_matrix([] if planned is None else planned.members)
    plans = tell_all(None if planned is None else planned.plan.digest, error, group=group)
    assert planned is not None
    if len(set(plans)) > 1 or ranks != planned.plan.ranks:  # other ranks hold other parameters: plan all
        views = tell_all(View(planned.plan.parameters, planned.plan.elementwise), group=group)
        planned = widened(planned, views, ranks, planner)
        insist(group, planned.plan)
    return planned
