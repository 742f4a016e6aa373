"""Checks of settings: which values an argument of `Muon` or a key of a param group may have, and what to write."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muonmesh.comm.gradients import check_source
from muonmesh.errors import about, called, explain_error
from muonmesh.numerics.dtypes import dtype_named
from muonmesh.numerics.kernels import check_kernels, is_compiled
from muonmesh.numerics.newton_schulz import resolve_method
from muonmesh.numerics.rules import RULES, Hyperparameters, check_keeps, is_known, is_matrix_rule
from muonmesh.numerics.setting import NOT_NEGATIVE, TORCHS_NAMES, is_number, own_names
from muonmesh.settings import (
    FOREIGN_KEYS,
    FRESH_MEANS,
    GROUP_SETTINGS,
    NORM_MEANS,
    OPTIMIZER_SETTINGS,
    SETTINGS,
    MuonSettings,
)

_GROUP_KEYS = dict.fromkeys(
    ("lr", *GROUP_SETTINGS, "algorithm", "matrices", "params", "param_names", "name", "reasons", "use_muon", NORM_MEANS)
)
_OF_FROM_MODEL = ("overrides", "rule", "example", "muon", "adamw")
_INSTEAD = {  # split_params may have been called apart
    **{name: f"Give {name}= to from_model" for name in _OF_FROM_MODEL},
    "muon_lr": 'Write muon={"lr": ...} in from_model, or put it into a group',
    "adamw_lr": 'Write adamw={"lr": ...} in from_model, or put it into a group',
    **dict.fromkeys(("beta1", "beta2"), "Write adamw_betas=(beta1, beta2)"),
    "momentum_dtype": "Write state_dtype=",
    "offload": 'Write state_device="cpu"',
    "exclude": 'Write overrides={name: "adamw"} in from_model',
}
"""What to write instead of some arguments that `Muon` does not have."""

_OTHER_NAMES = {
    **TORCHS_NAMES,
    "learning_rate": "lr",
    "wd": "weight_decay",
    "decay": "weight_decay",
    "steps": "ns_steps",
    "coefficients": "ns_coefficients",
    "method": "ns_method",
    "mode": "scale_mode",
    "adjust_lr_fn": "scale_mode",
    "cautious": "decay_mode",
    "cautious_wd": "decay_mode",
    "bucket_cap_mb": "memory_budget_mb",
    "rule": "algorithm",
}

_SPLITS = dict.fromkeys(("heads", "num_heads", "n_heads"), ("heads", 4, 0)) | {"split_sizes": ("rows", 64, 32, 32)}
"""Keys by which others split fused weights, each with an entry of "matrices" that does the same."""

_ARGUMENT = re.compile(r"(?<!\w)(?=(coefficients|steps|method)[:=])")
"""Finds the arguments of `orthogonalize` in its error messages; in a group these settings have the prefix "ns_"."""

_TORCH_SWITCHES = {
    **dict.fromkeys(("amsgrad", "capturable", "differentiable"), ""),
    **dict.fromkeys(("foreach", "fused"), ": muonmesh chooses its kernels by itself"),
    "maximize": " and negate the loss",
}
"""Keys of torch's optimizers that muonmesh accepts only if they are off, as in the groups of torch's state dicts, each
with the end of the sentence that says to leave it out."""


def _check_optimizer(settings: Mapping[str, Any]) -> None:
    """Check the settings that all groups share.

    Raises:
        ValueError, TypeError: a setting is out of range, or this version of muonmesh does not support it.
    """
    for name, setting in OPTIMIZER_SETTINGS.items():
        if not setting.fits(settings[name]):
            write = None
            if name.endswith("_dtype"):
                meant = dtype_named(settings[name]), setting.default, torch.float32
                write = f"Write {name}={next(dtype for dtype in meant if dtype is not None and setting.fits(dtype))}"
            raise ValueError(explain_error(name, f"{settings[name]!r}", setting.needed, write))
    check_process_group(settings["process_group"])
    if settings["gradients"] != "to_owners":
        check_source(settings["gradients"])
    elif settings["shard_state"]:
        needed, write = "one of them, since owners keep all of the momentum", "Leave out shard_state"
        raise ValueError(explain_error("gradients", "'to_owners' with shard_state=True", needed, write))
    if settings["state_device"] is not None and settings["state_dtype"] == "int8":
        problem = 'state_device="cpu" with state_dtype="int8"'
        needed = "momentum in floating point: ranks agree on the "
        needed += "blocks of all int8 momentum before the first bucket, so all of it would be on the device at once"
        write = "Write state_dtype=torch.bfloat16, or no state_device"
        raise ValueError(explain_error(called("Muon"), problem, needed, write))
    if is_compiled(settings["kernels"]):  # before anything is planned; whether parameters are on a CPU is known then
        check_kernels(settings["kernels"], device=torch.device("cpu"), dtype=settings["compute_dtype"])


def check_process_group(process_group: object, words: Sequence[str] = ("world", "local", "auto")) -> None:
    """Check a ``process_group`` argument. No communication.

    Args:
        process_group: The value of the argument.
        words: The strings that are allowed: all in `Muon`, fewer in `Muon.clip_grad_norm_`.

    Raises:
        ValueError: the value is no ProcessGroup, allowed string or None, or it is a group without this rank.
    """
    needed = ", ".join(f'"{word}"' for word in words) + ", a ProcessGroup or None"
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:  # what `new_group` gives the other ranks
        problem = "a group without this rank"
        raise ValueError(explain_error("process_group", problem, f"{needed}, with this rank in it"))
    named = process_group is None or (isinstance(process_group, str) and process_group in words)
    _check(named or isinstance(process_group, dist.ProcessGroup), "process_group", process_group, needed)


def algorithm_of(group: Mapping[str, Any]) -> str:
    """Return a group's algorithm: its key, or the alias ``use_muon``, or "muon".

    Raises:
        ValueError: the algorithm is unknown, or ``algorithm`` and ``use_muon`` contradict each other.
    """
    algorithm: Any = group.get("algorithm")
    if "use_muon" in group:
        alias = "muon" if group["use_muon"] else "adamw"
        of_matrices = isinstance(algorithm, str) and is_known(algorithm) and is_matrix_rule(algorithm)
        if algorithm not in (None, alias) and not (alias == "muon" and of_matrices):
            problem = f"algorithm={algorithm!r} and use_muon={group['use_muon']!r}"
            raise ValueError(explain_error("group", problem, "one of them", "Remove use_muon"))
        algorithm = algorithm or alias
    algorithm = "muon" if algorithm is None else algorithm
    if not isinstance(algorithm, str) or not is_known(algorithm):
        by_class = [name for name, rule in RULES.items() if rule in (algorithm, type(algorithm))]
        nearest = next(iter(by_class or difflib.get_close_matches(str(algorithm), list(RULES), 1)), None)
        write = None if nearest is None else f'Write "{nearest}"'
        raise ValueError(explain_error("group", f"algorithm={algorithm!r}", needed_algorithm(), write))
    return algorithm


def needed_algorithm() -> str:
    """Return the known algorithms as text for error messages."""
    others = ", ".join(f'"{name}"' for name in RULES if name not in ("muon", "adamw"))
    return f'"muon" or "adamw", or another rule: {others}. Register one of your own with muonmesh.register_rule first'


def _check(holds: bool, name: str, value: object, needed: str) -> None:
    if not holds:
        raise ValueError(explain_error(name, f"{value!r}", needed))


def check_group(subject: str, group: Mapping[str, Any], *, read: bool = True) -> Any:
    """Check the hyperparameters and the keys of a group, and return the snapshot of its rule, if it has one.

    The constructor, new groups, loaded groups and every step's snapshot go through this.

    Args:
        subject: The group's name in messages, such as "group 'muon'".
        group: The group with all hyperparameters.
        read: Whether to check the rule's `keeps`. A step checks this only if the plan's signature has changed.

    Raises:
        ValueError: a setting is out of range, or a key is unknown. The message says what was found and what is needed.
        TypeError: the coefficients have the wrong type.
    """
    for key in ("lr", *GROUP_SETTINGS):
        if key not in group:
            raise ValueError(explain_error(subject, f"no {key!r}", "every setting", f"Set group[{key!r}] again"))
    needed = f"{NOT_NEGATIVE}, or a floating-point tensor of one element with it, in CPU memory"
    _check(_is_rate(group["lr"]), f"{subject}: lr", group["lr"], needed)
    for key, setting in GROUP_SETTINGS.items():
        _check(setting.fits(group[key]), f"{subject}: {key}", group[key], setting.needed)
    _check_keys(subject, group)
    means, needed = group.get(NORM_MEANS, FRESH_MEANS), "means and counts of three norms, finite numbers of at least 0"
    _check(_are_means(means), f"{subject}: {NORM_MEANS}", means, f"{needed}; {FRESH_MEANS} begins anew")
    coefficients = group["ns_coefficients"]
    try:  # whether the method fits the polynomials depends on neither shape nor dtype
        check = _check_named if isinstance(coefficients, str) else resolve_method
        check(1, 1, coefficients=coefficients, steps=group["ns_steps"], method=group["ns_method"])
    except (TypeError, ValueError) as error:
        raise type(error)(about(subject, _ARGUMENT.sub("ns_", str(error)))) from None
    if "algorithm" not in group:
        return None
    rule = RULES[group["algorithm"]].of(group)
    try:
        rule.check()
        if read:
            check_keeps(rule)
    except ValueError as error:
        raise ValueError(about(subject, str(error))) from None
    return rule


def _is_rate(lr: Any) -> bool:
    if isinstance(lr, Tensor):
        if lr.numel() != 1 or not lr.is_floating_point() or lr.device.type != "cpu":
            return False
        lr = float(lr.detach())
    return is_number(lr) and lr >= 0


def _are_means(means: Any) -> bool:
    if isinstance(means, Tensor):
        return means.dtype == torch.float64 and means.shape == (2, 3)
    rows = means if isinstance(means, (list, tuple)) else ()
    return [len(row) for row in rows if isinstance(row, (list, tuple))] == [3, 3] and all(
        type(number) in (int, float) and 0 <= number < math.inf for row in rows for number in row
    )


_check_named = lru_cache(resolve_method)
"""`resolve_method` for coefficient sets with a name; results are cached, because every step checks the groups."""


def read_settings(lr: float | Tensor, settings: MuonSettings) -> tuple[dict[str, Any], dict[str, Any]]:
    """Check the arguments of an optimizer, and fill in the defaults.

    Args:
        lr: Learning rate.
        settings: The other arguments, by the names of muonmesh or of torch.optim.AdamW.

    Returns:
        The defaults of param groups, and the settings that all groups share.

    Raises:
        ValueError: a setting is out of range, or was given by both names.
        TypeError: an argument is unknown.
    """
    subject = called("Muon")
    rest = own_names(subject, settings)
    of_groups = {"lr": lr, **{name: rest.pop(name, setting.default) for name, setting in GROUP_SETTINGS.items()}}
    of_groups[NORM_MEANS] = FRESH_MEANS
    shared = {name: rest.pop(name, setting.default) for name, setting in OPTIMIZER_SETTINGS.items()}
    of_all = {*SETTINGS, *Hyperparameters.settings()}
    rule_of_key = {name: rule for rule in reversed(RULES) for name in RULES[rule].settings() if name not in of_all}
    for name in rest.keys() - {*_TORCH_SWITCHES}:
        close = difflib.get_close_matches(name, ["lr", *SETTINGS, *_INSTEAD, *rule_of_key], 1)
        meant = name if name in rule_of_key else _OTHER_NAMES.get(name) or next(iter(close), None)
        write = f"Leave {name}= out" if meant is None else f"Write {meant}="
        if meant in rule_of_key:
            write = f'Write rule="{rule_of_key[meant]}", muon={{"{meant}": ...}} in from_model, or put it into a group'
        if subject == "Muon" or meant not in _OF_FROM_MODEL:
            write = _INSTEAD.get(name) or _INSTEAD.get(str(meant), write)
        raise TypeError(explain_error(subject, f"the argument {name!r}", f"an argument of muonmesh.{subject}", write))
    _check_optimizer(shared)
    check_group(subject, {**of_groups, **rest})
    return of_groups, shared


def check_structure(subject: str, group: Mapping[str, Any]) -> None:
    """Check the entries of a group other than settings: its algorithm, name, parameters, and lists for its parameters.

    Raises:
        ValueError, TypeError: an entry is missing or has the wrong type, or a list has another length than the group
            has parameters.
    """
    for key in ("algorithm", "name", "params", "param_names"):
        if key not in group:
            raise ValueError(explain_error(subject, f"no {key!r}", "it as it was made", f"Set group[{key!r}] again"))
    algorithm = group["algorithm"]
    if not (isinstance(algorithm, str) and (algorithm in RULES or is_known(algorithm))):
        raise ValueError(explain_error(f"{subject}: algorithm", f"{algorithm!r}", needed_algorithm()))
    _check(isinstance(group["name"], str), f"{subject}: name", group["name"], "a string")
    count = len(group["params"])
    names = group["param_names"]
    if not isinstance(names, (list, tuple)) or not all([isinstance(name, str) for name in names]):
        raise TypeError(explain_error(f"{subject}: param_names", f"{names!r}", "a list of strings"))
    if len(names) != count:
        problem = f"{len(names)} param_names for {count} parameters"
        write = "Leave param_names out or give all of them; add parameters by add_param_group. If DeepSpeed put flat "
        write += "tensors in their place, write muonmesh.integrations.deepspeed.initialize(model=model, config=config, "
        write += 'optimizer={"lr": 3e-4}). Instead of ZeroRedundancyOptimizer write Muon(..., shard_state=True)'
        raise ValueError(explain_error(subject, problem, "one each", write))
    for key in ("reasons", "matrices"):
        entries = group.get(key)
        if entries is not None and not (isinstance(entries, (list, tuple)) and len(entries) == count):
            problem, needed = f"{key}={entries!r} for {count} parameters", "a list with one entry per parameter"
            example = 'Write "matrices": ["whole", ("rows", 768, 768, 768), ...]'
            raise ValueError(explain_error(subject, problem, needed, example if key == "matrices" else None))


def _check_keys(subject: str, group: Mapping[str, Any]) -> None:
    """Raise a ValueError for keys that are not read, because they would silently have no effect."""
    rule = RULES[group["algorithm"]] if "algorithm" in group else Hyperparameters
    for key, value in group.items():
        if key in _GROUP_KEYS or key in FOREIGN_KEYS or key in rule.settings():
            continue
        if key in _TORCH_SWITCHES:
            if value is not None and value is not False:
                write = f"Leave {key} out{_TORCH_SWITCHES[key]}"
                needed = "False: muonmesh has no such switch"
                raise ValueError(explain_error(subject, f"{key}={value!r}", needed, write))
            continue
        readers = [name for name, other in RULES.items() if key in other.settings()]
        if readers:
            algorithm = f"algorithm={group.get('algorithm')!r}"
            problem = f"the key {key!r}, which this group does not read"
            needed = f"a setting of {algorithm}, or a rule that reads it"
            write = f'Leave it out, or write "algorithm": "{readers[0]}" (in from_model, rule="{readers[0]}")'
            raise ValueError(explain_error(subject, problem, needed, write))
        keys = (*rule.settings(), *_GROUP_KEYS)
        if key in _SPLITS:
            write = f'Write overrides={{name: {{"matrices": {_SPLITS[key]!r}}}}}, with your numbers'
            raise ValueError(explain_error(subject, f"the key {key!r}", "an entry of 'matrices'", write))
        meant = _OTHER_NAMES.get(key) or next(iter(difflib.get_close_matches(str(key), keys, 1, 0.8)), None)
        if meant is not None:
            raise ValueError(explain_error(subject, f"the key {key!r}", f"{meant!r}", "Rename it"))
        similar = [name for name in rule.settings() if str(key) in name]  # beta2: normuon_beta2
        near = [f" (the nearest is {name!r})" for name in similar or difflib.get_close_matches(str(key), keys)]
        problem, needed = f"the key {key!r}, which muonmesh does not know", f"a setting{''.join(near[:1])}"
        write = f"Remove it or, if a framework of yours reads it, write muonmesh.settings.FOREIGN_KEYS.add({key!r})"
        raise ValueError(explain_error(subject, problem, needed, write))
