"""Param groups: groups a stage's parameters by role, with the keys that Megatron's schedulers and checkpoints read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.optimizer import get_standard_config_overrides
from megatron.core.optimizer_param_scheduler import combine_param_group_overrides, param_group_override_to_tuple
from torch import nn

from muonmesh.errors import explain_error
from muonmesh.groups import split_params
from muonmesh.groups.parameter_sites import Site, parameter_sites, unwrapped
from muonmesh.integrations.megatron.main_grad import stamp
from muonmesh.integrations.megatron.roles import whole_name
from muonmesh.names import in_order
from muonmesh.numerics.rules import is_matrix_rule

EACH = ("params", "param_names", "matrices", "reasons")
"""Keys of a group with one entry for each of its parameters."""

SCHEDULED = ("max_lr", "min_lr", "start_wd", "end_wd", "wd_mult", "default_config")
"""Keys of a group between which Megatron's scheduler moves its rate and its decay."""

EXPERTS = "[experts]"
"""The suffix of the name of a group of experts whose gradients other ranks average (``allreduce=False``)."""


def find_groups(
    config: Any,
    chunks: Sequence[nn.Module],
    expert_rank: int,
    *,
    config_overrides: Mapping[Any, Any] | None,
    overrides: Mapping[str, Any],
    rule: str,
    **split: Any,
) -> tuple[list[dict[str, Any]], set[str]]:
    """Return the param groups of a stage's chunks, and the overrides that have matched a parameter here.

    Args:
        config: Megatron's OptimizerConfig.
        chunks: The chunks in their wrappers.
        expert_rank: The index of this rank among the expert-parallel ranks.
        config_overrides: Megatron's overrides: keys that match parameters → schedule settings. None: Megatron's
            standard overrides.
        overrides: Overrides as for `split_params`, by names of the whole model. An override that matches no parameter
            here may match on another stage.
        rule: The name of the rule that steps the matrices for which ``overrides`` name no other.
        split: The other arguments of `split_params`: ``muon`` and ``adamw``.

    Returns:
        Param groups for `Muon` with Megatron's keys, the last one without parameters if no other has the config's rate;
        and overrides.
    """
    keys = get_standard_config_overrides(config) if config_overrides is None else config_overrides
    groups: dict[Any, dict[str, Any]] = {}
    used = set[str]()
    for chunk in chunks:
        model = unwrapped(chunk)
        trained_sites = [site for site in parameter_sites(model) if site.parameter.requires_grad]
        if not trained_sites:
            continue
        names = {site.name: whole_name(site, expert_rank) for site in trained_sites}
        overriding, matched = _for_names(overrides, trained_sites, names)
        used |= matched
        chunk_names = {parameter: name for name, parameter in chunk.named_parameters()}  # what Megatron's keys match
        for group in split_params(model, overrides=overriding, **split):
            if group["algorithm"] == "muon":
                group["algorithm"] = rule
            half = split["muon" if is_matrix_rule(group["algorithm"]) else "adamw"]
            for i, parameter in enumerate(group["params"]):
                local = group["param_names"][i]
                schedule = _schedule(keys, parameter, chunk_names[parameter], group, half, overriding.get(local, {}))
                expert = not stamp(parameter, "allreduce", True)
                key = group["name"], param_group_override_to_tuple(schedule), expert
                if key not in groups:
                    groups[key] = _group(config, group, schedule, expert=expert)
                for entry in EACH:
                    if entry in group:
                        groups[key][entry].append(names[local] if entry == "param_names" else group[entry][i])
    # Schedulers need a group, and Megatron's log fails if no group has the rate of the config.
    if not any(group["default_config"] for group in groups.values()):
        nothing = {"params": [], "param_names": [], "name": "nothing", "algorithm": "adamw"}
        groups[()] = _group(config, nothing, {}, expert=False)
    return list(groups.values()), used


def _for_names(
    overrides: Mapping[str, Any], trained_sites: Sequence[Site], names: Mapping[str, str]
) -> tuple[dict[str, Any], set[str]]:
    """Return the overrides by the exact names in a chunk, and the keys of the overrides that match a parameter here."""
    by_name = {names[site.name]: site.name for site in trained_sites}
    settings: dict[str, dict[str, Any]] = {}
    used = set()
    for key, value, meant in in_order(overrides, by_name):
        for name in meant:
            settings.setdefault(by_name[name], {}).update({"algorithm": value} if isinstance(value, str) else value)
            used.add(key)
    return settings, used


