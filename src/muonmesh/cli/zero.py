"""Zero: a training under DeepSpeed's engine. Imports deepspeed, which the extra ``muonmesh[deepspeed]`` installs."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from muonmesh.cli.clock import CollectiveClock
from muonmesh.cli.optimizers import ADAMW_BETAS, ADAMW_EPS
from muonmesh.cli.settings import Optimizer, Settings


class ZeroEngine:
    """ZeRO at stage 1, 2 or 3. AdamW's training is the same engine with every parameter in AdamW groups."""

    def __init__(self, name: Optimizer, model: nn.Module, settings: Settings) -> None:
        if settings.device == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed
        from deepspeed.utils import logger

        from muonmesh.integrations.deepspeed import get_state, initialize, set_state

        logger.setLevel(logging.WARNING)
        # It calls collectives by names that newer versions of torch have renamed.
        warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
        if settings.device == "cpu":  # it would compile an extension for shared memory, which only inference uses
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        optimizer = {
            "lr": settings.lr_of(name),
            "weight_decay": settings.weight_decay,
            "adamw_betas": ADAMW_BETAS,
            "adamw_eps": ADAMW_EPS,
        }
        self.model, *_ = initialize(
            model=model,
            config=config_of(settings),
            optimizer=optimizer if name == "muon" else {**optimizer, "overrides": {".*": "adamw"}},
            clip=settings.clip or None,
        )
        self._get_state, self._set_state = get_state, set_state

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's param groups."""
        groups: list[dict[str, Any]] = self.model.basic_optimizer.param_groups
        return groups

    def begin(self) -> None:
        """Nothing: the engine has forgotten the gradients of its last step."""

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradients of one micro-step; the engine divides by their number, and counts them by its steps."""
        self.model.backward(loss)
        if not last:
            self.model.step()

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """Nothing: the engine knows when to reduce."""
        return nullcontext()

    def update(self, clock: CollectiveClock) -> float:
        """Clip and step."""
        with clock:
            self.model.step()
        return clock.take()

    def explain(self) -> str:
        """Who goes where and why, call by call."""
        return str(self.model.basic_optimizer.explain())

    def metrics(self) -> dict[str, float]:
        """Nothing: the gradients of flat tensors are gone when the step is done."""
        return {}

    def state(self) -> dict[str, Any]:
        """Model and optimizer by name."""
        state: dict[str, Any] = self._get_state(self.model)
        return {"model": state["model"], "optimizer": {"state": state["optimizer"]["state"]}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Write a state."""
        self._set_state(self.model, state)

    def close(self) -> None:
        """Take the engine's hooks off the model, which keep both alive."""
        self.model.destroy()


def config_of(settings: Settings) -> dict[str, Any]:
    """Return DeepSpeed's config of a run."""
    return {
        "train_micro_batch_size_per_gpu": settings.micro_batch,
        "gradient_accumulation_steps": settings.grad_accum,
        "zero_optimization": {"stage": settings.zero},
        "bf16": {"enabled": settings.dtype == "bf16"},
        "communication_data_type": "fp32",  # gradients are summed as under FSDP2
    }
