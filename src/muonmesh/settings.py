"""Settings: what the arguments and the groups may say, checked once, before anything is built."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, NamedTuple, TypedDict, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from muonmesh.errors import about, explain_error
from muonmesh.numerics.dtypes import COMPUTE_DTYPES, HELD_DTYPES, NEEDED_COMPUTE, NEEDED_HELD
from muonmesh.numerics.kernels import KernelName as KernelName
from muonmesh.numerics.kernels import check_kernels
from muonmesh.numerics.newton_schulz import Method, resolve_method
from muonmesh.numerics.rules import RULES, DecayMode, Hyperparameters, check_keeps, is_known, is_matrix_rule, rule_of
from muonmesh.numerics.scale import ScaleMode

StateDtype = torch.dtype | Literal["int8"]
"""What momentum is kept in; "int8" has a scale for each block of 256 elements."""

StateDevice = Literal["cpu"] | None
"""Where what has a number for each element of a parameter is kept; None: with the parameter."""

ProcessGroup = Literal["world", "local", "auto"] | dist.ProcessGroup | None

LOST_GROUP: Any = "a ProcessGroup that was lost in pickling"
"""Stands for a ProcessGroup, which cannot be pickled, in an unpickled optimizer."""

LOST_LAYOUTS: Any = {"layouts that were lost in pickling": None}
"""Stands for declared layouts, whose meshes cannot be pickled, in an unpickled optimizer."""

_SETTINGS = (
    "lr",
    "momentum",
    "nesterov",
    "weight_decay",
    "decay_mode",
    "scale_mode",
    "extra_scale_factor",
    "ns_coefficients",
    "ns_steps",
    "ns_method",
    "adamw_betas",
    "adamw_eps",
)
ADAMW_BETAS = (0.9, 0.95)
ADAMW_EPS = 1e-8
"""AdamW's defaults. These very objects stand for "nothing was said", so that `with_torchs_names` sees what was."""

TORCHS_NAMES = {"betas": "adamw_betas", "eps": "adamw_eps"}
"""What torch.optim.AdamW calls our settings."""


class TorchsArguments(TypedDict, total=False):
    """Arguments of torch.optim.AdamW: two that are known by its names, and switches, which must be off."""

    betas: tuple[float, float]
    eps: float
    foreach: bool | None
    fused: bool | None


_GROUP_KEYS = (
    *_SETTINGS,
    "algorithm",
    "matrices",
    "params",
    "param_names",
    "name",
    "reasons",
    "use_muon",
)
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
}

_ARGUMENT = re.compile(r"(?<!\w)(?=(coefficients|steps|method)[:=])")
"""Where a message of `orthogonalize` names one of its arguments, which have a prefix in a group."""

FOREIGN_KEYS = {
    # torch's learning-rate schedulers
    *("initial_lr", "max_lr", "min_lr", "base_lr", "swa_lr", "initial_momentum", "max_momentum", "base_momentum"),
    # Megatron's
    *("wd_mult", "lr_mult", "pre_wd_mult", "pre_lr_mult", "start_wd", "end_wd", "default_config"),
    *("is_expert_parallel", "is_decoupled_lr", "skip_grad_norm_clip", "grad_norm_group"),
    # timm's; DeepSpeed's and ours under it
    *("lr_scale", "moe", "parameters"),
}
"""Keys of a group that frameworks write and read there; any other that is not ours is refused. Add to it what a
framework of yours reads."""

_TORCH_SWITCHES = ("maximize", "amsgrad", "foreach", "fused", "capturable", "differentiable")
"""Keys of torch's own optimizers that mean nothing while they are off, as in the groups of their state dicts."""


