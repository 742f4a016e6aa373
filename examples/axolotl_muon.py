"""Axolotl: a plugin with Muon. Copy this file to where you start Axolotl.

In its configuration, write ``plugins: [axolotl_muon.MuonPlugin]``.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel
from torch import nn
from transformers import Trainer

from muonmesh.integrations.transformers import MuonFactory


class MuonArguments(BaseModel):
    """The field that the plugin adds to Axolotl's configuration."""

    muonmesh: dict[str, Any] | None = None
    """Arguments of `muonmesh.from_model`, by name."""


class MuonPlugin(BasePlugin):
    """An Axolotl plugin that makes the trainer use muonmesh.

    Axolotl's configuration gives the learning rate, weight decay, betas and ε. Write further settings under
    ``muonmesh:``. Axolotl requires an ``optimizer:``, which is then not used: write ``adamw_torch``.
    """

    def get_input_args(self) -> str:
        """Return the path of the class with which Axolotl checks the settings under ``muonmesh:``."""
        return f"{__name__}.MuonArguments"

    def post_trainer_create(self, cfg: Any, trainer: Trainer) -> None:
        """Replace ``create_optimizer`` of a new trainer, so that the trainer creates an optimizer of muonmesh.

        Args:
            cfg: Axolotl's configuration.
            trainer: Any trainer of Axolotl.
        """
        settings = dict(cfg.get("muonmesh") or {})

        def create_optimizer(model: nn.Module | None = None) -> Any:
            trained = trainer.model if model is None else model
            trainer.optimizer = trainer.optimizer or MuonFactory()(trained, args=trainer.args, **settings)
            return trainer.optimizer

        trainer.create_optimizer = create_optimizer
