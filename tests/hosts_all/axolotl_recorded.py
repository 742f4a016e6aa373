"""The example's plugin for Axolotl, which also writes what the optimizer gets. Axolotl's process imports it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from axolotl_muon import MuonPlugin
from torch import nn
from transformers import Trainer


class RecordedPlugin(MuonPlugin):
    """Writes the gradients and learning rates of each step to ``steps.pt`` in the output folder."""

    def post_trainer_create(self, cfg: Any, trainer: Trainer) -> None:
        super().post_trainer_create(cfg, trainer)
        create, recorded = trainer.create_optimizer, []

        def write(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            gradients = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
            recorded.append((gradients, [group["lr"] for group in optimizer.param_groups]))
            torch.save(recorded, Path(cfg.output_dir) / "steps.pt")

        def create_optimizer(model: nn.Module | None = None) -> Any:
            is_new = trainer.optimizer is None
            optimizer = create(model)
            if is_new:
                optimizer.register_step_pre_hook(write)
            return optimizer

        trainer.create_optimizer = create_optimizer
