"""Connection: makes the plan for the current param groups, and the exchange that all ranks of the plan share.

`plan` reads the groups and plans, without communication. `connect` also lets the ranks that share parameters compare
their plans, once for these parameters. `outdated` says whether the ranks must do so again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from muonmesh.comm.copies import Copies, Gradients, find_copies, insist_on_averages
from muonmesh.comm.exchange import Exchange
from muonmesh.comm.meeting import connected
from muonmesh.comm.placing import refuse_flattened, shape_if_known
from muonmesh.comm.process_groups import group_of
from muonmesh.comm.ranks import mesh_groups
from muonmesh.comm.storage import world_size
from muonmesh.comm.telling import tell_by_rank
from muonmesh.comm.wrappers import group_that_averages, refuse_join, wrappers_of
from muonmesh.errors import explain_error
from muonmesh.layout import Budget, Parameter, Plan, make_plan, split_matrices
from muonmesh.names import canonical_name
from muonmesh.numerics.dtypes import COMPLEX_DTYPES, HELD_DTYPES, NEEDED_HELD
from muonmesh.numerics.rules import is_matrix_rule, rule_of
from muonmesh.settings.checks import check_group, check_structure
from muonmesh.settings.reading import SettingsFound, plan_terms, read_groups
from muonmesh.step.comparison import Facts, facts_of, plan_of_all, take_what_all_have
from muonmesh.step.members import (
    OptimizedParameter,
    group_for,
    likely_sets,
    members_of,
    named_alike,
    replicas_of,
)
from muonmesh.step.planning import Batches, Connected, Planned, Planner, plan_members
from muonmesh.step.replicas import gradients_of_replicas
from muonmesh.step.runtime import Runtime
from muonmesh.step.steady import Signature
from muonmesh.step.untrained import warn_of_rounding

Groups = Sequence[dict[str, Any]]
"""An optimizer's param groups."""


def plan(groups: Groups, runtime: Runtime) -> Planned:
    """Return the plan of this rank; make a new plan if the groups have changed. No communication.

    Raises:
        LayoutError, ValueError, TypeError: no plan can be made.
    """
    for group in groups:
        check_structure(f"group {group.get('name')!r}", group)
    planned, _, error = _read(groups, runtime)
    if error is not None:  # the error of a missing setting names only its key; that of `read_groups` says more
        raise read_groups(groups, runtime.replaced).error or error
    assert planned is not None
    return planned


def placed_members(optimizer: Any) -> list[OptimizedParameter]:
    """Return all parameters that a `Muon` steps on this rank, with their layouts. No communication.

    Raises:
        LayoutError, ValueError, TypeError: no plan can be made.
    """
    return plan(optimizer.param_groups, optimizer._runtime).members


