"""Launch: starts one kernel of Triton's, or only compiles it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch


class Launch(NamedTuple):
    """A kernel and what it is called with."""

    kernel: Any
    programs: int
    arguments: Sequence[Any]
    options: Mapping[str, Any]

    def run(self, device: torch.device) -> None:
        """Compile the kernel, if that has not been done, and start it on the device's current stream."""
        # Triton starts kernels on the current device, wherever their arguments are.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self.kernel[(self.programs,)](*self.arguments, **self.options)

    def compile(self) -> Any:
        """Compile the kernel for the device that Triton believes to be there, and return it."""
        return self.kernel.warmup(*self.arguments, grid=(self.programs,), **self.options)
