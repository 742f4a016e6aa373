"""Config: sets in DeepSpeed's config what a client optimizer needs, and refuses settings that give wrong updates."""

from __future__ import annotations

import copy
import inspect
import json
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime import lr_schedules
from deepspeed.utils import log_dist

from muonmesh.errors import explain_error
from muonmesh.integrations.refusals import Refusals, refuse_settings


def read_config(config: Any) -> dict[str, Any]:
    """Return a copy of a config, given as a mapping or as the path of a JSON file, without sections that are null.

    Raises:
        TypeError: ``config`` is neither a mapping nor a path.
    """
    settings: Any = json.loads(Path(config).read_text()) if isinstance(config, (str, Path)) else config
    if not isinstance(settings, Mapping):
        raise TypeError(explain_error("config", f"{config!r}", "a dict or the path of a JSON file", "Pass either"))
    return copy.deepcopy({key: section for key, section in settings.items() if section is not None})


_ZERO = "zero_optimization"
_BF16_MASTERS = "bf16.bf16_master_weights_and_grads"
_CPU_ADAM = "zero_force_ds_cpu_optimizer"
_DROPS = "Remove it: it drops state. Write muonmesh.checkpoint.save and muonmesh.checkpoint.load to move to other sizes"
_SWAPS = "with another, such as nvme, tensors that are swapped out cannot be exchanged"

_REFUSED: Refusals = {
    _CPU_ADAM: ((False,), "Remove it: DeepSpeed's Adam would replace Muon"),
    "optimizer": ((), "Remove it and write initialize(optimizer={...})"),
    "bfloat16": ((), 'Write "bf16"'),
    "zero_allow_untested_optimizer": ((True,), "Remove it: Muon is a client optimizer"),
    "torch_autocast.dtype": (
        ("bfloat16", "bf16", "torch.bfloat16", torch.bfloat16),
        'Write "dtype": "bfloat16": the GradScaler of fp16 skips each group on its own, rank by rank',
    ),
    "fp16.fp16_master_weights_and_grads": (
        (False,),
        "Remove it; the engine then has fp32 master weights. Only DeepSpeed's Adam steps fp16 master weights",
    ),
    "expert_parallel.enabled": (
        (False,),
        "Remove it, or build the model with layers of deepspeed.moe: AutoEP packs several parameters into one",
    ),
    "checkpoint.load_universal": ((False,), _DROPS),
    f"{_ZERO}.elastic_checkpoint": ((False,), _DROPS),
    f"{_ZERO}.cpu_offload": ((False,), 'Write "offload_optimizer": {"device": "cpu"}'),
    f"{_ZERO}.cpu_offload_param": ((False,), 'Write "offload_param": {"device": "cpu"}'),
    f"{_ZERO}.offload_optimizer.device": (("cpu", "none"), f'Write "offload_optimizer": {{"device": "cpu"}}: {_SWAPS}'),
    f"{_ZERO}.offload_param.device": (("cpu", "none"), f'Write "offload_param": {{"device": "cpu"}}: {_SWAPS}'),
    f"{_ZERO}.offload_optimizer.ratio": (
        (1,),
        "Remove ratio to offload everything, or remove offload_optimizer: DeepSpeed's Adam steps the rest",
    ),
    f"{_ZERO}.offload_optimizer.super_offload": ((False,), "Remove super_offload: it steps in another process"),
    f"{_ZERO}.zenflow": ((), "Remove zenflow: it replaces the optimizer step"),
    f"{_ZERO}.mics_shard_size": ((-1,), "Remove mics_shard_size: it replaces the optimizer step"),
    f"{_ZERO}.zero_quantized_weights": (
        (False,),
        "Remove it: with rounded weights in the modules, muonmesh cannot check where DeepSpeed keeps them",
    ),
}
"""Settings that would give a wrong update, or that DeepSpeed stops without saying what to write for muonmesh."""

_ADDED = {
    "zero_allow_untested_optimizer": True,  # Muon is a client optimizer
    _CPU_ADAM: False,  # Muon steps offloaded tensors itself
    "gradient_clipping": 0.0,  # DeepSpeed's default 1.0 clips by the norm of all gradients
}


