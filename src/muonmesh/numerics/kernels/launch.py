"""What starts a kernel of Triton's, or only compiles it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Launch(NamedTuple):
    """A kernel and what it is called with."""

    kernel: Any
    programs: int
    arguments: Sequence[Any]
    options: Mapping[str, Any]

    def run(self) -> None:
        """Compile the kernel, if that has not been done, and start it."""
        self.kernel[(self.programs,)](*self.arguments, **self.options)

    def compile(self) -> Any:
        """Compile the kernel for the device that Triton believes to be there, and return it."""
        return self.kernel.warmup(*self.arguments, grid=(self.programs,), **self.options)
