"""AReaL: ``import areal_muon`` in every process that makes AReaL's FSDP engine, before the trainer is made.

AReaL knows three optimizers by name. Its FSDP engine then creates the optimizer of muonmesh from the engine's module in
place of the one with ``type: adam``. AReaL makes the schedule.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from areal.api import FinetuneSpec
from areal.engine.fsdp_engine import FSDPEngine

import muonmesh as mm

SETTINGS: dict[str, Any] = {}
"""Arguments of `muonmesh.from_model` beside AReaL's own settings."""

_areal_s = FSDPEngine._create_optimizer


def create_optimizer(engine: FSDPEngine, ft_spec: FinetuneSpec) -> None:
    """Create optimizer and schedule of an engine: muonmesh in place of AReaL's AdamW.

    ``optimizer`` of the engine's configuration gives the learning rate, the weight decay, and AdamW's betas and ε.

    Args:
        engine: AReaL's FSDP engine, complete except for its optimizer.
        ft_spec: The length of the training, for the schedule.

    Raises:
        ValueError: AReaL would step one layer after another, as only its AdamW can.
    """
    config = engine.optimizer_config
    if config is None or config.type != "adam":
        _areal_s(engine, ft_spec)
        return
    if engine.config.fsdp.per_layer_optim_step:
        raise ValueError("AReaL's fsdp.per_layer_optim_step: found true. Write per_layer_optim_step: false")

    def muon(
        _: object, *, lr: float, weight_decay: float, betas: tuple[float, float], eps: float, **__: object
    ) -> mm.Muon:
        given = {"process_group": "auto", "adamw_betas": betas, "adamw_eps": eps, **SETTINGS}
        return mm.from_model(engine.model, lr=lr, weight_decay=weight_decay, **given)

    with mock.patch.object(torch.optim, "AdamW", muon):
        _areal_s(engine, ft_spec)


FSDPEngine._create_optimizer = create_optimizer