@dataclass(frozen=True)
class Precision:
    """The dtypes of one optimizer.

    Attributes:
        compute: Of orthogonalisation and wire.
        state: Of what rules keep for each element: fp32 where momentum is kept in int8.
        master: Of masters; None for none.
        kernels: What multiplies.
        int8: Whether momentum is kept in int8, with a scale for each block (`muonmesh.step.blocks`).
        on_host: Whether what has a number for each element is kept on the host (`muonmesh.step.offload`).
    """

    compute: torch.dtype
    state: torch.dtype
    master: torch.dtype | None
    kernels: KernelName = "auto"
    int8: bool = False
    on_host: bool = False

    @staticmethod
    def of(
        compute: torch.dtype,
        state: StateDtype,
        master: torch.dtype | None,
        kernels: KernelName,
        device: StateDevice,
    ) -> Precision:
        """Return what the arguments of `Muon` say."""
        if isinstance(state, str):
            return Precision(compute, torch.float32, master, kernels, int8=True)
        return Precision(compute, state, master, kernels, on_host=device is not None)

    def leaves(self, device: torch.device) -> bool:
        """Whether what has a number for each element is kept elsewhere than its parameter on ``device``."""
        return self.on_host and device.type != "cpu"

    def kept_on(self, device: torch.device) -> torch.device:
        """Return where what has a number for each element of a parameter on ``device`` is kept."""
        return torch.device("cpu") if self.leaves(device) else device

    @property
    def carried(self) -> torch.dtype:
        """Of what a rule keeps by row, column or matrix: fp32, or fp64 where any of the others is."""
        return torch.promote_types(torch.promote_types(self.compute, self.state), torch.float32)


class SettingsFound(NamedTuple):
    """What a step finds in the groups.

    Attributes:
        error: What is wrong, as far as the host can see.
        at_rest: Whether every learning rate is exactly 0.
        on_device: The learning rates that only the device knows, each with the words that begin a message.
    """

    error: Exception | None
    at_rest: bool
    on_device: list[tuple[str, Tensor]]

    def wrong_on_device(self) -> Tensor | None:
        """Return whether a learning rate that only the device knows is wrong, 0-d bool; None if there is none."""
        flags = [~((lr >= 0) & lr.isfinite()).reshape(()) for _, lr in self.on_device]
        return torch.stack(flags).any() if flags else None

    def late(self) -> Exception | None:
        """Return the error of `wrong_on_device`; waits for the device."""
        for where, lr in self.on_device:
            value = float(lr)
            if not (math.isfinite(value) and value >= 0):
                return ValueError(explain_error(f"{where}: lr", f"{value}", "a number of at least 0"))
        return None


def check_optimizer(
    *,
    compute_dtype: object,
    state_dtype: object,
    state_device: object,
    master_dtype: object,
    kernels: object,
    process_group: object,
    layouts: object,
    shard_state: object,
    bucket_cap_mb: object,
) -> None:
    """Check the settings that all groups share.

    Raises:
        ValueError: one is out of range, or this version does not have it.
    """
    needed = "a mapping of names to (mesh, placements), FlatShards or a list of FlatParameter"
    _check(layouts is None or isinstance(layouts, Mapping), "layouts", layouts, needed)
    _check(isinstance(shard_state, bool), "shard_state", shard_state, "True or False")
    found, needed = compute_dtype, f"{NEEDED_COMPUTE}. Write compute_dtype=torch.bfloat16"
    _check(found in COMPUTE_DTYPES, "compute_dtype", found, needed)
    found, needed = state_dtype, f'{NEEDED_HELD}, or "int8". Write state_dtype=torch.float32'
    _check(found in (*HELD_DTYPES, "int8"), "state_dtype", found, needed)
    known = state_device is None or state_device == "cpu"
    _check(known, "state_device", state_device, '"cpu", or None for where the parameters are')
    if state_device is not None and state_dtype == "int8":
        found, needed = 'state_device="cpu" with state_dtype="int8"', "momentum in floating point: ranks agree on the "
        needed += "blocks of all int8 momentum before the first bucket, so all of it would be on the device at once"
        raise ValueError(explain_error("Muon", found, needed, "Write state_dtype=torch.bfloat16, or no state_device"))
    found, needed = master_dtype, f"None or {NEEDED_HELD}. Write master_dtype=torch.float32"
    _check(found is None or found in HELD_DTYPES, "master_dtype", found, needed)
    _check(kernels in get_args(KernelName), "kernels", kernels, ", ".join(f'"{k}"' for k in get_args(KernelName)))
    if kernels == "compiled":  # before anything is planned; whether parameters are on a CPU is known then
        check_kernels(kernels, device=torch.device("cpu"), dtype=cast(torch.dtype, compute_dtype))
    check_process_group(process_group)
    positive = isinstance(bucket_cap_mb, (int, float)) and _is_number(bucket_cap_mb) and bucket_cap_mb > 0
    _check(positive, "bucket_cap_mb", bucket_cap_mb, "a positive number")


