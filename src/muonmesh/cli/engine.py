"""Engine: a model under torch's own parallelism with its optimizer, which take a training's steps."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
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

    def metrics(self) -> dict[str, float | None]:
        """Return what the optimizer says of its last step, None for what is not finite; nothing for AdamW."""
        figures = self.optimizer.metrics() if isinstance(self.optimizer, mm.Muon) else {}
        return {key: float(value) if math.isfinite(value) else None for key, value in figures.items()}
