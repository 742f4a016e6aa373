"""Param groups: groups a stage's parameters by role, with the keys that Megatron's schedulers and checkpoints read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.optimizer import get_standard_config_overrides
from megatron.core.optimizer_param_scheduler import combine_param_group_overrides, param_group_override_to_tuple
from torch import nn

from muonmesh.errors import explain_error
from muonmesh.groups import register, split_params, unregister
from muonmesh.groups.fused_projections import WHOLE
from muonmesh.groups.sites import Site, sites
from muonmesh.integrations.megatron.global_names import expert_names, whole_name
from muonmesh.integrations.megatron.roles import expert_role
from muonmesh.integrations.megatron.saved_boxes import SavedBox
from muonmesh.names import in_order

EACH = ("params", "param_names", "matrices", "reasons")
"""Keys of a group with one entry for each of its parameters."""

EXPERTS = "[experts]"
"""The suffix of the name of a group of experts whose gradients other ranks average (``allreduce=False``)."""


def find_groups(
    config: Any,
    models: Sequence[nn.Module],
    boxes: Mapping[int, Sequence[SavedBox]],
    expert_rank: int,
    *,
    config_overrides: Mapping[Any, Any] | None,
    overrides: Mapping[str, Any],
    rule: str,
    **split: Any,
) -> tuple[list[dict[str, Any]], set[str], dict[str, int]]:
    """Return the param groups of a stage's chunks.

    Args:
        config: Megatron's OptimizerConfig.
        models: The chunks without wrappers.
        boxes: The boxes of their parameters in Megatron's checkpoints, by the parameter's ``id``.
        expert_rank: The index of this rank among the expert-parallel ranks.
        config_overrides: Megatron's overrides: keys that match parameters → schedule settings. None: Megatron's
            standard overrides.
        overrides: Overrides as for `split_params`, by names of the whole model. An override that matches no parameter
            here may match on another stage.
        rule: The name of the rule that steps matrices.
        split: The other arguments of `split_params`: ``muon``, ``adamw`` and ``per_head``.

    Returns:
        Three values. First, param groups for `Muon` with Megatron's keys, or one empty group if there are no
        parameters. Second, the overrides that have matched a parameter here. Third, for each expert of a GroupedMLP by
        name, its place among the experts of its parameter on this rank; the groups have the experts instead of the
        parameter.
    """
    keys = get_standard_config_overrides(config) if config_overrides is None else config_overrides
    groups: dict[Any, dict[str, Any]] = {}
    used, experts = set[str](), dict[str, int]()
    for model in models:
        held = [site for site in sites(model) if site.parameter.requires_grad]
        if not held:
            continue
        names = {site.name: whole_name(site, expert_rank) for site in held}
        here, matched = _for_names(overrides, held, names)
        used |= matched
        parts = {site.name: expert_names(site, names[site.name], expert_rank) for site in held}
        for group in _split(model, boxes, overrides=here, **split):
            for i, parameter in enumerate(group["params"]):
                local = group["param_names"][i]
                schedule = _schedule(keys, parameter, local, group)
                expert = not getattr(parameter, "allreduce", True)
                key = group["name"], param_group_override_to_tuple(schedule), expert
                if key not in groups:
                    groups[key] = _group(config, group, schedule, expert=expert, rule=rule)
                for place, name in enumerate(parts[local]):
                    if name != names[local]:
                        experts[name] = place
                    for each in EACH:
                        if each in group:
                            groups[key][each].append(name if each == "param_names" else group[each][i])
    if not groups:  # a stage with nothing to train: schedulers and logs need at least one group
        nothing = {"params": [], "param_names": [], "name": "nothing", "algorithm": "adamw"}
        groups[()] = _group(config, nothing, {}, expert=False, rule=rule)
    return list(groups.values()), used, experts


def _split(model: nn.Module, boxes: Mapping[int, Sequence[SavedBox]], **settings: Any) -> Any:
    """Call `split_params` with the roles of a GroupedMLP's experts, each of which is a tensor of its own.

    `split_params` needs the shape of the whole weight to count heads. A shard does not have this shape; the weight's
    box in Megatron's checkpoints does, if the weight is one tensor there.
    """
    parameters = [*model.parameters()] if settings["per_head"] else []
    marked = [p for p in parameters if len(own := boxes.get(id(p), ())) == 1 and len(own[0].whole) == p.ndim]
    register(expert_role)
    try:
        for parameter in marked:
            setattr(parameter, WHOLE, boxes[id(parameter)][0].whole)
        return split_params(model, **settings)
    finally:
        for parameter in marked:
            delattr(parameter, WHOLE)
        unregister(expert_role)


def _for_names(
    overrides: Mapping[str, Any], held: Sequence[Site], names: Mapping[str, str]
) -> tuple[dict[str, Any], set[str]]:
    """Return the overrides by the exact names in a chunk, and the keys of the overrides that match a parameter here."""
    by_name = {names[site.name]: site.name for site in held}
    here: dict[str, dict[str, Any]] = {}
    used = set()
    for key, said, meant in in_order(overrides, by_name):
        for name in meant:
            here.setdefault(by_name[name], {}).update({"algorithm": said} if isinstance(said, str) else said)
            used.add(key)
    return here, used


def _schedule(keys: Mapping[Any, Any], parameter: nn.Parameter, name: str, group: Mapping[str, Any]) -> Any:
    """Return the schedule settings of a parameter from Megatron's overrides, combined as Megatron combines them.

    Raises:
        ValueError: the overrides and ``muon=``, ``adamw=`` or ``overrides=`` both set a learning rate.
    """
    said = [override for key, override in keys.items() if key.matches(parameter, name)]
    schedule = dict(combine_param_group_overrides(said)) if said else {}
    if "lr" in schedule or ("max_lr" in schedule and "lr" in group):
        found = f"a rate of its own from config_overrides and lr={group.get('lr')!r} from muon=, adamw= or overrides="
        raise ValueError(explain_error(name, found, "only one of them", "Remove one of the two"))
    if group.get("weight_decay") == 0:
        schedule.pop("wd_mult", None)  # vectors have no decay anyway
    return schedule


def _group(
    config: Any, group: Mapping[str, Any], schedule: Mapping[str, Any], *, expert: bool, rule: str
) -> dict[str, Any]:
    """Return an empty group with all keys that Megatron's scheduler, checkpoints and logs read.

    A learning rate of a single group keeps its ratio to the other rates while the scheduler runs. A weight decay of a
    single group stays constant, and vectors have no decay. (At each step, the scheduler sets ``weight_decay`` to the
    scheduled decay times ``wd_mult``.)
    """
    settings = {key: value for key, value in group.items() if key not in EACH}
    muon = group["algorithm"] == "muon"
    rate = float(settings.pop("lr", config.lr))
    decay = settings.pop("weight_decay", None)
    found = {
        "wd_mult": 1.0,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "max_lr": rate,
        "min_lr": (config.min_lr or 0.0) * rate / config.lr if config.lr else config.min_lr,
        **schedule,
    }
    if decay == 0:
        found["wd_mult"] = 0.0
    elif decay is not None:
        found |= {"start_wd": float(decay), "end_wd": float(decay)}
    name = group["name"] + "".join(f"[{key}={value!r}]" for key, value in sorted(schedule.items()))
    whole: dict[str, Any] = {
        **settings,
        **{key: [] for key in EACH if key in group},
        "name": name + (EXPERTS if expert else ""),
        "algorithm": rule if muon else "adamw",
        "lr": found["max_lr"],
        "weight_decay": found.get("start_wd", config.weight_decay) * found["wd_mult"],
        "is_expert_parallel": expert,
        "default_config": found["max_lr"] == config.lr and "min_lr" not in schedule,
        **found,
    }
    return {**whole, "skip_grad_norm_clip": True} if muon else whole
