"""`transformers`' attention interface: its functions, preceded by a look at the logits of modules that are watched."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from muonmesh.errors import explain_error

PREFIX = "qk_clip_"
KNOWN = ("sdpa", "eager", "flex_attention")


class Watcher(Protocol):
    """Who is told of queries and keys."""

    def observe(
        self, module: nn.Module, query: Tensor, key: Tensor, *, scale: float, mask: Any = None, causal: bool = False
    ) -> None:
        """Look at the logits of one call."""


_watchers: WeakKeyDictionary[nn.Module, ref[Watcher]] = WeakKeyDictionary()


def watch(model: nn.Module, modules: list[nn.Module], watcher: Watcher) -> None:
    """Have the watcher told of what the attention modules of a `transformers` model compute.

    The model's attention implementation becomes one of the same function, under a name of its own.

    Raises:
        ValueError: the implementation is another than sdpa, eager or flex_attention, or another watcher that still
            exists is told of these modules.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

    for module in modules:
        if module in _watchers and _watchers[module]() is not None:
            found, needed = (
                "a QKClip that already clips this model",
                "one for a model, since each scales weights",
            )
            write = "Change the threshold attribute of the one that exists, or delete it and its optimizer first"
            raise ValueError(explain_error(type(model).__name__, found, needed, write))
    owners = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
    inner = {id(child) for owner in owners for child in owner.modules() if child is not owner}
    for owner in owners:
        if id(owner) in inner:
            continue
        name = str(owner.config._attn_implementation).removeprefix(PREFIX)
        if name not in KNOWN:
            needed = "sdpa, eager or flex_attention, whose queries and keys are seen before they are packed"
            write = 'Write model.set_attn_implementation("sdpa"), or call QKClip.observe from your attention'
            raise ValueError(explain_error(type(owner).__name__, f"attention by {name!r}", needed, write))
        base = None if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
        AttentionInterface.register(PREFIX + name, _watched(name, base))
        AttentionMaskInterface.register(PREFIX + name, ALL_MASK_ATTENTION_FUNCTIONS[name])
        owner.set_attn_implementation(PREFIX + name)
    for module in modules:
        _watchers[module] = ref(watcher)


def _watched(name: str, base: Callable[..., Any] | None) -> Callable[..., Any]:
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        watcher = _watchers.get(module)
        told = None if watcher is None else watcher()
        if told is not None and module.training and torch.is_grad_enabled():
            scale = kwargs.get("scaling")
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            causal = kwargs.get("is_causal")
            causal = getattr(module, "is_causal", True) if causal is None else causal
            causal = name == "sdpa" and attention_mask is None and bool(causal)
            told.observe(module, query, key, scale=scale, mask=attention_mask, causal=causal)
        function = base
        if function is None:  # the one in the file of the module's class
            function = sys.modules[_defined(module)].eager_attention_forward
        return function(module, query, key, value, attention_mask, *args, **kwargs)

    return attention


def _defined(module: nn.Module) -> str:
    """Return the file that defines a module's class; `fully_shard` puts a class of its own in front."""
    return next(c.__module__ for c in type(module).__mro__ if c.__module__.startswith("transformers."))
