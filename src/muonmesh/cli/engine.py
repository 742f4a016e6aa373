"""Engine: what takes a training's steps, torch's own parallelism or DeepSpeed's engine. Each does the same for both."""

from __future__ import annotations

import logging
import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

import muonmesh as mm
from muonmesh.cli.model import parallelise
from muonmesh.cli.run_settings import Optimizer, Settings


class Engine:
    """A model that learns under torch's own parallelism. Every method is called on all ranks.

    The two opponents are built alike: with the groups of :func:`muonmesh.split_params`, so vectors are decayed by
    neither, the same decay and the same schedule.

    Attributes:
        model: The model as the ranks hold it.
        optimizer: What steps: `muonmesh.Muon`, or `torch.optim.AdamW`.
        saved: What `muonmesh.checkpoint` takes as the optimizer. In the AdamW training, a `muonmesh.Muon` whose groups
            are all AdamW's, and which has the same state.
    """

    model: Any
    optimizer: Any
    saved: Any

    def __init__(self, name: Optimizer, model: nn.Module, settings: Settings, device: torch.device) -> None:
        self._clip, self._micro_steps = settings.clip, settings.grad_accum
        self.model = parallelise(model, parallel=settings.parallel, dtype=settings.dtype, device=device)
        self.optimizer = self.saved = mm.Muon(
            mm.split_params(self.model, overrides=None if name == "muon" else {".*": "adamw"}),
            process_group="world" if settings.parallel == "ddp" else None,
            lr=settings.lr_of(name),
            weight_decay=settings.weight_decay,
        )
        if name == "adamw":
            groups = [
                {"params": group["params"], "weight_decay": group["weight_decay"]} for group in self.saved.param_groups
            ]
            known = self.saved.defaults
            betas, eps = known["adamw_betas"], known["adamw_eps"]
            self.optimizer = torch.optim.AdamW(groups, lr=known["lr"], betas=betas, eps=eps, fused=True)
            self.optimizer.state = self.saved.state

    def begin(self) -> None:
        """Forget the gradients of the last step."""
        self.optimizer.zero_grad(set_to_none=True)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradients of one of the micro-steps; ``last`` says whether the update follows."""
        (loss / self._micro_steps).backward()  # type: ignore[no-untyped-call]

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """Return the context of one micro-step's forward and backward: gradients are reduced in the last one only."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)
        elif isinstance(self.model, DistributedDataParallel) and not last:
            return self.model.no_sync()
        return nullcontext()

    def update(self) -> None:
        """Clip and step. Muon clips what its AdamW groups hold: its own update has no magnitude."""
        if self._clip and isinstance(self.optimizer, mm.Muon):
            self.optimizer.clip_grad_norm_(self._clip, norms=False)
        elif self._clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        self.optimizer.step()

    def explain(self) -> str:
        """Return who goes where and why, as text."""
        kind = "" if self.optimizer is self.saved else "torch.optim.AdamW, by these groups\n\n"
        return f"{kind}{self.saved.explain()}"

    def metrics(self) -> dict[str, float]:
        """Return what the optimizer says of its last step; nothing for AdamW."""
        figures = self.optimizer.metrics() if isinstance(self.optimizer, mm.Muon) else {}
        return {key: float(value) for key, value in figures.items()}  # on a device they are tensors

    def close(self) -> None:
        """Give back the memory. Here nothing outlives the object."""


class ZeroEngine(Engine):
    """ZeRO at stage 1, 2 or 3. AdamW's training is the same engine with every parameter in AdamW groups."""

    def __init__(self, name: Optimizer, model: nn.Module, settings: Settings, device: torch.device) -> None:
        if settings.device == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed
        from deepspeed.utils import logger

        from muonmesh.integrations.deepspeed import initialize

        logger.setLevel(logging.WARNING)
        # It calls collectives by names that newer versions of torch have renamed.
        warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
        if settings.device == "cpu":  # it would compile an extension for shared memory, which only inference uses
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        optimizer = {"lr": settings.lr_of(name), "weight_decay": settings.weight_decay}
        config = {
            "train_micro_batch_size_per_gpu": settings.micro_batch,
            "gradient_accumulation_steps": settings.grad_accum,
            "zero_optimization": {"stage": settings.zero},
            "bf16": {"enabled": settings.dtype == "bf16"},
            "communication_data_type": "fp32",  # gradients are summed as under FSDP2
        }
        self.model, *_ = initialize(
            model=model.to(device),
            config=config,
            optimizer=optimizer if name == "muon" else {**optimizer, "overrides": {".*": "adamw"}},
            clip=settings.clip or None,
        )
        self.optimizer = self.saved = self.model.basic_optimizer

    def begin(self) -> None:
        """Nothing: the engine has forgotten the gradients of its last step."""

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradients of one micro-step; the engine divides by their number, and counts them by its steps."""
        self.model.backward(loss)
        if not last:
            self.model.step()

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """Return nothing: the engine knows when to reduce."""
        return nullcontext()

    def update(self) -> None:
        """Clip and step."""
        self.model.step()

    def explain(self) -> str:
        """Return who goes where and why, call by call."""
        return str(self.optimizer.explain())

    def metrics(self) -> dict[str, float]:
        """Return nothing: the gradients of flat tensors are gone when the step is done."""
        return {}

    def close(self) -> None:
        """Take the engine's hooks off the model, which keep both alive."""
        self.model.destroy()
