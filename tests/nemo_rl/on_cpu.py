"""NeMo-RL's DTensor worker on a CPU: what it writes as "cuda" and "nccl" is read as "cpu" and "gloo".

It is all that is not real in the tests of NeMo-RL, beside loggers that are not installed and Ray, whose decorator only
wraps the class.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode


class OnCPU(TorchFunctionMode):
    """Makes tensors that are asked for on "cuda" on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            args = tuple("cpu" if argument == "cuda" else argument for argument in args)
        return func(*args, **kwargs)


@contextmanager
def on_cpu() -> Iterator[None]:
    """Read "cuda" as "cpu" in this block, in a process that has a process group."""
    mesh, autocast = dist.device_mesh.init_device_mesh, torch.autocast

    def autocast_on_cpu(device_type: str, **options: Any) -> Any:
        return autocast("cpu", enabled=options.get("dtype") != torch.float32, **options)

    replaced: dict[tuple[Any, str], Any] = {
        (dist, "init_process_group"): lambda **_: None,
        (dist.device_mesh, "init_device_mesh"): lambda _, *shape, **names: mesh("cpu", *shape, **names),
        (torch, "autocast"): autocast_on_cpu,
        (torch.cuda, "synchronize"): lambda: None,
        (torch.cuda.nvtx, "range_push"): lambda _: None,
        (torch.cuda.nvtx, "range_pop"): lambda: None,
        (torch.cuda, "get_device_name"): lambda: "none",
    }
    with ExitStack() as stack:
        for (owner, name), replacement in replaced.items():
            stack.enter_context(mock.patch.object(owner, name, replacement))
        stack.enter_context(OnCPU())
        yield
