"""Momentum: Muon's momentum matrices of a real training, saved whole for the accuracy benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from muonmesh.files import onto_disk, writing

MOMENTUM_KEY = "momentum_buffer"


def save_momentum(path: Path, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Write ``{parameter name: momentum, global shape}`` as safetensors. Called on all ranks; rank 0 writes.

    Args:
        path: The file.
        states: Optimizer state by parameter name.

    Raises:
        RunError: the file could not be written.
    """
    momenta = {}
    for name, held in states.items():
        if MOMENTUM_KEY in held:
            momentum = held[MOMENTUM_KEY]
            whole = momentum.full_tensor() if isinstance(momentum, DTensor) else momentum
            if dist.get_rank() == 0:
                momenta[name] = whole.cpu().contiguous()
    if dist.get_rank() == 0:
        scratch = path.with_name(f".{path.name}.writing")
        with writing(path, raised=Exception):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                save_file(momenta, scratch)
                onto_disk(scratch)
                scratch.replace(path)
            finally:
                scratch.unlink(missing_ok=True)
