"""Joining: how the ranks of a run find each other, again after a restart too."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous


def join(backend: str, *, timeout: timedelta | None, device_id: torch.device | None = None) -> None:
    """Make the default process group of ranks that torchrun or `muonmesh.cli.launch` has started.

    Torchrun gives all attempts one store. What an attempt finds there of the one before it are addresses of processes
    that are gone, and gloo would wait for them. So on one host each attempt has a name of its own in the store. The
    agents of several hosts count attempts differently: there torchrun must not share its store, see docs/training.md.

    Args:
        backend: ``"gloo"`` or ``"nccl"``.
        timeout: How long a collective waits; None for torch's own limit.
        device_id: This rank's device, for NCCL.
    """
    settings: dict[str, Any] = {"timeout": timeout, "device_id": device_id}
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("GROUP_WORLD_SIZE") == "1":
        store, rank, ranks = next(rendezvous("env://"))
        attempt = PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
        settings |= {"store": attempt, "rank": rank, "world_size": ranks}
    dist.init_process_group(backend, **settings)
