"""verl: ``VERL_USE_EXTERNAL_MODULES=muonmesh.integrations.verl`` in the environment of its workers.

verl imports the module at the end of ``import verl``, and its FSDP engine then makes our optimizer. Elsewhere it hands
bare parameters to the class that its configuration names, which do not say which of them is an embedding; here the
optimizer is made of the engine's module.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from muonmesh.build import from_model
from muonmesh.errors import LayoutError, explain_error
from muonmesh.integrations.arguments import with_dtypes

_REPLACED = ("torch.optim", "AdamW")  # what verl takes where the configuration names no optimizer
_verl_s = FSDPEngine._build_optimizer


def build_optimizer(engine: FSDPEngine, module: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of an engine: ours in place of verl's default, torch's AdamW.

    Learning rate, weight decay and betas, which are those of the AdamW half, are the engine's; arguments of
    `muonmesh.from_model`, by name, stand under its ``override_optimizer_config``. Another optimizer that the
    configuration names is made as verl makes it.

    Args:
        engine: Made, but for its optimizer.
        module: Its model, sharded by FSDP2.

    Raises:
        LayoutError: FSDP1 shards the model.
        TypeError, ValueError: a setting is unknown or wrong; the message says what to write.
    """
    config = engine.optimizer_config
    if (config.optimizer_impl, config.optimizer) != _REPLACED:
        named: torch.optim.Optimizer = _verl_s(engine, module)
        return named
    if isinstance(module, FullyShardedDataParallel):
        found, needed = "the strategy fsdp, which flattens parameters", "fsdp2, which keeps their shapes"
        write = "Write strategy=fsdp2, as in actor_rollout_ref.actor.strategy=fsdp2"
        raise LayoutError(explain_error("verl's FSDP engine", found, needed, write))
    settings: dict[str, Any] = with_dtypes(config.override_optimizer_config or {})
    given = {"process_group": "auto", "adamw_betas": tuple(config.betas), **settings}
    return from_model(module, lr=config.lr, weight_decay=config.weight_decay, **given)


FSDPEngine._build_optimizer = build_optimizer
