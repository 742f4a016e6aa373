"""LateAnswer: a tensor that the host reads later, so that the host need not wait for the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from muonmesh.numerics.kernels.memory import download


@dataclass(frozen=True)
class LateAnswer:
    """A tensor on its way from the device to the host, and the call that handles its values when they have arrived.

    Attributes:
        value: The tensor, on the host.
        arrived: The event after which it can be read; None: it can be read now.
        say: What is done with it then: a warning, or an error.
    """

    value: Tensor
    arrived: torch.cuda.Event | None
    say: Callable[[Tensor], None]

    @staticmethod
    def of(value: Tensor, say: Callable[[Tensor], None]) -> LateAnswer:
        """Begin to copy a tensor to the host."""
        return LateAnswer(*download(value), say)

    def hear(self) -> None:
        """Wait for the tensor, and say what there is to say.

        Raises:
            Exception: what ``say`` raises.
        """
        if self.arrived is not None:
            self.arrived.synchronize()
        self.say(self.value)
