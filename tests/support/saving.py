"""Ways of saving a model and its optimizer: our checkpoint, and torch's with nested or flattened optimizer state."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import muonmesh as mm

How = Literal["ours", "torch's", "flat"]


def _states(model: nn.Module, optimizer: mm.Muon, options: StateDictOptions) -> dict[str, Any]:
    weights, state = get_state_dict(model, optimizer, options=options)
    return {"model": weights, "optimizer": state}


def save(path: str | Path, model: nn.Module, optimizer: mm.Muon, how: How) -> None:
    if how == "ours":
        mm.checkpoint.save(path, model, optimizer)
    else:
        options = StateDictOptions(flatten_optimizer_state_dict=how == "flat")
        dcp.save(_states(model, optimizer, options), checkpoint_id=path)


def load(path: str | Path, model: nn.Module, optimizer: mm.Muon, how: How) -> None:
    if how == "ours":
        mm.checkpoint.load(path, model, optimizer)
    else:
        options = StateDictOptions(flatten_optimizer_state_dict=how == "flat")
        states = _states(model, optimizer, options)
        dcp.load(states, checkpoint_id=path)
        keys = {"model_state_dict": states["model"], "optim_state_dict": states["optimizer"]}
        set_state_dict(model, optimizer, **keys, options=options)
