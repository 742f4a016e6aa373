"""Settings: what the arguments and the groups may say, checked once, before anything is built."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from muonmesh.errors import explain_error
from muonmesh.layout import Rates
from muonmesh.numerics.coefficients import coefficient_schedule
from muonmesh.numerics.dtypes import COMPUTE_DTYPES, HELD_DTYPES, NEEDED_COMPUTE, NEEDED_HELD
from muonmesh.numerics.scale import update_scale

Algorithm = Literal["muon", "adamw"]
ExchangeMode = Literal["owner", "gram", "auto"] | Rates
"""Who computes a matrix: its owner; the ranks that hold it, by summing Gram matrices; or what is cheaper."""

ProcessGroup = Literal["world", "local"] | dist.ProcessGroup | None

LOST_GROUP: Any = "a ProcessGroup that was lost in pickling"
"""Stands for a ProcessGroup, which cannot be pickled, in an unpickled optimizer."""

LOST_LAYOUTS: Any = {"layouts that were lost in pickling": None}
"""Stands for declared layouts, whose meshes cannot be pickled, in an unpickled optimizer."""

_GROUP_KEYS = (
    "lr",
    "momentum",
    "nesterov",
    "weight_decay",
    "scale_mode",
    "extra_scale_factor",
    "ns_coefficients",
    "ns_steps",
    "ns_method",
    "adamw_betas",
    "adamw_eps",
    "algorithm",
    "matrices",
    "params",
    "param_names",
    "name",
    "reasons",
    "use_muon",
)
_OTHER_NAMES = {
    "betas": "adamw_betas",
    "eps": "adamw_eps",
    "learning_rate": "lr",
    "wd": "weight_decay",
    "decay": "weight_decay",
    "steps": "ns_steps",
    "coefficients": "ns_coefficients",
    "method": "ns_method",
}
_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "base_lr", "initial_momentum", "max_momentum", "base_momentum")


def check_optimizer(
    *,
    compute_dtype: object,
    state_dtype: object,
    master_dtype: object,
    process_group: object,
    layouts: object,
    shard_state: object,
    exchange: object,
    bucket_cap_mb: object,
) -> None:
    """Check the settings that all groups share.

    Raises:
        ValueError: one is out of range, or this version does not have it.
    """
    needed = "a mapping of names to (mesh, placements), FlatShards or a list of FlatParameter"
    _check(layouts is None or isinstance(layouts, Mapping), "layouts", layouts, needed)
    _check(isinstance(shard_state, bool), "shard_state", shard_state, "True or False")
    known = isinstance(exchange, Rates) or exchange in ("owner", "gram", "auto")
    _check(known, "exchange", exchange, '"owner", "gram", "auto" or Rates(...)')
    found, needed = compute_dtype, f"{NEEDED_COMPUTE}. Write compute_dtype=torch.bfloat16"
    _check(found in COMPUTE_DTYPES, "compute_dtype", found, needed)
    found, needed = state_dtype, f"{NEEDED_HELD}. Write state_dtype=torch.float32"
    _check(found in HELD_DTYPES, "state_dtype", found, needed)
    found, needed = master_dtype, f"None or {NEEDED_HELD}. Write master_dtype=torch.float32"
    _check(found is None or found in HELD_DTYPES, "master_dtype", found, needed)
    check_process_group(process_group)
    positive = isinstance(bucket_cap_mb, (int, float)) and _is_number(bucket_cap_mb) and bucket_cap_mb > 0
    _check(positive, "bucket_cap_mb", bucket_cap_mb, "a positive number")


def check_process_group(process_group: object) -> None:
    """Check what stands for a process group, here and in `Muon.clip_grad_norm_`; sends nothing.

    Raises:
        ValueError: it is nothing that stands for one, or a group that this rank is not in.
    """
    needed = '"world", "local", a ProcessGroup or None'
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:  # what `new_group` gives the other ranks
        raise ValueError(f"process_group: found a group without this rank; needed {needed}, with this rank in it")
    named = process_group is None or (isinstance(process_group, str) and process_group in ("world", "local"))
    _check(named or isinstance(process_group, dist.ProcessGroup), "process_group", process_group, needed)


def algorithm_of(group: Mapping[str, Any]) -> Algorithm:
    """Return a group's algorithm: its key, or the alias ``use_muon``, or "muon".

    Raises:
        ValueError: it is unknown, or the two contradict each other.
    """
    algorithm: Any = group.get("algorithm")
    if "use_muon" in group:
        alias = "muon" if group["use_muon"] else "adamw"
        if algorithm not in (None, alias):
            raise ValueError(
                f"group: found algorithm={algorithm!r} and use_muon={group['use_muon']!r}; needed one of them"
            )
        algorithm = alias
    algorithm = "muon" if algorithm is None else algorithm
    if algorithm not in ("muon", "adamw"):
        raise ValueError(f'group: found algorithm={algorithm!r}; needed "muon" or "adamw"')
    return "muon" if algorithm == "muon" else "adamw"


def _check(holds: bool, name: str, found: object, needed: str) -> None:
    if not holds:
        raise ValueError(f"{name}: found {found!r}; needed {needed}")


def check_dtype(name: str, dtype: torch.dtype, master: torch.dtype | None, group: Mapping[str, Any]) -> None:
    """Check the dtype of a parameter.

    Raises:
        TypeError: nothing can be computed in it.
        ValueError: its master would hold less of it than it does itself, or AdamW's ε is 0 in it.
    """
    if dtype not in HELD_DTYPES:
        needed, write = f"a real floating-point parameter, {NEEDED_HELD}", "Leave it out, or keep it in torch.bfloat16"
        raise TypeError(explain_error(name, f"dtype {dtype}", needed, f"{write} and cast it where it is used"))
    if master is not None and torch.promote_types(dtype, master) != master:
        wide = torch.promote_types(torch.promote_types(dtype, master), torch.float32)
        found, needed = f"dtype {dtype} and master_dtype={master}", "a master that holds all of its parameter"
        raise ValueError(explain_error(name, found, needed, f"Write master_dtype={wide}"))
    eps, moments = float(group["adamw_eps"]), master or dtype
    if group["algorithm"] == "adamw" and eps > 0 and torch.tensor(eps, dtype=moments) == 0:
        found = f"adamw_eps={eps} for moments in {moments}, where it is 0, so that small gradients divide by 0"
        needed = "an ε above 0"
        raise ValueError(explain_error(name, found, needed, "Write master_dtype=torch.float32, or adamw_eps=1e-4"))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def check_group(where: str, group: Mapping[str, Any]) -> None:
    """Check the hyperparameters of a group; ``where`` begins the message.

    Raises:
        ValueError: one is out of range; the message says what was found and what is needed.
    """
    lr = group["lr"]
    if isinstance(lr, Tensor):
        _check(lr.numel() == 1, f"{where}: lr", lr, "a tensor of one element")
    else:
        _check(_is_number(lr) and lr >= 0, f"{where}: lr", lr, "a number of at least 0")
    momentum = group["momentum"]
    _check(_is_number(momentum) and 0 <= momentum < 1, f"{where}: momentum", momentum, "a number in [0, 1)")
    _check(isinstance(group["nesterov"], bool), f"{where}: nesterov", group["nesterov"], "True or False")
    for key in ("weight_decay", "adamw_eps"):
        _check(_is_number(group[key]) and group[key] >= 0, f"{where}: {key}", group[key], "a number of at least 0")
    factor = group["extra_scale_factor"]
    _check(_is_number(factor) and factor > 0, f"{where}: extra_scale_factor", factor, "a positive number")
    betas = group["adamw_betas"]
    fits = isinstance(betas, (tuple, list)) and len(betas) == 2 and all(_is_number(b) and 0 <= b < 1 for b in betas)
    _check(fits, f"{where}: adamw_betas", betas, "two numbers in [0, 1)")
    for key in group:
        # Frameworks put keys of their own into groups, so only what looks like one of ours misspelt is refused.
        if key in _GROUP_KEYS or key in _SCHEDULERS:
            continue
        meant = _OTHER_NAMES.get(key) or next(iter(difflib.get_close_matches(key, _GROUP_KEYS, 1, 0.8)), None)
        if meant is not None:
            raise ValueError(f"{where}: found the key {key!r}; needed {meant!r}. Rename it")
    update_scale(1, 1, group["scale_mode"])
    coefficient_schedule(group["ns_coefficients"], group["ns_steps"])
    _check(
        group["ns_method"] in ("auto", "standard", "gram"),
        f"{where}: ns_method",
        group["ns_method"],
        '"auto", "standard" or "gram"',
    )
