"""Config: sets in DeepSpeed's config what a client optimizer needs, and refuses settings that give wrong updates."""

from __future__ import annotations

import copy
import inspect
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime import lr_schedules
from deepspeed.utils import log_dist

from muonmesh.errors import explain_error

# The arguments of schedulers that are learning rates; the others are numbers of steps, ratios and momenta.
_RATES = (
    "warmup_min_lr",
    "warmup_max_lr",
    "cycle_min_lr",
    "cycle_max_lr",
    "lr_range_test_min_lr",
    "max_lr",
    "base_lr",
)


def read_config(config: Any) -> dict[str, Any]:
    """Return a copy of a config, given as a mapping or as the path of a JSON file.

    Raises:
        TypeError: ``config`` is neither a mapping nor a path.
    """
    found: Any = json.loads(Path(config).read_text()) if isinstance(config, (str, Path)) else config
    if not isinstance(found, Mapping):
        raise TypeError(explain_error("config", f"{config!r}", "a dict or the path of a JSON file", "Pass either"))
    return copy.deepcopy(dict(found))


@dataclass(frozen=True)
class _Refusal:
    """A setting that would give a wrong update, or that DeepSpeed stops without saying what to write for muonmesh.

    Attributes:
        path: The keys that lead to the setting, joined by dots.
        allowed: The values that work. A missing setting works too.
        needed: What the setting must be, and why.
        write: What the user should do.
        stages: The ZeRO stages at which the setting is refused.
        unless: Whether other settings make this setting work, given a function that returns a setting by its path.
    """

    path: str
    allowed: tuple[Any, ...]
    needed: str
    write: str
    stages: str = "0123"
    unless: Callable[[Callable[[str], Any]], bool] = lambda setting: False


_ZERO = "zero_optimization"
_DEVICES = ("cpu", "none")
_STAGE_1 = '"zero_optimization": {"stage": 1}'
_OURS = "Remove it. muonmesh.checkpoint.save and muonmesh.checkpoint.load move between sizes and stages"
_DROPS = "false: it drops settings of groups, or state that DeepSpeed does not know"
_SWAPPED = "cpu or none: swapped-out tensors cannot be exchanged"
_CPU_ADAM = _Refusal("zero_force_ds_cpu_optimizer", (False,), "false: DeepSpeed's Adam would replace Muon", "Remove it")

_REFUSED = (
    _CPU_ADAM,
    _Refusal("optimizer", (), "none: muonmesh is one", "Remove it and write initialize(optimizer={...})"),
    _Refusal("zero_allow_untested_optimizer", (True,), "true: Muon is a client optimizer", "Remove it", "123"),
    _Refusal("fp16.enabled", (False,), "unscaled fp32 gradients at stage 0", f"Write {_STAGE_1}, or use bf16", "0"),
    _Refusal(
        "torch_autocast.dtype",
        (),
        "bf16: the GradScaler of fp16 skips each group on its own, rank by rank",
        'Write "torch_autocast": {"enabled": true, "dtype": "bfloat16"}',
        unless=lambda setting: not (setting("torch_autocast.enabled") and _is_fp16(setting("torch_autocast.dtype"))),
    ),
    _Refusal(
        "fp16.fp16_master_weights_and_grads",
        (False,),
        "false: only DeepSpeed's Adam steps fp16 master weights",
        "Remove it; the engine then has fp32 master weights",
    ),
    _Refusal(
        "bf16.bf16_master_weights_and_grads",
        (False,),
        "bf16_optimizer_states too, and no offload: all other bf16 master weights need DeepSpeed's Adam",
        'Add "bf16_optimizer_states": true and remove offload_optimizer, or remove bf16_master_weights_and_grads',
        unless=lambda setting: setting("bf16.bf16_optimizer_states") and not _offloads(setting),
    ),
    _Refusal(f"{_ZERO}.elastic_checkpoint", (False,), _DROPS, _OURS),
    _Refusal("checkpoint.load_universal", (False,), _DROPS, _OURS),
    _Refusal(f"{_ZERO}.offload_optimizer.device", _DEVICES, _SWAPPED, 'Write "offload_optimizer": {"device": "cpu"}'),
    _Refusal(f"{_ZERO}.offload_param.device", _DEVICES, _SWAPPED, 'Write "offload_param": {"device": "cpu"}'),
    _Refusal(
        f"{_ZERO}.offload_optimizer.ratio",
        (1,),
        "1.0: DeepSpeed's Adam steps the part that stays on the device",
        "Remove ratio to offload everything, or remove offload_optimizer",
    ),
    _Refusal(
        f"{_ZERO}.offload_optimizer.super_offload",
        (False,),
        "false: it steps sub-groups in another process",
        "Remove super_offload",
    ),
    _Refusal(f"{_ZERO}.zenflow", (False,), "none: it replaces the optimizer step", "Remove zenflow"),
    _Refusal(f"{_ZERO}.mics_shard_size", (-1,), "none: it replaces the optimizer step", "Remove mics_shard_size"),
    _Refusal(
        f"{_ZERO}.zero_quantized_weights",
        (False,),
        "false: with rounded weights in the modules, muonmesh cannot check where DeepSpeed keeps them",
        "Remove it",
        "3",
    ),
)


