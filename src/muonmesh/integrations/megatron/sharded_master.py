"""ShardedMaster: a rank's shard of an fp32 master weight, as Megatron's QK-clip reads and writes it."""

from __future__ import annotations

import torch
from torch import Tensor


class ShardedMaster(Tensor):
    """A rank's shard of an fp32 master weight, for the ``main_param`` attribute of its parameter.

    `clip_qk` of Megatron-Core 0.16 scales rows of ``main_param.data``, for which it needs the shape of the whole
    weight, on the device of the weight. Every rank scales its own elements by the same factors, so the result is
    bitwise equal to a whole master weight's. The shard may be in CPU memory.

    Attributes:
        written: Whether Megatron has written the master weight since it was published. Megatron then scales the weight
            too, but from its rounded elements: the master weight is the better one of both.
    """

    written: bool = False
    _parameter: Tensor
    _low: int

    @staticmethod
    def of(master: Tensor, parameter: Tensor, low: int) -> ShardedMaster:
        """Return ``master`` as a ShardedMaster, sharing its memory: the parameter's elements from ``low`` on."""
        sharded = master.as_subclass(ShardedMaster)
        sharded._parameter, sharded._low = parameter, low
        return sharded

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """A new tensor of the parameter's shape: the shard, and zeros elsewhere. Its `copy_` writes only the shard."""
        shard, whole = self.as_subclass(Tensor), torch.zeros_like(self._parameter, dtype=self.dtype)
        interval = slice(self._low, self._low + shard.numel())
        whole.view(-1)[interval] = shard.view(-1)

        def copy_(source: Tensor) -> Tensor:
            self.written = True
            return shard.copy_(source.reshape(-1)[interval].view_as(shard))

        whole.copy_ = copy_  # type: ignore[method-assign, assignment]
        return whole