def check_process_group(process_group: object, words: Sequence[str] = ("world", "local", "auto")) -> None:
    """Check what stands for a process group; sends nothing.

    Args:
        process_group: What was written.
        words: The strings that stand for one: all in `Muon`, fewer in `Muon.clip_grad_norm_`.

    Raises:
        ValueError: it is nothing that stands for one, or a group that this rank is not in.
    """
    needed = ", ".join(f'"{word}"' for word in words) + ", a ProcessGroup or None"
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:  # what `new_group` gives the other ranks
        found = "a group without this rank"
        raise ValueError(explain_error("process_group", found, f"{needed}, with this rank in it"))
    named = process_group is None or (isinstance(process_group, str) and process_group in words)
    _check(named or isinstance(process_group, dist.ProcessGroup), "process_group", process_group, needed)


def refuse_partitioner(maker: object) -> None:
    """Refuse to be made by torch's ``ZeroRedundancyOptimizer``, which gives each rank other parameters.

    Args:
        maker: The object whose method makes the optimizer, if one does.

    Raises:
        TypeError: it is such an optimizer. Norms would be those of a rank's own parameters, and each rank would have
            to wait for the owner of the others' matrices.
    """
    if any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(maker).__mro__):
        needed = "all parameters on every rank, since ranks share the work by themselves"
        write = 'Write muonmesh.Muon(groups, process_group="world", shard_state=True) without ZeroRedundancyOptimizer: '
        write += "each rank then orthogonalises and stores its share"
        raise TypeError(explain_error("Muon", "ZeroRedundancyOptimizer as what makes it", needed, write))


def refuse_engine(stepper: str) -> None:
    """Refuse to be stepped by DeepSpeed's engine itself, which may have put flat tensors in the place of parameters.

    Args:
        stepper: The module that calls ``step``.

    Raises:
        TypeError: it is DeepSpeed's.
    """
    if stepper.partition(".")[0] == "deepspeed":
        needed = "its settings, given to muonmesh's own function, which finds the parameters in the engine's tensors"
        write = "Write muonmesh.integrations.deepspeed.initialize(model=model, config=config, "
        write += 'optimizer={"lr": 3e-4}) in place of deepspeed.initialize'
        raise TypeError(explain_error("deepspeed.initialize", "a muonmesh.Muon as optimizer=", needed, write))


def algorithm_of(group: Mapping[str, Any]) -> str:
    """Return a group's algorithm: its key, or the alias ``use_muon``, or "muon".

    Raises:
        ValueError: it is unknown, or the two contradict each other.
    """
    algorithm: Any = group.get("algorithm")
    if "use_muon" in group:
        alias = "muon" if group["use_muon"] else "adamw"
        of_matrices = isinstance(algorithm, str) and is_known(algorithm) and is_matrix_rule(algorithm)
        if algorithm not in (None, alias) and not (alias == "muon" and of_matrices):
            found = f"algorithm={algorithm!r} and use_muon={group['use_muon']!r}"
            raise ValueError(explain_error("group", found, "one of them", "Remove use_muon"))
        algorithm = algorithm or alias
    algorithm = "muon" if algorithm is None else algorithm
    if not isinstance(algorithm, str) or not is_known(algorithm):
        raise ValueError(explain_error("group", f"algorithm={algorithm!r}", needed_algorithm()))
    return algorithm


def needed_algorithm() -> str:
    """Return the known algorithms, for messages."""
    others = ", ".join(f'"{name}"' for name in RULES if name not in ("muon", "adamw"))
    return f'"muon" or "adamw", or another rule: {others}. Register one of your own with muonmesh.register_rule first'


def _check(holds: bool, name: str, found: object, needed: str) -> None:
    if not holds:
        raise ValueError(explain_error(name, f"{found!r}", needed))