def _setting(config: Mapping[str, Any], path: str) -> Any:
    """Return a setting of the config by its path; None if it is missing or "auto", as DeepSpeed reads it."""
    found: Any = config
    for key in path.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return None if found == "auto" else found


def _is_fp16(dtype: Any) -> bool:
    return str(dtype).removeprefix("torch.") in ("float16", "fp16", "half")


def _offloads(setting: Callable[[str], Any]) -> bool:
    return setting(f"{_ZERO}.offload_optimizer.device") not in (None, "none")


def _refuse(config: Mapping[str, Any], refusals: Iterable[_Refusal]) -> None:
    setting = partial(_setting, config)
    stage = str(setting(f"{_ZERO}.stage") or 0)
    for one in refusals:
        value = setting(one.path)
        if value is None or value in one.allowed or stage not in one.stages or one.unless(setting):
            continue
        found = one.path if isinstance(value, Mapping) else f"{one.path} {json.dumps(value, default=str)}"
        raise ValueError(explain_error("config", found, one.needed, one.write))


def _in_present_form(config: dict[str, Any]) -> list[str]:
    """Replace the deprecated forms of settings in a config, which DeepSpeed still reads, and return what was set."""
    said = []
    if "bfloat16" in config:
        config.setdefault("bf16", config.pop("bfloat16"))
    if isinstance(config.setdefault(_ZERO, {}), bool):
        config[_ZERO] = {"stage": int(config[_ZERO])}
    zero = config[_ZERO]
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if new not in zero and zero.pop(old, None):
            zero[new] = {"device": "cpu"}
            said.append(f'{new}: {{"device": "cpu"}} (for {old})')
    return said


def prepare_config(config: dict[str, Any], *, has_experts: bool) -> dict[str, Any]:
    """Add the settings that a client optimizer needs to a config, and log them.

    Args:
        config: The config; changed in place.
        has_experts: Whether the model has layers of `deepspeed.moe`.

    Returns:
        The config.

    Raises:
        ValueError: a setting in the config would give a wrong update; the message says what to write.
    """
    said = _in_present_form(config)
    _refuse(config, _REFUSED)
    setting = partial(_setting, config)
    stage = str(setting(f"{_ZERO}.stage") or 0)
    if has_experts and stage == "3":
        found, write = "experts (deepspeed.moe) at stage 3", 'Write "zero_optimization": {"stage": 2}'
        needed = "stage 0, 1 or 2: DeepSpeed partitions experts of different ranks as if they were one"
        raise ValueError(explain_error("config", found, needed, write))
    added: dict[str, tuple[Any, str]] = {}
    if stage != "0":
        added["zero_allow_untested_optimizer"] = True, "Muon is a client optimizer"
    if _offloads(setting):
        added[_CPU_ADAM.path] = False, "Muon steps the offloaded tensors itself"
    added["gradient_clipping"] = 0.0, "DeepSpeed's default 1.0 clips by the norm of all gradients; see clip="
    for key, (value, why) in added.items():
        if setting(key) is None:
            config[key] = value
            said.append(f"{key}: {json.dumps(value)} ({why})")
    if said:
        log_dist("muonmesh set in the config: " + "; ".join(said), ranks=[0], level=logging.WARNING)
    return config


def prepare_host_config(config: dict[str, Any]) -> None:
    """Set ``zero_force_ds_cpu_optimizer`` to False in a framework's DeepSpeed config, in place.

    With offload, frameworks such as Accelerate replace any optimizer by DeepSpeed's Adam for the CPU, unless this
    setting is False.

    Raises:
        ValueError: the config sets it to True.
    """
    _refuse(config, [_CPU_ADAM])
    config[_CPU_ADAM.path] = False


def take_scheduler(config: dict[str, Any], lr: float) -> Callable[[torch.optim.Optimizer], Any] | None:
    """Remove the scheduler from a config, and return a function that creates it; None if the config has no scheduler.

    With a number in the config, DeepSpeed's schedulers set one learning rate for all groups. Here, the number is for a
    group whose rate is ``lr``. Other groups keep the ratio of their rate to ``lr``.

    Args:
        config: DeepSpeed's config; its "scheduler" section is removed.
        lr: The learning rate to which the numbers in the "scheduler" section belong.

    Raises:
        ValueError: neither DeepSpeed nor torch has a scheduler of this name.
    """
    section = config.pop("scheduler", None)
    if section is None:
        return None
    name, params = section["type"], dict(section.get("params", {}))
    make = getattr(lr_schedules, name, None) or getattr(torch.optim.lr_scheduler, name, None)
    if make is None:
        raise ValueError(explain_error("config", f"a scheduler {name!r}", "one of DeepSpeed's or torch's", "Rename it"))

    for key, parameter in inspect.signature(make).parameters.items():
        if key in _RATES and isinstance(parameter.default, (int, float)):
            params.setdefault(key, parameter.default)
    numbers = {key: value for key, value in params.items() if lr and key in _RATES and isinstance(value, (int, float))}

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        in_proportion = {key: [value * (rate / lr) for rate in rates] for key, value in numbers.items()}
        return make(optimizer, **{**params, **in_proportion})

    return schedule
