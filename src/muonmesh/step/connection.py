"""Connection: makes the plan for the current param groups, and the exchange that all ranks of the plan share.

`plan` reads the groups and plans, without communication. `connect` also lets the ranks that share parameters compare
their plans, once for these parameters. `outdated` says whether the ranks must do so again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from muonmesh.comm.exchange import Exchange
from muonmesh.comm.gather_objects import gather_objects, gather_objects_by_rank, send_objects_by
from muonmesh.comm.process_groups import group_of
from muonmesh.comm.ranks import mesh_groups
from muonmesh.comm.rendezvous import announcing_failure, connected, withdraw_failure
from muonmesh.comm.same_plan import View, insist
from muonmesh.comm.storage import this_rank, world_size
from muonmesh.comm.to_owners import ToOwners
from muonmesh.comm.undeclared_replicas import Claim, Copies, Gradients, Sums, added, find_copies, insist_on_averages
from muonmesh.comm.wrappers import average_for_wrappers, group_that_averages, refuse_join, wrappers_of
from muonmesh.errors import LayoutError, about, warn
from muonmesh.layout import Budget, Parameter, Plan, make_plan
from muonmesh.numerics.kernels import KernelName, auto_takes
from muonmesh.numerics.rules import rule_of
from muonmesh.settings.reading import StepSettings, plan_terms, read_groups
from muonmesh.step.batches import Batches
from muonmesh.step.members import (
    OptimizedParameter,
    check_members,
    group_for,
    likely_sets,
    members_of,
    replicas_of,
    unknown_matrix,
)
from muonmesh.step.parameters import setup_of
from muonmesh.step.planning import Planner, StepPlan, plan_members, widened
from muonmesh.step.replicas import said_of_copies
from muonmesh.step.runtime import Runtime
from muonmesh.step.untrained import warn_of_rounding

Groups = Sequence[dict[str, Any]]
"""An optimizer's param groups."""


class Signature(NamedTuple):
    """What must stay the same for a plan to stay valid.

    Attributes:
        setup: See `setup_of`.
        terms: For each param group what a plan depends on (`muonmesh.settings.reading.plan_terms`).
        tensors: The form of each parameter.
        groups: The process group that the source of gradients knows for each parameter.
    """

    setup: object
    terms: object
    tensors: object
    groups: object

    @staticmethod
    def of(groups: Groups, runtime: Runtime, terms: object = None) -> Signature:
        """Return the signature of param groups; ``terms`` are theirs if they have been read."""
        tensors = [tensor for group in groups for tensor in group["params"]]
        terms = [plan_terms(group, rule_of(group)) for group in groups] if terms is None else terms
        shared = [runtime.source.group(tensor) for tensor in tensors]
        return Signature(setup_of(runtime), terms, [*map(_form_of, tensors)], shared)


def _form_of(tensor: Tensor) -> tuple[object, ...]:
    form = tensor.shape, tensor.dtype, tensor.device
    return (*form, id(tensor.device_mesh), tuple(tensor.placements)) if isinstance(tensor, DTensor) else form


class Facts(NamedTuple):
    """What one rank tells the others of its connected set before they compare plans.

    Attributes:
        claims: Its parameters of which other ranks may hold copies.
        products: The ``kernels`` that its user set, and the compiled products that "auto" stands for there.
        machine: The number of ranks of a machine that its launcher reports.
        averages: Sums of the gradients of replicas (`added`).
        shown: What its first training forward showed (`Watch.shown`).
    """

    claims: Sequence[Claim]
    products: tuple[KernelName, object]
    machine: int
    averages: Mapping[int, Sums]
    shown: str | None


def plan(groups: Groups, runtime: Runtime) -> StepPlan:
    """Return the plan of this rank; make a new plan if the groups have changed. No communication.

    Raises:
        LayoutError, ValueError, TypeError: no plan can be made.
    """
    planned, _, error = _read(groups, runtime)
    if error is not None:  # that of a group in which something is missing names only a key; `read_groups` says more
        raise read_groups(groups, runtime.replaced).error or error
    assert planned is not None
    return planned


def placed_members(optimizer: Any) -> list[OptimizedParameter]:
    """Return all parameters that a `Muon` steps on this rank, with their layouts. No communication.

    Raises:
        LayoutError, ValueError, TypeError: no plan can be made.
    """
    return plan(optimizer.param_groups, optimizer._runtime).members


