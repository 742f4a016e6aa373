"""Accelerate: the optimizer of a model that ``accelerator.prepare`` wraps or shards.

The optimizer works with every launch setting of an `accelerate.Accelerator`, so the same script runs in one process and
in many.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState
from torch import nn

from muonmesh.build import from_model as core_from_model
from muonmesh.optimizer import Muon


def from_model(
    accelerator: Accelerator, model: nn.Module, lr: float = 3e-4, **settings: Any
) -> Muon | torch.optim.Optimizer:
    """Return the optimizer for a model that ``accelerator.prepare(model, optimizer, ...)`` wraps or shards later.

    The optimizer finds at its first step which ranks hold copies of the same plain matrices (``process_group="auto"``).
    ``accelerator.optimizer_step_was_skipped`` says whether the last step changed nothing, under a GradScaler and under
    ``clip_grad_norm_(skip_above=...)``; the learning-rate schedule then does not advance. Under DeepSpeed the result is
    the optimizer of `muonmesh.integrations.deepspeed`, which steps the engine's flat tensors.

    Args:
        accelerator: The Accelerator that prepares the model.
        model: The model, before ``accelerator.prepare``. Without DeepSpeed, a prepared model works too.
        lr: Learning rate of Muon's and AdamW's parameters.
        settings: Further arguments of `muonmesh.from_model`, by name. Under DeepSpeed, the settings that
            `muonmesh.integrations.deepspeed.initialize` takes as ``optimizer=``.

    Raises:
        TypeError, ValueError: a setting is unknown or wrong; the message says what to write.
    """
    return optimizer_for(model, {"lr": lr, **settings}, lambda _: accelerator._optimizers)


def optimizer_for(
    model: nn.Module, settings: Mapping[str, Any], wrappers: Callable[[Muon], list[AcceleratedOptimizer]]
) -> Muon | torch.optim.Optimizer:
    """Return the optimizer of a model that Accelerate prepares, under DeepSpeed that for the engine.

    A hook marks the steps that changed nothing in Accelerate's wrapper of the optimizer. The wrapper assumes that a
    GradScaler calls ``step`` only if the step is taken. But a GradScaler always calls `Muon.step`, so that all ranks
    skip together.

    Args:
        model: The model.
        settings: Arguments of `muonmesh.from_model`, or under DeepSpeed of `muonmesh.integrations.deepspeed`, by name.
        wrappers: Returns Accelerate's wrappers after a step of the optimizer. At most one of them wraps it.
    """
    if AcceleratorState._shared_state.get("distributed_type") == DistributedType.DEEPSPEED:
        from muonmesh.integrations.deepspeed.config import prepare_host_config  # DeepSpeed need not be installed
        from muonmesh.integrations.deepspeed.initialize import hosted

        prepare_host_config(AcceleratorState().deepspeed_plugin.deepspeed_config)
        return hosted(model, settings)
    optimizer = core_from_model(model, **{"process_group": "auto", **settings})

    def tell(stepped: torch.optim.Optimizer, *_: object) -> None:
        for wrapper in wrappers(optimizer):
            if wrapper.optimizer is stepped:
                wrapper._is_overflow = optimizer.skipped
                # Under a GradScaler the wrapper reads this attribute afterwards; False means an overflow.
                wrapper._accelerate_step_called = not optimizer.skipped

    optimizer.register_step_post_hook(tell)
    return optimizer
