"""Launch: starts one kernel of Triton's, or only compiles it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

_starts: dict[Hashable, Any] = {}
"""What starts a compiled kernel: by device, number of programs, and `Launch.code`."""


class Launch(NamedTuple):
    """A kernel and what it is called with.

    Attributes:
        kernel: The kernel, a `triton.JITFunction`.
        programs: How many programs run it.
        arguments: All of its arguments, in order.
        options: Options of the compiler.
        code: Equal for launches that run the same compiled code, and for no others. Triton finds the code of a kernel
            by looking at every argument, which takes the host longer than starting it. None: leave that to Triton,
            which is as fast for a kernel of few arguments.
    """

    kernel: Any
    programs: int
    arguments: Sequence[Any]
    options: Mapping[str, Any]
    code: Hashable = None

    def run(self, device: torch.device) -> None:
        """Compile the kernel, if that has not been done, and start it on the device's current stream."""
        if device.type != "cuda":  # in Triton's interpreter, which compiles nothing
            self.kernel[(self.programs,)](*self.arguments, **self.options)
            return
        # Triton starts kernels on the current device, wherever their arguments are.
        with torch.cuda.device(device):
            if self.code is None:
                self.kernel[(self.programs,)](*self.arguments, **self.options)
                return
            start = _starts.get((device, self.programs, self.code))
            if start is None:
                start = self.compile()[(self.programs, 1, 1)]
                _starts[device, self.programs, self.code] = start
            start(*self.arguments)

    def compile(self) -> Any:
        """Compile the kernel for the device that Triton believes to be there, and return it."""
        return self.kernel.warmup(*self.arguments, grid=(self.programs,), **self.options)
