"""Config: sets in DeepSpeed's config what a client optimizer needs, and refuses settings that give wrong updates."""

from __future__ import annotations

import copy
import inspect
import json
import logging
from collections.abc import Callable, Mapping
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
    zero = config.setdefault("zero_optimization", {})
    stage = zero.get("stage", 0)
    _refuse(config, zero, stage, has_experts)
    said = []
    if stage and config.get("zero_allow_untested_optimizer") is not True:
        config["zero_allow_untested_optimizer"] = True
        said.append("zero_allow_untested_optimizer: true (Muon is a client optimizer)")
    offload = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
    if offload and "zero_force_ds_cpu_optimizer" not in config:
        config["zero_force_ds_cpu_optimizer"] = False
        said.append("zero_force_ds_cpu_optimizer: false (Muon steps the offloaded tensors itself)")
    if "gradient_clipping" not in config:
        config["gradient_clipping"] = 0.0
        said.append("gradient_clipping: 0.0 (DeepSpeed's default 1.0 clips by the norm of all gradients; see clip=)")
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
    if config.setdefault("zero_force_ds_cpu_optimizer", False):
        found, needed = "zero_force_ds_cpu_optimizer true", "false, because DeepSpeed's Adam would replace Muon"
        raise ValueError(explain_error("config", found, needed, "Remove it"))


def _refuse(config: Mapping[str, Any], zero: Mapping[str, Any], stage: int, has_experts: bool) -> None:
    def refuse(found: str, needed: str, write: str) -> None:
        raise ValueError(explain_error("config", found, needed, write))

    def on(section: str) -> bool:
        value = config.get(section)
        return isinstance(value, Mapping) and bool(value.get("enabled"))

    if "optimizer" in config:
        refuse('an "optimizer" section', "none: muonmesh is one", "Remove it and write initialize(optimizer={...})")
    if config.get("zero_allow_untested_optimizer") is False and stage:
        refuse("zero_allow_untested_optimizer false", "true: Muon is a client optimizer", "Remove it")
    if on("fp16") and stage == 0:
        refuse("fp16 at stage 0", "unscaled fp32 gradients", 'Write "zero_optimization": {"stage": 1}, or use bf16')
    autocast = config.get("torch_autocast", {})
    if on("torch_autocast") and str(autocast.get("dtype", "bfloat16")).removeprefix("torch.") in ("float16", "fp16"):
        needed = "bf16: the GradScaler of fp16 skips each group on its own, rank by rank"
        refuse("torch_autocast in fp16", needed, 'Write "torch_autocast": {"enabled": true, "dtype": "bfloat16"}')
    if has_experts and stage == 3:
        needed = "stage 0, 1 or 2: DeepSpeed partitions experts of different ranks as if they were one"
        refuse("experts (deepspeed.moe) at stage 3", needed, 'Write "zero_optimization": {"stage": 2}')
    for key, section in (("elastic_checkpoint", zero), ("load_universal", config.get("checkpoint") or {})):
        if section.get(key):
            needed = "false: it drops settings of groups, or state that DeepSpeed does not know"
            write = "Remove it. muonmesh.checkpoint.save and muonmesh.checkpoint.load move between sizes and stages"
            refuse(f"{key} true", needed, write)
    for name in ("offload_optimizer", "offload_param"):
        if (zero.get(name) or {}).get("device") == "nvme":
            needed = "cpu or none: swapped-out tensors cannot be exchanged"
            refuse(f"{name} to nvme", needed, f'Write "{name}": {{"device": "cpu"}}')
    for name in ("zenflow", "mics_shard_size"):
        if zero.get(name) not in (None, False, -1):
            refuse(f"zero_optimization.{name}", "none: it replaces the optimizer step", f"Remove {name}")
    if (zero.get("offload_optimizer") or {}).get("super_offload"):
        refuse("super_offload", "none: it steps sub-groups in another process", "Remove super_offload")


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
