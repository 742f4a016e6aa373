"""Engine: a model under torch's own parallelism, with the optimizer that trains it."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

import muonmesh as mm
from muonmesh.tools.cli.model import parallelise
from muonmesh.tools.cli.run_settings import Optimizer, Settings


class Engine:
    """A model that trains under torch's own parallelism, and its optimizer. Every method is called on all ranks.

    The trainings with Muon and with AdamW use the same groups (:func:`muonmesh.split_params`), the same weight decay
    and the same schedule. Neither decays vectors.

    Attributes:
        model: The wrapped or sharded model.
        optimizer: The optimizer that steps: `muonmesh.Muon`, or `torch.optim.AdamW`.
        saved: The optimizer for `muonmesh.checkpoint`. In the AdamW training, this is a `muonmesh.Muon` that has only
            AdamW groups and shares the state of ``optimizer``.
    """

    model: Any
    optimizer: Any
    saved: Any

    def __init__(self, name: Optimizer, model: nn.Module, settings: Settings, device: torch.device) -> None:
        self._clip = settings.clip
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

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """Return the context of one micro-step's forward and backward: gradients are reduced in the last one only."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)
        elif isinstance(self.model, DistributedDataParallel) and not last:
            return self.model.no_sync()
        return nullcontext()

    def update(self) -> None:
        """Clip and step. `muonmesh.Muon` clips only AdamW's gradients, since the size of Muon's update is fixed."""
        if self._clip and isinstance(self.optimizer, mm.Muon):
            self.optimizer.clip_grad_norm_(self._clip, norms=False)
        elif self._clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        self.optimizer.step()

    def explain(self) -> str:
        """Return the explanation of the optimizer's plan, as text."""
        kind = "" if self.optimizer is self.saved else "torch.optim.AdamW, by these groups\n\n"
        return f"{kind}{self.saved.explain()}"

    def metrics(self) -> dict[str, float | None]:
        """Return the optimizer's metrics of its last step, with None for non-finite values; empty for AdamW."""
        figures = self.optimizer.metrics() if isinstance(self.optimizer, mm.Muon) else {}
        return {key: float(value) if math.isfinite(value) else None for key, value in figures.items()}
