"""Layers: what ``--checkpoint-activations`` and ``--compile`` do to each layer, before it is spread over ranks."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from muonmesh.cli.model import blocks_of
from muonmesh.cli.settings import Settings


def prepare_layers(model: nn.Module, settings: Settings) -> None:
    """Change layers in place; their parameters keep their names. `check_model` has said whether they can be."""
    if settings.checkpoint_activations:
        recompute: Any = model
        recompute.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if settings.compile:
        logging.getLogger("torch._inductor").setLevel(logging.ERROR)
        for block in blocks_of(model):
            block.compile()
