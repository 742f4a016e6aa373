"""Accelerate: the optimizer for whatever ``accelerator.prepare`` makes of a model.

An `accelerate.Accelerator` wraps or shards the model, scales the loss, clips, saves and loads. The optimizer made here
fits any of its launch settings, so that the script stays the same from one process to many.
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

    Who holds plain matrices is found at the first step (``process_group="auto"``). After a step,
    ``accelerator.optimizer_step_was_skipped`` tells whether it changed anything, under a GradScaler and under
    ``clip_grad_norm_(skip_above=...)`` alike, so that schedules stay where they are. Under DeepSpeed the engine steps
    flat tensors, and the optimizer is that of `muonmesh.integrations.deepspeed`.

    Args:
        accelerator: Prepares the model.
        model: Not prepared yet, or, but for DeepSpeed, prepared already.
        lr: Learning rate of both halves.
        settings: Further arguments of `muonmesh.from_model`, by name; under DeepSpeed those that
            `muonmesh.integrations.deepspeed.initialize` takes as ``optimizer=``.

    Raises:
        TypeError, ValueError: a setting is unknown or wrong; the message says what to write.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return for_deepspeed(model, {"lr": lr, **settings})
    optimizer = core_from_model(model, lr, **{"process_group": "auto", **settings})
    tell_of_skipped_steps(optimizer, lambda: accelerator._optimizers)
    return optimizer


def for_deepspeed(model: nn.Module, settings: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Return the optimizer for the engine that Accelerate makes of a model."""
    from muonmesh.integrations.deepspeed.config import prepare_host_config  # DeepSpeed need not be installed
    from muonmesh.integrations.deepspeed.initialize import hosted

    prepare_host_config(AcceleratorState().deepspeed_plugin.deepspeed_config)
    return hosted(model, settings)


def tell_of_skipped_steps(optimizer: Muon, wrappers: Callable[[], list[AcceleratedOptimizer]]) -> None:
    """Let Accelerate's wrapper of an optimizer know which steps changed nothing.

    It takes a step that a GradScaler calls for one that was taken. But `Muon` is called in any case, so that all ranks
    skip together.

    Args:
        optimizer: Told of after each of its steps.
        wrappers: Returns Accelerate's wrappers, of which at most one is of this optimizer.
    """

    def tell(stepped: torch.optim.Optimizer, *_: object) -> None:
        for wrapper in wrappers():
            if wrapper.optimizer is stepped:
                wrapper._is_overflow = optimizer.skipped
                # Under a GradScaler the wrapper looks at this afterwards, and takes False for an overflow.
                wrapper._accelerate_step_called = not optimizer.skipped

    optimizer.register_step_post_hook(tell)