def connect(groups: Groups, runtime: Runtime, *, gradients: bool = True) -> StepPlan:
    """Return the plan with its exchange; if it has none yet, compare plans with the ranks that share parameters.

    A rank that cannot make a plan still takes part in the comparison, so that every rank raises an error.

    Args:
        groups: The param groups.
        runtime: The runtime state of the optimizer.
        gradients: Whether to compare gradients of copies too. A checkpoint may be saved before they are averaged.

    Raises:
        LayoutError, ValueError, TypeError: no plan can be made.
        PlanError: another rank cannot make a plan, has made a different plan, or does not take part.
    """
    planned, sets, error = _read(groups, runtime)
    if planned is not None and planned.connected:
        return planned
    if world_size() > 1 and error is None:
        error = _look_for_wrappers(groups, runtime)
    alone = runtime.process_group == "local"
    if error is not None and not any(len(ranks) > 1 for ranks in sets):
        # Other ranks may know that they share parameters with this rank.
        with announcing_failure(alone=alone, at_first_step=True):
            raise error
    withdraw_failure()
    ranks = connected(sets, alone=alone)
    group = group_of(ranks, _groups_known(planned, runtime))
    facts: Facts | None = None
    sums: Gradients = {}
    if planned is not None:
        send_objects_by(planned.device)
        try:
            claims, sums = said_of_copies(planned, ranks, runtime.source if gradients else None)
            bf16 = planned.device.type == "cpu" and runtime.precision.compute == torch.bfloat16
            products = runtime.requested.kernels, auto_takes() if bf16 else None
            shown = None if runtime.watch is None else runtime.watch.shown
            facts = Facts(claims, products, runtime.ranks.machine, added(sums), shown)
        except Exception as wrong:  # such as a lack of memory: the other ranks wait for this rank
            error = error or wrong
    facts_of = cast(dict[int, Facts], gather_objects_by_rank(facts, error, group=group))
    forwards = {rank_facts.shown for rank_facts in facts_of.values()}
    runtime.ranks.warns = len(forwards) > 1 or None in forwards or this_rank() == min(facts_of)
    copies = find_copies({rank: rank_facts.claims for rank, rank_facts in facts_of.items()})
    if _take_what_all_have(runtime, facts_of) or copies:
        planned, _, error = _read(groups, runtime, copies)
    planned = runtime.planned = _plan_of_all(planned, error, ranks, group, _planner(runtime))
    # Only now: tensors of other shapes have other gradients, and the difference of the plans says why.
    averages = {rank: rank_facts.averages for rank, rank_facts in facts_of.items()}
    insist_on_averages(averages, lambda: gather_objects_by_rank(sums, group=group))
    owned = [number for number, assignment in enumerate(planned.plan.assignments) if assignment.owner == planned.rank]
    orthogonalizers = {number: planned.orthogonalizer(number) for number in owned}
    planned.exchange = Exchange(
        planned.plan,
        group=group,
        dtype=runtime.precision.wire,
        factored_dtype=runtime.precision.carried,
        device=planned.device,
        batching=Batches(planned.plan, planned.device, orthogonalizers, runtime.precision.on_host),
    )
    planned.connected, runtime.connected = True, planned
    runtime.ranks.keepers = planned.plan.keepers
    runtime.source.bind(planned.replicated, group_for(runtime.holders), planned.plan.budget.gradient_bytes)
    runtime.source.complete(planned.exchange.communicator.steps)
    dtypes = "rounding", frozenset(member.tensor.dtype for member in planned.members)
    if dtypes not in runtime.warned:
        runtime.warned.add(dtypes)
        warn_of_rounding(planned, groups, runtime.precision, runtime.tell)
    return planned


def _look_for_wrappers(groups: Groups, runtime: Runtime) -> LayoutError | ValueError | None:
    """Note the DistributedDataParallels that hold parameters, and average in their place if the source does.

    Returns:
        The error, if the source cannot.
    """
    trained = [tensor for param_group in groups for tensor in param_group["params"]]
    runtime.ranks.wrappers = wrappers_of(trained)
    refuse_join(runtime.ranks.wrappers)
    if isinstance(runtime.source, ToOwners) and runtime.process_group != "local":
        try:
            average_for_wrappers(runtime.source, runtime.ranks.wrappers, trained)
        except (LayoutError, ValueError) as error:
            return error
    return None


def _take_what_all_have(runtime: Runtime, facts_of: Mapping[int, Facts]) -> bool:
    """Make all ranks use the same kernels and the same number of ranks of a machine; return whether this rank changes.

    If ``kernels="auto"`` on all ranks stands for different compiled products, all ranks use torch's products. If the
    launchers report different numbers of ranks of a machine, the number becomes 0 (unknown).

    Args:
        runtime: The runtime state of the optimizer; its ``precision`` and ``ranks.machine`` are written.
        facts_of: The facts of each rank of the connected set.
    """
    machine, (first, own_facts), *_ = runtime.ranks.machine, *facts_of.items()
    runtime.ranks.machine = machine if len({rank_facts.machine for rank_facts in facts_of.values()}) == 1 else 0
    other = next((rank for rank, rank_facts in facts_of.items() if rank_facts.products != own_facts.products), None)
    free = all(rank_facts.products[0] == "auto" for rank_facts in facts_of.values())
    kernels: KernelName = "torch" if free and other is not None else runtime.requested.kernels
    if kernels == runtime.precision.kernels:
        return runtime.ranks.machine != machine
    runtime.precision = replace(runtime.precision, kernels=kernels)
    if kernels != runtime.requested.kernels and this_rank() == first:
        text = f"The ranks {first} and {other} have different compiled products, so all ranks use torch's products. "
        text += 'Install the same wheel on machines with the same kind of CPU, or write kernels="torch"'
        warn(about('kernels="auto"', text))
    return True


