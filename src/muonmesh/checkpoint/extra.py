"""Extra: saves and loads the extra state of modules, which their method `get_extra_state` returns."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeAlias

import torch
from torch import Tensor, nn

from muonmesh.errors import StateError, explain_error
from muonmesh.names import canonical_name

KEY = "_extra_state"
"""The key of extra state in torch's state dicts."""


Extra: TypeAlias = dict[str, tuple[nn.Module, Tensor]]
"""A copy of the extra state of each module that has some, by name, with the module."""


def extra_of(model: nn.Module) -> Extra:
    """Return a copy of the extra state of each module that has some, by name, with the module.

    None and an empty tensor count as no extra state; modules of Transformer Engine return them if they do not compute
    in FP8.

    Raises:
        StateError: extra state is no tensor of numbers. Bytes are refused too, since modules unpickle them on loading.
    """
    found = {}
    for path, module in model.named_modules():
        if type(module).get_extra_state is nn.Module.get_extra_state and "get_extra_state" not in vars(module):
            continue
        extra = module.get_extra_state()
        if extra is None or (isinstance(extra, Tensor) and not extra.numel()):
            continue
        if not isinstance(extra, Tensor) or extra.dtype == torch.uint8:
            told = f"{extra.numel()} bytes in a tensor" if isinstance(extra, Tensor) else f"a {type(extra).__name__}"
            needed = "numbers in a tensor, or None: bytes and objects could execute when they are loaded"
            write = "Save that part apart from the checkpoint, and write module.get_extra_state = lambda: None"
            where = f"{canonical_name(path) or 'the model'}.get_extra_state()"
            raise StateError(explain_error(where, told, needed, write))
        found[canonical_name(f"{path}.{KEY}" if path else KEY)] = module, extra.detach().clone()
    return found


def give_back(extra: Extra, loaded: Collection[str]) -> None:
    """Set the extra state of each module whose name is in ``loaded`` to its loaded copy."""
    for name, (module, tensor) in extra.items():
        if name in loaded:
            module.set_extra_state(tensor)
