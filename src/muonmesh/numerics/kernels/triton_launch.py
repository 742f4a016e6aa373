"""Launch: starts one kernel of Triton's, or only compiles it; and operators of torch's that run such kernels."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch

_library = torch.library.Library("muonmesh", "FRAGMENT")  # type: ignore[no-untyped-call]

_starts: dict[Hashable, Callable[..., None]] = {}
"""Functions that start a compiled kernel, by device, number of programs, and `Launch.code`."""

STREAM = 3
"""The index of the stream in the first arguments of `Launch.prepare`."""

watching = threading.local()
"""To its list ``launches`` each `Launch` of this thread is appended, if there is one."""


class Launch(NamedTuple):
    """A kernel with its arguments.

    Attributes:
        kernel: The kernel, a `triton.JITFunction`.
        programs: How many programs run it.
        arguments: All of its arguments, in order.
        options: Options of the compiler.
        code: A key of the compiled code: equal for launches that run the same code, and only for these. Without it
            (None), Triton finds the code by checking every argument, which takes the CPU longer than the launch.
    """

    kernel: Any
    programs: int
    arguments: Sequence[Any]
    options: Mapping[str, Any]
    code: Hashable = None

    def run(self, device: torch.device) -> None:
        """Compile the kernel, if that has not been done, and start it on the device's current stream."""
        if (launches := getattr(watching, "launches", None)) is not None:
            launches.append(self)
        with on(device):
            if self.code is None or device.type != "cuda":  # else in Triton's interpreter, which compiles nothing
                self.kernel[(self.programs,)](*self.arguments, **self.options)
                return
            start = _starts.get((device, self.programs, self.code))
            if start is None:
                start = self.compile()[(self.programs, 1, 1)]
                _starts[device, self.programs, self.code] = start
            start(*self.arguments)

    def run_on(self, device: torch.device, *arguments: Any) -> None:
        """Run it with others of the same layout for its arguments."""
        self._replace(arguments=arguments).run(device)

    def prepare(self, device: torch.device) -> tuple[Callable[..., None], list[Any]] | None:
        """Return what starts the compiled kernel, and its first arguments, with `STREAM` to be filled in.

        It takes addresses for tensors. None where that is not known of the version of Triton, or nothing is compiled.
        """
        if device.type != "cuda" or not _takes_addresses():
            return None
        with on(device):
            compiled = self.compile()
            return compiled.run, [self.programs, 1, 1, 0, compiled.function, compiled.packed_metadata, None, None, None]

    def compile(self) -> Any:
        """Compile the kernel for the device that Triton believes to be there, and return it."""
        return self.kernel.warmup(*self.arguments, grid=(self.programs,), **self.options)


def device_of(tensor: torch.Tensor) -> torch.device:
    """Return where kernels of a tensor are started."""
    return tensor.device


def on(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the current one; Triton starts kernels there, wherever their arguments are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def stream_of(device: torch.device) -> int:
    """Return the number of a device's current stream."""
    from triton.runtime.driver import driver

    return int(driver.active.get_current_stream(device.index)) if device.type == "cuda" else 0


def is_watched(*tensors: torch.Tensor) -> bool:
    """Whether tensor subclasses, a dispatch mode or a profiler must see each operator or launch."""
    modes = torch._C._len_torch_dispatch_stack() or any(type(tensor) is not torch.Tensor for tensor in tensors)
    if modes or not _takes_addresses():
        return bool(modes)
    from triton import knobs

    return bool(knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)


def are_aligned(*tensors: torch.Tensor | None) -> tuple[bool, ...]:
    """Return which addresses are multiples of 16, for which Triton compiles other code."""
    return tuple(tensor is not None and not tensor.data_ptr() % 16 for tensor in tensors)


@cache
def _takes_addresses() -> bool:
    import triton

    return (3, 6) <= tuple(map(int, triton.__version__.split(".")[:2])) < (3, 10)


@cache
def _launch_of(launcher: str) -> Callable[..., Launch]:
    """Return the function of `operator`."""
    file, name = launcher.split(".")
    function: Callable[..., Launch] = getattr(importlib.import_module(f"muonmesh.numerics.kernels.{file}"), name)
    return function


def operator(schema: str, launch: str) -> Callable[..., None]:
    """Define an operator of torch's in ``muonmesh::``, so that dispatch modes and fake tensors see it as one.

    Args:
        schema: Its name and arguments, as torch has them, the first a tensor or several; it returns nothing.
        launch: The file of kernels, which imports Triton, and its function that returns the launch for the arguments.

    Returns:
        A function that calls the operator. If nothing watches (`is_watched`), it runs the launch directly, because
        torch's dispatch takes the CPU longer than a launch.
    """

    def run(first: Any, *others: Any) -> None:
        tensor = first if isinstance(first, torch.Tensor) else first[0]
        _launch_of(launch)(first, *others).run(device_of(tensor))

    def call(first: Any, *others: Any) -> None:
        plain = type(first if isinstance(first, torch.Tensor) else first[0]) in (torch.Tensor, torch.nn.Parameter)
        if plain and not torch._C._len_torch_dispatch_stack():
            run(first, *others)
        else:
            operation(first, *others)

    name = schema.partition("(")[0]
    _library.define(f"{schema} -> ()")  # type: ignore[no-untyped-call]
    for key in ("CUDA", "CPU"):  # on a CPU in Triton's interpreter
        _library.impl(name, run, key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"muonmesh::{name}", lambda *arguments: None, lib=_library)
    operation = getattr(torch.ops.muonmesh, name)
    return call
