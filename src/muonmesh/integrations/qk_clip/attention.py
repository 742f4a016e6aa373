"""`transformers`' attention interface: its functions, with a look at the logits of modules that are watched."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from muonmesh.errors import explain_error
from muonmesh.integrations.qk_clip.logits import KernelBounds, bound_of

PREFIX = "qk_clip_"
KNOWN = ("sdpa", "eager", "flex_attention")
"""Implementations whose masks are known here, so that logits can be computed once more."""


_watchers: WeakKeyDictionary[nn.Module, ref[Any]] = WeakKeyDictionary()
"""For each attention module the `QKClip` that is told of its queries and keys, or of the bound on its logits."""


def watch(model: nn.Module, modules: list[nn.Module], watcher: Any) -> None:
    """Have a `QKClip` told of what the attention modules of a `transformers` model compute.

    An attention implementation is wrapped: sdpa, eager and flex_attention under a name of their own, others, whose
    names are read elsewhere too, in their place.

    Raises:
        ValueError: another watcher that still exists is told of these modules.
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
        base = None if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
        if name not in KNOWN:
            if not hasattr(base, "watches"):
                AttentionInterface.register(name, _watched(name, base))
            continue
        AttentionInterface.register(PREFIX + name, _watched(name, base))
        AttentionMaskInterface.register(PREFIX + name, ALL_MASK_ATTENTION_FUNCTIONS[name])
        owner.set_attn_implementation(PREFIX + name)
    for module in modules:
        _watchers[module] = ref(watcher)


def _watched(name: str, base: Callable[..., Any] | None) -> Callable[..., Any]:
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        function = base
        if function is None:  # the one in the file of the module's class
            function = sys.modules[file_of_transformers(module) or ""].eager_attention_forward
        watcher = _watchers.get(module)
        told = None if watcher is None else watcher()
        inputs = (module, query, key, value, attention_mask, *args)
        if told is None or not module.training or not torch.is_grad_enabled():
            return function(*inputs, **kwargs)
        result, bound = (_compiled if name == "flex_attention" else _seen)(function, inputs, kwargs)
        if kwargs.get("softcap") is not None or (bound is not None and len(bound) != query.shape[1]):
            bound = None  # of capped logits, or of heads packed otherwise
        if bound is not None:
            told.record(module, bound, bound=True)
        elif name in KNOWN:
            scale = kwargs.get("scaling")
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            causal = kwargs.get("is_causal")
            causal = getattr(module, "is_causal", True) if causal is None else causal
            causal = name == "sdpa" and attention_mask is None and bool(causal)
            told.observe(module, query, key, scale=scale, mask=attention_mask, causal=causal)
        else:
            needed = "a kernel known to return the log-sum-exp of each head's logits, without a softcap"
            write = 'Write model.set_attn_implementation("sdpa") before QKClip(model)'
            raise ValueError(explain_error(type(module).__name__, f"attention by {name!r}", needed, write))
        return result

    attention.watches = True  # type: ignore[attr-defined]
    return attention


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _seen(function: Callable[..., Any], inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Tensor | None]:
    """Return what a function returns, and the bound by the kernels that it runs."""
    with KernelBounds() as kernels:
        result = function(*inputs, **kwargs)
    return result, kernels.bound


def _compiled(
    function: Callable[..., Any], inputs: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Tensor | None]:
    """As `_seen`, of flex attention, whose kernel is compiled; `transformers` returns its log-sum-exp on a device."""
    result = function(*inputs, **kwargs)
    return result, None if result[1] is None else bound_of(result[1])


def file_of_transformers(module: nn.Module) -> str | None:
    """Return the file of `transformers` that defines a module's class, if any; `fully_shard` puts a class in front."""
    return next((c.__module__ for c in type(module).__mro__ if c.__module__.startswith("transformers.")), None)
