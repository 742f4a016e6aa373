"""ShardedMaster: a shard of an fp32 master that Megatron's QK-clip reads and writes as if it were the whole weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from muonmesh.integrations.megatron.main_grad import ParameterInterval


class ShardedMaster(Tensor):
    """What this rank keeps of a master, as ``main_param`` of the parameter, whose elements it is an interval of.

    `clip_qk` of Megatron-Core 0.16 scales rows of ``main_param.data``, and needs the whole weight to find them. So
    ``data`` is a new tensor of the parameter's shape: zeros, but in the interval what the shard has. What is copied
    into it is written to the shard alone. Every rank scales its elements by the same factors, so the bits are those of
    a whole master.
    """

    _interval: ParameterInterval

    @staticmethod
    def of(master: Tensor, interval: ParameterInterval) -> ShardedMaster:
        """Return a shard, whose memory it shares."""
        found = master.as_subclass(ShardedMaster)
        found._interval = interval
        return found

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The shard in the whole weight, fp32; `Tensor.copy_` into it writes the shard."""
        parameter, low, high = self._interval
        whole = torch.zeros(parameter.shape, dtype=self.dtype, device=self.device)
        shard = self.as_subclass(Tensor)
        whole.view(-1)[low:high] = shard.view(-1)
        found = whole.as_subclass(_Whole)
        found.kept = shard, low, high
        return found


class _Whole(Tensor):
    kept: tuple[Tensor, int, int]

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Any:
        shard, low, high = self.kept
        shard.copy_(source.as_subclass(Tensor).reshape(-1)[low:high].view(shard.shape))
        return self