def _plan_of_all(
    planned: StepPlan | None,
    error: Exception | None,
    ranks: tuple[int, ...],
    group: dist.ProcessGroup | None,
    planner: Planner,
) -> StepPlan:
    """Return the plan of all ranks of a connected set, after they have compared theirs; ``error`` is of this rank.

    Raises:
        Exception: ``error``, on its rank; a PlanError on the others.
        PlanError: on every rank, if plans of the same parameters differ.
    """
    error = error or unknown_matrix([] if planned is None else planned.members)
    plans = gather_objects(None if planned is None else planned.plan.digest, error, group=group)
    assert planned is not None
    if len(set(plans)) > 1 or ranks != planned.plan.ranks:  # other ranks hold other parameters: plan all
        views = gather_objects(View(planned.plan.parameters, planned.plan.elementwise), group=group)
        planned = widened(planned, views, ranks, planner)
        insist(group, planned.plan)
    return planned


def _groups_known(planned: StepPlan | None, runtime: Runtime) -> list[dist.ProcessGroup]:
    """Return process groups that may have the ranks of a connected set: of the user, the source and meshes."""
    members = [] if planned is None else planned.members
    candidates = dict.fromkeys([runtime.holders, *(runtime.source.group(member.tensor) for member in members)])
    meshes = mesh_groups([member.storage for member in members])
    return [group for group in candidates if isinstance(group, dist.ProcessGroup)] + meshes


def outdated(groups: Groups, runtime: Runtime, settings: StepSettings) -> StepPlan | None:
    """Return the plan of the last step if this rank can no longer follow it; None if it can, or if there is no plan.

    The other ranks may not know yet that this rank has changed. The source brings the gradients of this step, for which
    all its ranks call this.

    Args:
        groups: The current param groups.
        runtime: The runtime state of the optimizer.
        settings: The settings read from the groups. If they have an error, this rank cannot follow the plan.

    Raises:
        LayoutError: a wrapper of the parameters is used with torch's Join (`refuse_join`).
    """
    refuse_join(runtime.ranks.wrappers)
    before = runtime.connected
    if before is None:
        return None
    same = settings.error is None and before.signature == Signature.of(groups, runtime, settings.terms)
    runtime.source.complete(before.exchange.communicator.steps)
    return None if same else before


def forget(runtime: Runtime) -> None:
    """Forget the plan. All ranks that share the plan call this together."""
    runtime.planned = runtime.connected = None


def _read(
    groups: Groups, runtime: Runtime, copies: Copies | None = None
) -> tuple[StepPlan | None, list[tuple[int, ...]], Exception | None]:
    """Return the plan, the sets of ranks that share a parameter, and the first error; no plan if there is an error.

    A new plan is made if the groups have changed, or if the ranks have just found copies of parameters.
    """
    replicas_of(runtime.process_group)  # raises if the process group was lost in pickling
    try:
        for candidate in (runtime.planned, runtime.connected):
            if copies is None and candidate is not None and candidate.signature == Signature.of(groups, runtime):
                runtime.planned = candidate
                return candidate, candidate.sets, None
        for group in groups:
            check_members(group, groups, runtime.layouts, runtime.source, runtime.precision.master)
        runtime.ranks.group = _group_found(groups, runtime)
        signature = Signature.of(groups, runtime)  # with the names as they are now
    except Exception as wrong:  # this rank still meets the other ranks, which wait for it
        if runtime.connected is not None:
            return None, runtime.connected.sets, wrong
        return None, likely_sets(groups, runtime.holders, runtime.layouts, runtime.source), wrong
    copies, shard_state = copies or {}, runtime.requested.shard_state
    members, sets, error = members_of(
        groups, runtime.holders, runtime.layouts, runtime.source, copies, shard_state=shard_state
    )
    if error is not None:
        return None, sets, error
    try:
        planned = plan_members(groups, members, signature, runtime.precision, _planner(runtime))
        runtime.planned = planned
    except Exception as found:  # whatever a rule's own methods raise
        return None, sets, found
    return runtime.planned, runtime.planned.sets, None


def _planner(runtime: Runtime) -> Planner:
    def planner(parameters: Sequence[Parameter], *, host: bool, **others: Any) -> Plan:
        itemsize = runtime.precision.compute.itemsize
        budget = Budget.of(parameters, runtime.requested.memory_budget_mb, itemsize=itemsize, host=host)
        return make_plan(
            parameters, fixed_owners=runtime.ranks.keepers, machine=runtime.ranks.machine, budget=budget, **others
        )

    return planner


def _group_found(groups: Groups, runtime: Runtime) -> dist.ProcessGroup | None:
    """Return the process group of the DDP wrapper around the plain tensors, if ``process_group`` is "auto", else None.

    Tensors that ``layouts`` declares, or whose group the gradient source knows, need no wrapper.
    """
    if runtime.process_group != "auto" or world_size() == 1:
        return None
    named = {
        name: tensor
        for group in groups
        for name, tensor in zip(group["param_names"], group["params"], strict=True)
        if name not in runtime.layouts and runtime.source.group(tensor) is None
    }
    return group_that_averages(named)
