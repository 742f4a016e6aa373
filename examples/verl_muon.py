"""verl: copy this file to a folder on PYTHONPATH, and set ``VERL_USE_EXTERNAL_MODULES=verl_muon`` for its workers.

verl imports this module at the end of ``import verl``. Its FSDP engine then creates the optimizer of muonmesh from the
engine's module. verl itself would pass only parameters to an optimizer class, which do not show which of them are
embeddings.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

import muonmesh as mm

_REPLACED = ("torch.optim", "AdamW")  # verl's default, if the configuration names no optimizer
_verl_s = FSDPEngine._build_optimizer


def build_optimizer(engine: FSDPEngine, module: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of an engine: muonmesh in place of verl's default, torch's AdamW.

    The engine's configuration gives the learning rate, the weight decay and AdamW's betas. Arguments of
    `muonmesh.from_model` go by name under ``override_optimizer_config``. If the configuration names another optimizer
    than the default, verl creates that optimizer as usual.

    Args:
        engine: verl's FSDP engine, complete except for its optimizer.
        module: The engine's model, sharded by FSDP2.

    Raises:
        LayoutError: FSDP1 shards the model.
        TypeError, ValueError: a setting is unknown or wrong; the message says what to write.
    """
    config = engine.optimizer_config
    if (config.optimizer_impl, config.optimizer) != _REPLACED:
        named: torch.optim.Optimizer = _verl_s(engine, module)
        return named
    if isinstance(module, FullyShardedDataParallel):
        raise mm.LayoutError("verl's FSDP engine: found the strategy fsdp (FSDP1). Write strategy=fsdp2")
    settings: dict[str, Any] = dict(config.override_optimizer_config or {})
    for key in settings:
        if key.endswith("_dtype") and settings[key] != "int8":  # named in the configuration
            settings[key] = getattr(torch, settings[key])
    given = {"process_group": "auto", "adamw_betas": tuple(config.betas), **settings}
    return mm.from_model(module, lr=config.lr, weight_decay=config.weight_decay, **given)


FSDPEngine._build_optimizer = build_optimizer
