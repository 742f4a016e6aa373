"""Deferred: what a step has put off until the next forward, and who has to wait for it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch._dynamo import OptimizedModule
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from muonmesh.comm.storage import local_of
from muonmesh.comm.wrappers import living
from muonmesh.errors import StateError, explain_error

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""Modules that hold others of which each is called by itself."""


class Deferred:
    """What a step has put off: to wait for the last results, and to write them.

    It is done before a module runs that may read what it writes, and before ``state_dict`` of a module that holds it. A
    hook on all modules sees to that until it is done. The hook decides when a module is about to run:

    - The module may read the weights of all modules below it. So an attention module that reads its projection's weight
      is safe. Members of a ``ModuleList``, ``ModuleDict`` or ``Sequential`` are left out: they are called one by one,
      and the hook decides for each of them when it is called. Then all that is below the member counts.
    - FSDP2 gathers all weights of an ``FSDPModule`` before it runs. So below such a module only members that are an
      ``FSDPModule`` too are left out.
    - An ``FSDPModule`` may read everything if it gathers others ahead (``set_modules_to_forward_prefetch``), and on a
      device, where FSDP2's streams wait for the optimizer only once, before the outermost module.

    Args:
        tensors: The parameters that are still to be written.
        holders: The modules that hold them.
        finish: Waits, and writes; called once.
    """

    def __init__(self, tensors: Sequence[Tensor], holders: Iterable[nn.Module], finish: Callable[[], None]) -> None:
        self._tensors = {id(tensor): tensor for tensor in tensors}
        self._finish = finish
        self._gradients = [_stamp(tensor) for tensor in tensors]
        self._members: set[nn.Module] = set()  # of lists that were left out: decided on when they run
        self._free: set[nn.Module] = set()  # modules that were found to read nothing of what is put off
        self._on_device = any(local_of(tensor).device.type != "cpu" for tensor in tensors)
        self._hooks: list[RemovableHandle] = [register_module_forward_pre_hook(self._before)]
        self._hooks += [
            holder.register_state_dict_pre_hook(self._before_state_dict)  # type: ignore[no-untyped-call]
            for holder in holders
        ]

    def finish(self) -> None:
        """Wait for the last results, and write them."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._finish()

    def read_too_early(self) -> StateError | None:
        """Return what is wrong if gradients have come from a forward that read the weights past their modules."""
        for tensor, before in zip(self._tensors.values(), self._gradients, strict=True):
            if tensor.grad is not None and _stamp(tensor) != before:
                found = "a gradient of a forward that no module announced before step(wait=False) had finished"
                needed = "the step to be finished before its weights are read"
                write = "Write optimizer.finish() before that forward, or step() without wait=False"
                return StateError(explain_error(f"a parameter {tuple(tensor.shape)}", found, needed, write))
        return None

    @_disable_dynamo
    def _before(self, module: nn.Module, args: Any) -> None:
        if module not in self._free and self._reads(module):
            self._finish_now()

    def _before_state_dict(self, *args: Any) -> None:
        self._finish_now()

    @torch.no_grad()
    def _finish_now(self) -> None:
        if self._hooks:
            self.finish()

    def _reads(self, module: nn.Module) -> bool:
        """Whether a module may read what is put off; if not, note the members of lists that are decided on later."""
        gathers = isinstance(module, FSDPModule)
        if isinstance(module, FSDPModule):
            ahead = module._get_fsdp_state()._states_to_forward_prefetch
            if self._on_device or ahead:
                return True
        if module in self._members:  # whatever is below it counts
            if self._holds(module.modules()):
                return True
            self._free.update(module.modules())
            return False
        members: list[nn.Module] = []
        if self._holds(_read(module, members, gathers=gathers)):
            return True
        self._members.update(members)
        return False

    def _holds(self, modules: Iterable[nn.Module]) -> bool:
        return any(
            id(tensor) in self._tensors
            for module in modules
            for tensor in module._parameters.values()
            if tensor is not None
        )


def _read(module: nn.Module, members: list[nn.Module], *, gathers: bool) -> Iterator[nn.Module]:
    """Yield a module and those below it that it may read; those that are called instead are added to ``members``."""
    yield module
    for child in module.children():
        listed = isinstance(module, _LISTS)
        if listed and (isinstance(child, FSDPModule) or not gathers):
            members.append(child)
        else:
            yield from _read(child, members, gathers=gathers)


def holders_of(tensors: Iterable[Tensor]) -> weakref.WeakSet[nn.Module] | None:
    """Return the modules of this process that hold parameters.

    None if some are held by none, as copies in fp32 are not; or if one that holds them, or one around it, is compiled,
    since a compiled module does not look for new hooks.
    """
    wanted = {id(tensor) for tensor in tensors}
    modules: list[nn.Module] = living(nn.Module)  # type: ignore[type-abstract,unused-ignore]
    found = [module for module in modules if any(id(tensor) in wanted for tensor in module._parameters.values())]
    held = {id(tensor) for module in found for tensor in module._parameters.values()}
    if not wanted <= held:
        return None
    compiled = (m for m in modules if isinstance(m, OptimizedModule) or m._compiled_call_impl is not None)
    inside = {inner for module in compiled for inner in module.modules()}
    return None if inside & set(found) else weakref.WeakSet(found)


def _stamp(tensor: Tensor) -> tuple[int, int] | None:
    gradient = tensor.grad
    return None if gradient is None else (id(gradient), gradient._version)
