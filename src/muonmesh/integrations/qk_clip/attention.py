"""Attention: wraps the attention functions of `transformers`, so that a `QKClip` can record the logits of modules."""

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
"""Attention implementations whose masks muonmesh can read, so that it can compute the logits a second time."""


_watchers: WeakKeyDictionary[nn.Module, ref[Any]] = WeakKeyDictionary()
"""For each attention module: the `QKClip` that receives its queries and keys, or the bound on its logits."""


def watch(model: nn.Module, modules: list[nn.Module], watcher: Any) -> None:
    """Wrap the attention of a `transformers` model, so that a `QKClip` records the logits of its attention modules.

    For sdpa, eager and flex_attention, the wrapper is registered under a new name. For other implementations it
    replaces the function under the same name, since other code reads these names.

    Args:
        model: The model; its attention implementation may change.
        modules: The attention modules to watch.
        watcher: The `QKClip`. Only a weak reference is kept.

    Raises:
        ValueError: another `QKClip` that still exists watches these modules.
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
        result, bound = (_flex if name == "flex_attention" else _seen)(function, inputs, kwargs)
        if kwargs.get("softcap") is not None or (bound is not None and len(bound) != query.shape[1]):
            bound = None  # a bound on capped logits, or heads in another layout
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
    """Return the result of an attention function, and the bound from the kernels that it ran (None: no bound)."""
    with KernelBounds() as kernels:
        result = function(*inputs, **kwargs)
    return result, kernels.bound


def _flex(function: Callable[..., Any], inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Tensor | None]:
    """Return the result of flex attention, and the bound from the log-sum-exp in it (None: no bound).

    Its kernel is compiled, so `_seen` cannot observe it. `transformers` returns the log-sum-exp on a GPU, not on a CPU.
    """
    result = function(*inputs, **kwargs)
    return result, None if result[1] is None else bound_of(result[1])


def file_of_transformers(module: nn.Module) -> str | None:
    """Return the name of the `transformers` file (Python module) that defines a module's class, or None.

    All base classes are searched, since `fully_shard` adds a class of its own in front.
    """
    return next((c.__module__ for c in type(module).__mro__ if c.__module__.startswith("transformers.")), None)
