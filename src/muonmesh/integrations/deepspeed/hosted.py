"""Hosted: the optimizer of an engine that a host makes, such as Accelerate, with `deepspeed.initialize`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import deepspeed
from torch import nn

from muonmesh.errors import explain_error
from muonmesh.integrations.deepspeed.initialize import Assembly, assemble
from muonmesh.integrations.deepspeed.optimizer import EngineMuon

_awaiting: WeakKeyDictionary[EngineMuon, tuple[Assembly, float | Mapping[str, Any] | None]] = WeakKeyDictionary()
"""Optimizers that no engine holds yet, with what is needed when one does."""


def hosted(model: nn.Module, optimizer: Mapping[str, Any], clip: float | Mapping[str, Any] | None = None) -> EngineMuon:
    """Return an optimizer for a host that gives it to `deepspeed.initialize` together with its model.

    `hosted` replaces `deepspeed.initialize` for the rest of the process. The new function treats this optimizer as
    `muonmesh.integrations.deepspeed.initialize` does, and any other optimizer as DeepSpeed does. You may make
    schedulers of the returned optimizer at once: the engine keeps its groups.

    Args:
        model: The model that the host will give to DeepSpeed.
        optimizer: As `muonmesh.integrations.deepspeed.initialize` takes it.
        clip: Likewise.

    Raises:
        TypeError, ValueError: a setting is unknown or wrong.
    """
    assembly = assemble(model, optimizer)
    made = assembly.make_optimizer()
    _awaiting[made] = assembly, clip
    if not hasattr(deepspeed.initialize, "_knows_muonmesh"):
        deepspeed.initialize = _knowing(deepspeed.initialize)
    return made


def prepare_host_config(config: dict[str, Any]) -> None:
    """Keep a host from replacing the optimizer by DeepSpeed's own, in the config that it reads, in place.

    With offload, hosts put DeepSpeed's Adam for the CPU in the place of any optimizer, unless the config says not to.

    Raises:
        ValueError: it says to.
    """
    if config.setdefault("zero_force_ds_cpu_optimizer", False):
        found, needed = "zero_force_ds_cpu_optimizer true", "false, because DeepSpeed's Adam would replace Muon"
        raise ValueError(explain_error("config", found, needed, "Remove it"))


def _knowing(original: Callable[..., tuple[Any, Any, Any, Any]]) -> Callable[..., tuple[Any, Any, Any, Any]]:
    @wraps(original)
    def initialize(*positional: Any, **given: Any) -> tuple[Any, Any, Any, Any]:
        optimizer = given.get("optimizer")
        if not isinstance(optimizer, EngineMuon) or optimizer not in _awaiting:
            return original(*positional, **given)
        assembly, clip = _awaiting.pop(optimizer)
        config = given.pop("config", None) or given.pop("config_params", None)
        # The model is the assembly's, and a list of its parameters says less than the groups do.
        others = {key: value for key, value in given.items() if key not in ("model", "optimizer", "model_parameters")}
        return assembly.initialize(original, optimizer, config, clip, others)

    initialize._knows_muonmesh = True  # type: ignore[attr-defined]
    return initialize
