"""Engine: what takes a training's steps, torch's own parallelism or DeepSpeed's engine. Each does the same for both."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from muonmesh.cli.clock import CollectiveClock
from muonmesh.cli.model import parallelise
from muonmesh.cli.optimizers import build_optimizer, clip_gradients, communication_seconds, explain, metrics
from muonmesh.cli.settings import Optimizer, Settings


class Engine(Protocol):
    """A model that learns. Every method is called on all ranks."""

    model: nn.Module

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's param groups, whose learning rates may be set."""

    def begin(self) -> None:
        """Forget the gradients of the last step."""

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradients of one of the micro-steps; ``last`` says whether the update follows."""

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """Return the context of one micro-step's forward and backward."""

    def update(self, clock: CollectiveClock) -> float:
        """Clip, step, and return the host seconds that this waited for other ranks."""

    def explain(self) -> str:
        """Who goes where and why, as text."""

    def metrics(self) -> dict[str, float]:
        """What the optimizer says of its last step."""

    def state(self) -> dict[str, Any]:
        """Model and optimizer by parameter name, for `torch.distributed.checkpoint`; no layout shows in it.

        Without settings: those of a run never change, and each engine has groups of its own.
        """

    def restore(self, state: Mapping[str, Any]) -> None:
        """Write what `state` returned."""

    def close(self) -> None:
        """Give back the memory."""


def make_engine(name: Optimizer, model: nn.Module, settings: Settings, device: torch.device) -> Engine:
    """Return what trains a freshly initialised model with one of the optimizers."""
    if settings.zero:
        from muonmesh.cli.zero import ZeroEngine

        return ZeroEngine(name, model.to(device), settings)
    return TorchEngine(name, model, settings, device)


class TorchEngine:
    """DDP, FSDP2 and what is made with meshes."""

    def __init__(self, name: Optimizer, model: nn.Module, settings: Settings, device: torch.device) -> None:
        self.model = parallelise(model, parallel=settings.parallel, dtype=settings.dtype, device=device)
        self.optimizer = build_optimizer(name, self.model, settings)
        self._clip, self._micro_steps = settings.clip, settings.grad_accum

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's param groups."""
        return self.optimizer.param_groups

    def begin(self) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradients of one micro-step."""
        (loss / self._micro_steps).backward()  # type: ignore[no-untyped-call]

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """Reduce gradients in the last backward of a step only."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)
        elif isinstance(self.model, DistributedDataParallel) and not last:
            return self.model.no_sync()
        return nullcontext()

    def update(self, clock: CollectiveClock) -> float:
        """Clip and step."""
        with clock:
            clip_gradients(self.optimizer, self.model, self._clip)
        self.optimizer.step()
        return clock.take() + communication_seconds(self.optimizer)

    def explain(self) -> str:
        """Who goes where and why."""
        return explain(self.optimizer)

    def metrics(self) -> dict[str, float]:
        """What the optimizer says of its last step."""
        return metrics(self.optimizer)

    def state(self) -> dict[str, Any]:
        """Model and optimizer by name."""
        optimizer = get_optimizer_state_dict(self.model, self.optimizer)
        return {"model": get_model_state_dict(self.model), "optimizer": {"state": optimizer["state"]}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Write a state."""
        groups = get_optimizer_state_dict(self.model, self.optimizer)["param_groups"]
        set_model_state_dict(self.model, state["model"])
        optimizer = {"state": state["optimizer"]["state"], "param_groups": groups}
        set_optimizer_state_dict(self.model, self.optimizer, optimizer)

    def close(self) -> None:
        """Nothing outlives the object."""
