"""Launch: starts one kernel of Triton's, or only compiles it; and operators of torch's that run such kernels."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

_library = torch.library.Library("muonmesh", "FRAGMENT")  # type: ignore[no-untyped-call]

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


def operator(schema: str, launches: Callable[..., Iterable[Launch]]) -> None:
    """Define an operator of torch's in ``muonmesh::``, so that dispatch modes and fake tensors see it as one.

    Args:
        schema: Its name and arguments, as torch has them, the first a tensor or several; it returns nothing.
        launches: Is called with the arguments, and gives what it runs.
    """

    def run(first: Any, *others: Any) -> None:
        for launch in launches(first, *others):
            launch.run((first if isinstance(first, torch.Tensor) else first[0]).device)

    name = schema.partition("(")[0]
    _library.define(f"{schema} -> ()")  # type: ignore[no-untyped-call]
    for key in ("CUDA", "CPU"):  # on a CPU in Triton's interpreter
        _library.impl(name, run, key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"muonmesh::{name}", lambda *arguments: None, lib=_library)
