"""ShardedMaster: a shard of an fp32 master that Megatron's QK-clip reads and writes as if it were the whole weight."""

from __future__ import annotations

import torch
from torch import Tensor


class ShardedMaster(Tensor):
    """What this rank keeps of a master, as ``main_param`` of the parameter of whose elements it is an interval.

    `clip_qk` of Megatron-Core 0.16 scales rows of ``main_param.data``, and needs the whole weight to find them. Every
    rank scales its own elements by the same factors, so the bits are those of a whole master.
    """

    _parameter: Tensor
    _low: int

    @staticmethod
    def of(master: Tensor, parameter: Tensor, low: int) -> ShardedMaster:
        """Return a shard, whose memory it shares, of the parameter's elements from low on."""
        found = master.as_subclass(ShardedMaster)
        found._parameter, found._low = parameter, low
        return found

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """A new tensor of the parameter's shape: the shard, and zeros; `copy_` into it writes the shard alone."""
        shard, whole = self.as_subclass(Tensor), torch.zeros_like(self._parameter, dtype=self.dtype)
        mine = slice(self._low, self._low + shard.numel())
        whole.view(-1)[mine] = shard.view(-1)

        def copy_(source: Tensor) -> Tensor:
            return shard.copy_(source.reshape(-1)[mine].view_as(shard))

        whole.copy_ = copy_  # type: ignore[method-assign, assignment]
        return whole
