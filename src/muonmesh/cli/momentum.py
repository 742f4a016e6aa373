"""Momentum: Muon's momentum matrices of a real training, saved whole for the accuracy benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

MOMENTUM_KEY = "momentum_buffer"


def save_momentum(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write ``{parameter name: momentum, global shape}`` as safetensors. Called on all ranks; rank 0 writes."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer, options=options))
    if dist.get_rank() == 0:  # which alone was given anything
        momenta = {name: held[MOMENTUM_KEY] for name, held in state["state"].items() if MOMENTUM_KEY in held}
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: momentum.contiguous() for name, momentum in momenta.items()}, path)
