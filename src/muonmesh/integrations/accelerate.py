"""Accelerate: the optimizer for whatever ``accelerator.prepare`` makes of a model.

An `accelerate.Accelerator` wraps or shards the model, scales the loss, clips, saves and loads. The optimizer made here
fits any of its launch settings, so that the script stays the same from one process to many.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from muonmesh.integrations.settings import check_settings
from muonmesh.optimizer import Muon
from muonmesh.optimizer import from_model as core_from_model


def from_model(accelerator: Accelerator, model: nn.Module, lr: float = 3e-4, **settings: Any) -> Muon:
    """Return the optimizer for a model that ``accelerator.prepare(model, optimizer, ...)`` wraps or shards later.

    Who holds plain matrices is found at the first step (``process_group="auto"``). After a step,
    ``accelerator.optimizer_step_was_skipped`` tells whether it changed anything, under a GradScaler and under
    ``clip_grad_norm_(skip_above=...)`` alike, so that schedules stay where they are.

    Args:
        accelerator: Prepares the model.
        model: Not prepared yet, or prepared already.
        lr: Learning rate of both halves.
        settings: Further arguments of `muonmesh.from_model`, by name.

    Raises:
        TypeError, ValueError: a setting is unknown or wrong; the message says what to write.
    """
    check_settings("from_model", settings, core_from_model, decided=("model", "lr"))
    optimizer = core_from_model(model, lr, **{"process_group": "auto", **settings})
    tell_of_skipped_steps(optimizer, lambda: accelerator._optimizers)
    return optimizer


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