_NO_EFFECT = {
    "lr": "max_lr",
    "weight_decay": "start_wd and end_wd",
    "lr_mult": "max_lr",
    "optimizer": "overrides={name: 'adamw'} or 'muon'",
    "eps": "adamw={'adamw_eps': ...}, and leave out --use-mup, which sets it",
}
"""Keys of Megatron's overrides that its scheduler overwrites or does not read, and what to write instead."""

_SAME = {"max_lr": "lr", "start_wd": "weight_decay", "end_wd": "weight_decay"}
"""Keys of Megatron's overrides, and the settings of this package that mean the same."""


def _schedule(
    keys: Mapping[Any, Any],
    parameter: nn.Parameter,
    name: str,
    group: Mapping[str, Any],
    half_settings: Mapping[str, Any] | None,
    parameter_settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the schedule settings of a parameter that differ from those of all other parameters of its kind.

    Megatron's overrides are combined as Megatron combines them. They decide whether a vector has weight decay; the
    standard ones set ``wd_mult=0`` for vectors. A decay that ``overrides=`` gives this parameter comes first.

    Args:
        keys: Megatron's overrides.
        parameter: The parameter.
        name: Its name in the wrapped chunk, by which Megatron matches.
        group: Its group, from `split_params`.
        half_settings: The settings of its half, ``muon=`` or ``adamw=``.
        parameter_settings: The settings that ``overrides=`` gives it.

    Raises:
        ValueError: a key of Megatron's overrides has no effect, or Megatron's overrides and ``muon=``, ``adamw=`` or
            ``overrides=`` both set a learning rate or a weight decay.
    """
    matching = [override for key, override in keys.items() if key.matches(parameter, name)]
    schedule: dict[str, Any] = dict(combine_param_group_overrides(matching))
    for key, write in _NO_EFFECT.items():
        if key in schedule and (key, schedule[key]) != ("lr_mult", 1.0):
            problem, needed = f"{key}={schedule[key]!r}", "a setting that Megatron's scheduler reads"
            raise ValueError(explain_error(f"config_overrides for {name}", problem, needed, f"Write {write}"))
    settings = {**(half_settings or {}), **parameter_settings}
    decides, decay = "weight_decay" in parameter_settings, settings.get("weight_decay")
    vector = group["name"].startswith("adamw.vectors")
    usual = 0.0 if vector or (group.get("weight_decay") == 0 and decay != 0) else 1.0
    mult = schedule.pop("wd_mult", 1.0 if vector else usual)
    conflict = next(((key, same) for key, same in _SAME.items() if key in schedule and same in settings), None)
    if decides and mult not in (0, 1):
        conflict = "wd_mult", "weight_decay"
    if conflict is not None:
        key, same = conflict
        problem = f"{key} from config_overrides and {same}={settings[same]!r} from muon=, adamw= or overrides="
        raise ValueError(explain_error(name, problem, "only one of them", "Remove one of the two"))
    if not decides and mult != usual:
        schedule["wd_mult"] = mult
        if decay is not None:
            schedule |= {"start_wd": float(decay), "end_wd": float(decay)}
    return schedule


def _group(config: Any, group: Mapping[str, Any], schedule: Mapping[str, Any], *, expert: bool) -> dict[str, Any]:
    """Return an empty group with all keys that Megatron's scheduler, checkpoints and logs read.

    A learning rate of a single group keeps its ratio to the other rates while the scheduler runs. A weight decay of a
    single group stays constant. (At each step, the scheduler sets ``weight_decay`` to the scheduled decay times
    ``wd_mult``.) Without ``min_lr`` in Megatron's config, that of the scheduler counts.
    """
    settings = {key: value for key, value in group.items() if key not in EACH}
    rate = float(settings.pop("lr", config.lr))
    decay = settings.pop("weight_decay", None)
    scheduled: dict[str, Any] = {"wd_mult": 1.0, "lr_mult": 1.0, "is_decoupled_lr": False, "max_lr": rate}
    if config.min_lr is not None:
        scheduled["min_lr"] = config.min_lr * rate / config.lr if config.lr else config.min_lr
    if decay == 0:
        scheduled["wd_mult"] = 0.0
    elif decay is not None:
        scheduled |= {"start_wd": float(decay), "end_wd": float(decay)}
    scheduled |= schedule
    name = group["name"] + "".join(f"[{key}={value!r}]" for key, value in sorted(schedule.items()))
    return {
        **settings,
        **{key: [] for key in EACH if key in group},
        "name": name + (EXPERTS if expert else ""),
        "lr": scheduled["max_lr"],
        "weight_decay": scheduled.get("start_wd", config.weight_decay) * scheduled["wd_mult"],
        "is_expert_parallel": expert,
        "default_config": scheduled["max_lr"] == config.lr and "min_lr" not in schedule,
        **scheduled,
    }
