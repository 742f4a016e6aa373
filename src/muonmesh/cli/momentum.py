"""Momentum: Muon's momentum matrices of a real training, saved whole for the accuracy benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

MOMENTUM_KEY = "momentum_buffer"


def save_momentum(path: Path, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Write ``{parameter name: momentum, global shape}`` as safetensors. Called on all ranks; rank 0 writes.

    Args:
        path: The file.
        states: Optimizer state by parameter name.
    """
    momenta = {}
    for name, held in states.items():
        if MOMENTUM_KEY in held:
            momentum = held[MOMENTUM_KEY]
            whole = momentum.full_tensor() if isinstance(momentum, DTensor) else momentum
            if dist.get_rank() == 0:
                momenta[name] = whole.cpu().contiguous()
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(momenta, path)
