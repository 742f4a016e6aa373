"""Axolotl: ``plugins: [muonmesh.integrations.axolotl.MuonPlugin]`` in its configuration."""

from __future__ import annotations

from typing import Any

import torch
from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel
from torch import nn
from transformers import Trainer

from muonmesh.integrations.transformers import MuonFactory


class MuonArguments(BaseModel):
    """What the plugin adds to Axolotl's configuration."""

    muonmesh: dict[str, Any] | None = None
    """Arguments of `muonmesh.from_model`, by name."""


class MuonPlugin(BasePlugin):  # type: ignore[misc]  # Axolotl is not checked with us
    """Gives Axolotl's trainer our optimizer.

    Learning rate, weight decay, betas and ε are those of its configuration; further settings stand there under
    ``muonmesh:``. The configuration's ``optimizer:`` counts for nothing then, but Axolotl wants one: write
    ``adamw_torch``.
    """

    def get_input_args(self) -> str:
        """Return the class by which Axolotl checks what stands under ``muonmesh:``."""
        return f"{__name__}.MuonArguments"

    def post_trainer_create(self, cfg: Any, trainer: Trainer) -> None:
        """Let the trainer, which is just made, make our optimizer when it makes one.

        Args:
            cfg: Axolotl's configuration.
            trainer: Any of its trainers.
        """
        settings = dict(cfg.get("muonmesh") or {})

        def create_optimizer(model: nn.Module | None = None) -> torch.optim.Optimizer:
            trained = trainer.model if model is None else model
            optimizer: torch.optim.Optimizer = trainer.optimizer or MuonFactory()(
                trained, args=trainer.args, **settings
            )
            trainer.optimizer = optimizer
            return optimizer

        trainer.create_optimizer = create_optimizer
