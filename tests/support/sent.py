"""Sent: the bytes that a rank sends, counted where every collective ends."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


class Sent(TorchDispatchMode):
    """Adds up what this rank sends, where every collective ends: in the operators of c10d."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.bytes = 0.0
        self.ranks = ranks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            if name == "alltoall_base_":
                whole, splits = args[1], args[4]
                assert splits[dist.get_rank()] == 0
                self.bytes += whole.numel() * whole.element_size()
            elif name == "send":
                self.bytes += sum(t.numel() * t.element_size() for t in args[0])
            elif name != "recv_":
                assert name == "allreduce_", f"{name}: nothing is known of what it sends"
                self.bytes += 2 * (self.ranks - 1) / self.ranks * sum(t.numel() * t.element_size() for t in args[0])
        return func(*args, **(kwargs or {}))