def check_dtype(name: str, dtype: torch.dtype, master: torch.dtype | None, group: Mapping[str, Any]) -> None:
    """Check the dtype of a parameter.

    Raises:
        TypeError: nothing can be computed in it.
        ValueError: a master could not hold all of its values, or AdamW's ε would be 0 in the dtype of the moments.
    """
    if dtype not in HELD_DTYPES:
        needed, write = f"a real floating-point parameter, {NEEDED_HELD}", "Leave it out, or keep it in torch.bfloat16"
        raise TypeError(explain_error(name, f"dtype {dtype}", needed, f"{write} and cast it where it is used"))
    if master is not None and torch.promote_types(dtype, master) != master:
        wide = torch.promote_types(torch.promote_types(dtype, master), torch.float32)
        found, needed = f"dtype {dtype} and master_dtype={master}", "a master that holds all of its parameter"
        raise ValueError(explain_error(name, found, needed, f"Write master_dtype={wide}"))
    eps, moments = float(group["adamw_eps"]), master or dtype
    if group["algorithm"] == "adamw" and eps > 0 and torch.tensor(eps, dtype=moments, device="cpu") == 0:
        found = f"adamw_eps={eps} for moments in {moments}, where it is 0, so that small gradients divide by 0"
        needed = "an ε above 0"
        raise ValueError(explain_error(name, found, needed, "Write master_dtype=torch.float32, or adamw_eps=1e-4"))


def _is_number(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)


def check_group(where: str, group: Mapping[str, Any], *, read: bool = True) -> None:
    """Check the hyperparameters and the keys of a group; ``where`` begins the message.

    The constructor, new groups, loaded groups and every step's snapshot go through this.

    Args:
        where: Such as "group 'muon'".
        group: With all hyperparameters.
        read: Whether to read a learning rate that is a tensor on a device; a step does not wait for it.

    Raises:
        ValueError: one is out of range, or nobody reads a key; the message says what was found and what is needed.
    """
    for key in _SETTINGS:
        if key not in group:
            raise ValueError(explain_error(where, f"no {key!r}", "every setting", f"Set group[{key!r}] again"))
    lr = group["lr"]
    if isinstance(lr, Tensor):
        _check(lr.numel() == 1 and not lr.is_complex(), f"{where}: lr", lr, "a real tensor of one element")
        if (lr.device.type == "cpu" or read) and not lr.is_meta:
            value = float(lr.detach())
            _check(math.isfinite(value) and value >= 0, f"{where}: lr", lr, "a number of at least 0")
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
    _check_keys(where, group)
    named = {
        "scale_mode": get_args(ScaleMode),
        "ns_method": get_args(Method),
        "decay_mode": get_args(DecayMode),
    }
    for key, choices in named.items():
        known = isinstance(group[key], str) and group[key] in choices
        _check(known, f"{where}: {key}", group[key], "one of " + ", ".join(map(repr, choices)))
    steps = group["ns_steps"]
    whole = steps is None or (isinstance(steps, int) and not isinstance(steps, bool) and steps >= 1)
    _check(whole, f"{where}: ns_steps", steps, "a whole number of at least 1, or None for what the set is made for")
    coefficients, method = group["ns_coefficients"], group["ns_method"]
    try:  # whether the method fits the polynomials depends on neither shape nor dtype
        resolve_method(1, 1, coefficients=coefficients, steps=steps, method=method)
    except (TypeError, ValueError) as error:
        raise type(error)(about(where, _ARGUMENT.sub("ns_", str(error)))) from None
    if "algorithm" in group:
        try:
            rule = rule_of(group)
            rule.check()
            check_keeps(rule)
        except ValueError as error:
            raise ValueError(about(where, str(error))) from None


def with_torchs_names(defaults: Mapping[str, Any], others: TorchsArguments) -> dict[str, Any]:
    """Return the settings of all groups, with those that were given by the names of torch.optim.AdamW.

    Args:
        defaults: What our arguments say.
        others: Keyword arguments that are none of ours.

    Raises:
        ValueError: a setting is out of range, or was given by both names.
        TypeError: nobody reads an argument.
    """
    found, rest = dict(defaults), dict[str, object](others)
    for theirs, ours in TORCHS_NAMES.items():
        if theirs in rest:
            if found[ours] is not ADAMW_BETAS and found[ours] is not ADAMW_EPS:
                raise ValueError(explain_error("Muon", f"{theirs}= and {ours}=", "one of them", f"Remove {theirs}="))
            found[ours] = rest.pop(theirs)
    for name in rest.keys() - {*_TORCH_SWITCHES}:
        meant = _OTHER_NAMES.get(name) or next(iter(difflib.get_close_matches(name, _SETTINGS, 1)), None)
        write = f"Leave {name}= out" if meant is None else f"Write {meant}="
        raise TypeError(explain_error("Muon", f"the argument {name!r}", "an argument of muonmesh.Muon", write))
    check_group("Muon", {**found, **rest})
    return found