def _setting(config: Mapping[str, Any], path: str) -> Any:
    """Return a setting of the config by its path; None if it is missing or "auto", as DeepSpeed reads it."""
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return None if value == "auto" else value


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
    setting = partial(_setting, config)
    refused = dict(_REFUSED)
    if isinstance(setting(_ZERO), bool):
        refused[_ZERO] = (), 'Write "zero_optimization": {"stage": 1}, or remove it for stage 0'
    if has_experts:
        write = 'Write "zero_optimization": {"stage": 2}: DeepSpeed partitions experts of all ranks as if they were one'
        refused[f"{_ZERO}.stage"] = (0, 1, 2), write
    if not setting(f"{_ZERO}.stage"):
        write = 'Write "zero_optimization": {"stage": 1}, or use bf16: stage 0 does not unscale fp32 gradients'
        refused["fp16.enabled"] = (False,), write
    offloads = setting(f"{_ZERO}.offload_optimizer.device") not in (None, "none")
    if offloads or not setting("bf16.bf16_optimizer_states"):
        write = 'Remove it, or add "bf16_optimizer_states": true and remove offload_optimizer: '
        refused[_BF16_MASTERS] = (False,), write + "other bf16 master weights need DeepSpeed's Adam"
    refuse_settings("config", setting, refused)
    added = {key: value for key, value in _ADDED.items() if setting(key) is None}
    config.update(added)
    if added:
        log_dist(f"muonmesh set in the config: {json.dumps(added)}", ranks=[0], level=logging.WARNING)
    return config


def prepare_host_config(config: dict[str, Any]) -> None:
    """Set ``zero_force_ds_cpu_optimizer`` to False in a framework's DeepSpeed config, in place; remove what is null.

    With offload, frameworks such as Accelerate replace any optimizer by DeepSpeed's Adam for the CPU, unless this
    setting is False. A scheduler that is null counts as a scheduler there.

    Raises:
        ValueError: the config sets it to True.
    """
    refuse_settings("config", partial(_setting, config), {_CPU_ADAM: _REFUSED[_CPU_ADAM]})
    for key in [key for key, section in config.items() if section is None]:
        del config[key]
    config[_CPU_ADAM] = False


def take_scheduler(config: dict[str, Any], lr: float | None) -> Callable[[torch.optim.Optimizer], Any] | None:
    """Remove the scheduler from a config, and return a function that creates it; None if the config has no scheduler.

    With a number in the config, DeepSpeed's schedulers set one learning rate for all groups. Here, the number is for a
    group whose rate is ``lr``. Other groups keep the ratio of their rate to ``lr``.

    Args:
        config: DeepSpeed's config; its "scheduler" section is removed.
        lr: The learning rate to which the numbers in the "scheduler" section belong. None: groups have different
            rates, and nobody has said to which of them.

    Raises:
        ValueError: neither DeepSpeed nor torch has a scheduler of this name; or it has rates, and ``lr`` is None. The
            function raises it if groups have different rates, and the scheduler has one floor for all of them.
    """
    section = config.pop("scheduler", None)
    if not section:
        return None
    name, params = str(section.get("type")), dict(section.get("params") or {})
    make = getattr(lr_schedules, name, None) or getattr(torch.optim.lr_scheduler, name, None)
    if make is None:
        problem, needed = f"a scheduler of type {name}", "one of DeepSpeed's or torch's"
        raise ValueError(explain_error("config", problem, needed, 'Rename it in "type"'))

    for key, parameter in inspect.signature(make).parameters.items():
        if key.endswith("_lr") and isinstance(parameter.default, (int, float)):
            params.setdefault(key, parameter.default)
    numbers = {key: value for key, value in params.items() if key.endswith("_lr") and isinstance(value, (int, float))}
    if any(numbers.values()) and lr is None:
        problem = f"the scheduler's {', '.join(f'{key}={value}' for key, value in numbers.items())}"
        needed = "the lr to which they belong, since groups have different rates, which keep their ratio to it"
        raise ValueError(explain_error("config", problem, needed, 'Write "lr" in optimizer={...}'))

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        if params.get("eta_min") and len(set(rates)) > 1:
            problem, needed = (
                f"eta_min={params['eta_min']} for groups with different rates",
                "0, or a ratio to each rate",
            )
            write = 'Use "WarmupCosineLR", whose cos_min_ratio is one'
            raise ValueError(explain_error("config", problem, needed, write))
        in_proportion = {key: [value * (rate / lr) for rate in rates] for key, value in numbers.items()} if lr else {}
        return make(optimizer, **{**params, **in_proportion})

    return schedule