def connect(groups: Groups, runtime: Runtime, *, gradients: bool = True) -> Connected:
    """Return the plan with its exchange; if there is none yet, compare plans with the ranks that share parameters.

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
    if planned is not None and planned.exchange is not None:
        return Connected(planned, planned.exchange)
    if world_size() > 1 and error is None:
        runtime.ranks.wrappers = wrappers_of([tensor for each in groups for tensor in each["params"]])
        refuse_join(runtime.ranks.wrappers)
    ranks = connected(sets, alone=runtime.process_group == "local")
    group = group_of(ranks, _groups_known(planned, runtime))
    facts: Facts | None = None
    sums: Gradients = {}
    if planned is not None:
        try:
            sums = gradients_of_replicas(planned, ranks, runtime.source) if gradients else {}
            facts = facts_of(planned, ranks, runtime, sums, gradients=gradients)
        except Exception as wrong:  # such as a lack of memory: the other ranks wait for this rank
            error = error or wrong
    told = cast(dict[int, Facts], tell_by_rank(facts, error, group=group))
    copies = find_copies({rank: each.claims for rank, each in told.items()})
    if take_what_all_have(runtime, told) or copies:
        planned, _, error = _read(groups, runtime, copies)
    planned = runtime.planned = plan_of_all(planned, error, ranks, group, _planner(runtime))
    # Only now: tensors of other shapes have other gradients, and the difference of the plans says why.
    averages = {rank: each.averages for rank, each in told.items()}
    insist_on_averages(averages, lambda: tell_by_rank(sums, group=group))
    found = runtime.connected = Connected(planned, _exchange(planned, group, runtime))
    runtime.ranks.keepers = planned.plan.keepers
    runtime.source.bind(planned.replicated, group_for(runtime.holders), planned.plan.budget.gradient_bytes)
    runtime.source.complete(found.exchange.wire.steps)
    if "rounding" not in runtime.told:
        runtime.told.add("rounding")
        warn_of_rounding(planned, groups, runtime.precision, runtime.tell)
    return found


def _groups_known(planned: Planned | None, runtime: Runtime) -> list[dist.ProcessGroup]:
    """Return process groups that may have the ranks of a connected set: of the user, the source and meshes."""
    members = [] if planned is None else planned.members
    given = dict.fromkeys([runtime.holders, *(runtime.source.group(member.tensor) for member in members)])
    meshes = mesh_groups([member.storage for member in members])
    return [group for group in given if isinstance(group, dist.ProcessGroup)] + meshes


def _exchange(planned: Planned, group: dist.ProcessGroup | None, runtime: Runtime) -> Exchange:
    """Make the exchange of a plan that all ranks have compared."""
    planned.exchange = Exchange(
        planned.plan,
        group=group,
        dtype=runtime.precision.wire,
        companion_dtype=runtime.precision.carried,
        device=planned.device,
        batching=Batches.of(planned, on_host=runtime.precision.on_host),
    )
    return planned.exchange


def outdated(groups: Groups, runtime: Runtime, settings: SettingsFound) -> Connected | None:
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
    same = settings.error is None and before.planned.signature == Signature.of(groups, runtime, settings.terms)
    runtime.source.complete(before.exchange.wire.steps)
    return None if same else before


def forget(runtime: Runtime) -> None:
    """Forget the plan. All ranks that share the plan call this together."""
    runtime.planned = runtime.connected = None


def check_members(group: dict[str, Any], groups: Groups, runtime: Runtime) -> None:
    """Check a group and its parameters as far as one rank can, and make the parameters' names canonical.

    Raises:
        ValueError, TypeError: the message says what was found and what to write.
    """
    where = f"group {group.get('name')!r}"
    check_structure(where, group)
    check_group(where, group)
    tensors = group["params"]
    names = [
        canonical_name(runtime.source.name(tensor) or name)
        for name, tensor in zip(group["param_names"], tensors, strict=True)
    ]
    if names != group["param_names"]:
        group["param_names"] = names
    taken = {name for other in groups if other is not group for name in other["param_names"]}
    for name, tensor in zip(names, tensors, strict=True):
        if name in taken and world_size() == 1:  # with several ranks, the ranks of a parameter are part of its identity
            raise named_alike(ValueError, name, "two parameters of this name")
        taken.add(name)
        shared: object = runtime.source.group(tensor)
        if shared is not None and not isinstance(shared, dist.ProcessGroup):  # what `new_group` gives the other ranks
            found = f"{shared!r} from group() of {type(runtime.source).__name__}, as gradients="
            needed, write = "None or a ProcessGroup with this rank in it", "Return the group that this rank is in"
            raise ValueError(explain_error(name, found, needed, write))
        _check_dtype(name, tensor.dtype, runtime.precision.master, group)
        if name not in runtime.layouts:
            refuse_flattened(name, tensor)
    if not is_matrix_rule(group["algorithm"]):
        return
    specs = group.get("matrices")
    if specs is None:
        specs = group["matrices"] = [None] * len(tensors)
    for name, tensor, spec in zip(names, tensors, specs, strict=True):
        # Of declared shards the whole shape is known at the first step, together with the ranks.
        if name not in runtime.layouts and (shape := shape_if_known(name, tensor)) is not None:
            split_matrices(name, shape, spec)


def _check_dtype(name: str, dtype: torch.dtype, master: torch.dtype | None, group: Mapping[str, Any]) -> None:
    """Check the dtype of a parameter.

    Raises:
        TypeError: muonmesh cannot compute with parameters of this dtype.
        ValueError: a master weight could not hold all values of this dtype; stochastic rounding is set together with
            master weights or fp16; or AdamW's ε would be 0 in the dtype of the moments.
    """
    if dtype in COMPLEX_DTYPES and not is_matrix_rule(group["algorithm"]):  # stepped by their parts
        dtype = dtype.to_real()
    if dtype.is_complex:
        needed = "a real matrix: one of torch.complex64 and torch.complex128 is AdamW's, by its parts"
        write = f'Write overrides={{{name!r}: "adamw"}}, or keep the weight as torch.view_as_real(weight) and write '
        raise TypeError(explain_error(name, f"dtype {dtype}", needed, write + "torch.view_as_complex where it is used"))
    if dtype not in HELD_DTYPES:
        needed = f"a floating-point parameter, {NEEDED_HELD}"
        write = "Call requires_grad_(False), or keep it in torch.bfloat16"
        raise TypeError(explain_error(name, f"dtype {dtype}", needed, f"{write} and cast it where it is used"))
    if master is not None and torch.promote_types(dtype, master) != master:
        wide = torch.promote_types(torch.promote_types(dtype, master), torch.float32)
        found, needed = f"dtype {dtype} and master_dtype={master}", "a master that holds all of its parameter"
        raise ValueError(explain_error(name, found, needed, f"Write master_dtype={wide}"))
    if group["stochastic_rounding"] is not None and (master is not None or dtype == torch.float16):
        found = f"stochastic_rounding with {'masters' if master is not None else dtype}"
        needed, write = "weights in bf16 without masters, or wider ones", "Leave out stochastic_rounding"
        raise ValueError(explain_error(name, found, needed, f"{write} or master_dtype, and keep weights in bf16"))
    eps, moments = float(group["adamw_eps"]), master or dtype
    if group["algorithm"] == "adamw" and eps > 0 and torch.tensor(eps, dtype=moments, device="cpu") == 0:
        found = f"adamw_eps={eps} for moments in {moments}, where it is 0, so that small gradients divide by 0"
        needed = "an ε above 0"
        raise ValueError(explain_error(name, found, needed, "Write master_dtype=torch.float32, or adamw_eps=1e-4"))


def _read(
    groups: Groups, runtime: Runtime, copies: Copies | None = None
) -> tuple[Planned | None, list[tuple[int, ...]], Exception | None]:
    """Return the plan, the sets of ranks that share a parameter, and the first error; no plan if there is an error.

    A new plan is made if the groups have changed, or if the ranks have just found copies of parameters.
    """
    replicas_of(runtime.process_group)  # raises if the process group was lost in pickling
    try:
        for known in (runtime.planned, runtime.connected and runtime.connected.planned):
            if copies is None and known is not None and known.signature == _signature(groups, runtime):
                runtime.planned = known
                return known, known.sets, None
        for group in groups:
            check_members(group, groups, runtime)
        runtime.ranks.group = _group_found(groups, runtime)
        signature = _signature(groups, runtime)  # with the names as they are now
    except Exception as wrong:  # this rank still meets the other ranks, which wait for it
        if runtime.connected is not None:
            return None, runtime.connected.planned.sets, wrong
        return None, likely_sets(groups, runtime.holders, runtime.layouts, runtime.source), wrong
    members, sets, error = members_of(
        groups, runtime.holders, runtime.layouts, runtime.source, copies or {}, shard_state=runtime.asked.shard_state
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
        budget = Budget.of(parameters, runtime.asked.memory_budget_mb, itemsize=itemsize, host=host)
        return make_plan(
            parameters, known=runtime.ranks.keepers, machine=runtime.ranks.machine, budget=budget, **others
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


def _signature(groups: Groups, runtime: Runtime) -> Signature:
    return Signature.of(groups, runtime, [plan_terms(group, rule_of(group)) for group in groups])