def check_groups(groups: Sequence[Mapping[str, Any]]) -> SettingsFound:
    """Check what the groups say now, at every step; an error is returned, so that the rank can tell the others."""
    error: Exception | None = None
    on_device: list[tuple[str, Tensor]] = []
    try:
        for group in groups:
            where, lr = f"group {group.get('name')!r}", group.get("lr")
            check_structure(where, group)
            check_group(where, group, read=False)
            if isinstance(lr, Tensor) and lr.device.type != "cpu":
                on_device.append((where, lr.detach()))
    except (TypeError, ValueError) as found:
        error = found
    at_rest = error is None and not on_device and all(float(group["lr"]) == 0 for group in groups)
    return SettingsFound(error, at_rest, on_device)


def check_structure(where: str, group: Mapping[str, Any]) -> None:
    """Check what a group says of itself and of its parameters.

    Raises:
        ValueError, TypeError: an entry is missing, of another type, or of another length than there are parameters.
    """
    for key in ("algorithm", "name", "params", "param_names"):
        if key not in group:
            needed = "it as the constructor had made it"
            raise ValueError(explain_error(where, f"no {key!r}", needed, f"Set group[{key!r}] again"))
    algorithm = group["algorithm"]
    known = isinstance(algorithm, str) and is_known(algorithm)
    _check(known, f"{where}: algorithm", algorithm, needed_algorithm())
    _check(isinstance(group["name"], str), f"{where}: name", group["name"], "a string")
    count = len(group["params"])
    if not isinstance(group["param_names"], (list, tuple)) or not all(isinstance(n, str) for n in group["param_names"]):
        found = f"{group['param_names']!r}"
        raise TypeError(explain_error(f"{where}: param_names", found, "a list of strings"))
    if len(group["param_names"]) != count:
        found = f"{len(group['param_names'])} param_names for {count} parameters"
        write = "Leave param_names out or give all of them; add parameters by add_param_group"
        raise ValueError(explain_error(where, found, "one each", write))
    reasons = group.get("reasons")
    fits = reasons is None or (isinstance(reasons, (list, tuple)) and len(reasons) == count)
    _check(fits, f"{where}: reasons", reasons, f"a list with one entry for each of the {count} parameters")
    specs = group.get("matrices")
    if (
        is_matrix_rule(algorithm)
        and specs is not None
        and not (isinstance(specs, (list, tuple)) and len(specs) == count)
    ):
        found, needed = f"matrices={specs!r} for {count} parameters", "a list with one entry per parameter"
        write = 'Write "matrices": ["whole", ("rows", 768, 768, 768), ...]'
        raise ValueError(explain_error(where, found, needed, write))


def _check_keys(where: str, group: Mapping[str, Any]) -> None:
    """Refuse keys that nobody reads: what they ask for would silently not happen."""
    rule = RULES[group["algorithm"]] if "algorithm" in group else Hyperparameters
    for key, value in group.items():
        if key in _GROUP_KEYS or key in FOREIGN_KEYS or key in rule.settings():
            continue
        if key in _TORCH_SWITCHES:
            if value is not None and value is not False:
                write = f"Leave {key} out: muonmesh chooses its kernels by itself"
                if key not in ("foreach", "fused"):
                    write = f"Leave {key} out"
                raise ValueError(explain_error(where, f"{key}={value!r}", "False: muonmesh has no such switch", write))
            continue
        readers = [name for name, other in RULES.items() if key in other.settings()]
        if readers:
            algorithm = f"algorithm={group.get('algorithm')!r}"
            found, needed = f"the key {key!r}, which nobody reads", f"a setting of {algorithm}, or a rule that reads it"
            write = f'Leave it out, or write "algorithm": "{readers[0]}"'
            raise ValueError(explain_error(where, found, needed, write))
        meant = _OTHER_NAMES.get(key) or next(iter(difflib.get_close_matches(str(key), _GROUP_KEYS, 1, 0.8)), None)
        if meant is not None:
            raise ValueError(explain_error(where, f"the key {key!r}", f"{meant!r}", "Rename it"))
        nearest = next(iter(difflib.get_close_matches(str(key), _GROUP_KEYS, 1, 0.0)))
        found, needed = f"the key {key!r}, which nobody reads", f"a setting (the nearest is {nearest!r})"
        write = f"Remove it or, if a framework of yours reads it, write muonmesh.settings.FOREIGN_KEYS.add({key!r})"
        raise ValueError(explain_error(where, found, needed, write))
