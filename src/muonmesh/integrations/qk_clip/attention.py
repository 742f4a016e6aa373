"""Attention: records the largest attention logits of each head of `transformers` models, exact or as an upper bound.

It wraps the attention functions of `transformers`. The bound is the log-sum-exp that fast kernels return.
"""

from __future__ import annotations

import inspect
import re
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from muonmesh.errors import explain_error
from muonmesh.names import canonical_name

AT_ONCE = 1 << 24
"""The number of logits to compute at a time, so that their fp32 values take at most 64 MiB."""

_FORWARD = re.compile(
    # torch's kernels of scaled_dot_product_attention and varlen_attn; flash-attn's, which some builds call "fwd"
    r"aten::_scaled_dot_product_(flash|efficient|cudnn|fused)_attention(_for_cpu|_overrideable)?"
    r"|aten::_(flash|efficient)_attention_forward|torch_attn::_varlen_attn"
    r"|\w*flash_attn\w*::(_flash_attn_)?(varlen_)?(forward|fwd)"
)
"""Operators whose second result is the log-sum-exp (natural logarithm) of each query's scaled logits."""


class KernelBounds(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that reads the log-sum-exp (lse) from the results of the attention kernels that run in it.

    The largest logit of a query with n keys lies in [lse − ln n, lse]. The context computes only the maximum of lse.

    Attributes:
        bound: fp32 (heads,), an upper bound on the logits of each head; None if no such kernel ran.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bound: Tensor | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _FORWARD.fullmatch(func._schema.name) and result[1].numel():
            with _disable_current_modes():  # selective checkpointing would keep these small results
                bound = bound_of(result[1])
                self.bound = bound if self.bound is None else torch.maximum(self.bound, bound)
        return result


@torch.no_grad()
def bound_of(lse: Tensor) -> Tensor:
    """Return an upper bound on the logits of each head, fp32 (heads,), from the log-sum-exp of each query.

    Args:
        lse: Shape (batch, heads, queries), (batch, heads, queries, 1), or (heads, queries) for packed sequences. A
            query without a key has −inf, or +inf in flash-attn.
    """
    local = lse.to_local() if isinstance(lse, DTensor) else lse
    wide = local.detach().float()
    if local.dtype != torch.float32:  # lse was rounded: add half a unit in the last place
        wide = wide + wide.abs() * (torch.finfo(local.dtype).eps / 2)
    wide = wide.masked_fill(wide == torch.inf, -torch.inf)
    heads = 0 if wide.ndim == 2 else 1
    return wide.amax([dim for dim in range(wide.ndim) if dim != heads])


@torch.no_grad()
def largest_logits(
    query: Tensor, key: Tensor, *, scale: float, mask: Any = None, bias: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Return the largest logit of each head, fp32 (heads,); -inf if a mask excludes all logits of a head.

    Args:
        query: Shape (batch, heads, queries, size).
        key: Shape (batch, groups, keys, size). Each group serves heads/groups successive heads, as in `transformers`.
        scale: The factor of the products of queries and keys.
        mask: None; bool, True where a query attends to a key; numbers to add to the logits; or a `BlockMask` of flex
            attention. Tensors broadcast to (batch, heads, queries, keys).
        bias: Numbers that are added to the logits beside the mask, such as a position bias; broadcast likewise.
        causal: Whether a query ignores later keys; the last query attends to all keys. Only without a mask.
    """
    batch, heads, queries, _ = query.shape
    groups, keys = key.shape[1], key.shape[2]
    allowed = _dense(mask, batch, heads, queries, keys, query.device)
    transposed = key.detach().transpose(-1, -2).unsqueeze(2)  # (batch, groups, 1, size, keys)
    grouped = query.detach().reshape(batch, groups, heads // groups, queries, -1)
    largest = torch.full((heads,), -torch.inf, dtype=torch.float32, device=query.device)
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    queries_in_chunk = max(1, AT_ONCE // max(1, batch * heads * keys))
    for start in range(0, queries, queries_in_chunk):
        chunk = grouped[:, :, :, start : start + queries_in_chunk]
        rows = slice(start, start + queries_in_chunk)
        if dtype == torch.float16:  # in which products overflow that kernels scale in fp32
            logits = ((chunk * scale) @ transposed).float().flatten(1, 2)
        else:
            logits = (chunk @ transposed).float().mul_(scale).flatten(1, 2)
        if bias is not None:
            logits = logits + _part(bias.detach(), rows, keys)
        if allowed is not None:
            part = _part(allowed, rows, keys)
            logits = logits.masked_fill_(~part, -torch.inf) if part.dtype == torch.bool else logits + part
        elif causal:
            last = torch.arange(start, start + chunk.shape[3], dtype=torch.int64, device=query.device) + keys - queries
            later = torch.arange(keys, dtype=torch.int64, device=query.device) > last[:, None]
            logits.masked_fill_(later, -torch.inf)
        if logits.numel():
            torch.maximum(largest, logits.amax((0, 2, 3)), out=largest)
    return largest


def _part(added: Tensor, rows: slice, keys: int) -> Tensor:
    """Return what a mask or a bias has for some queries and the first keys; its dims may be 1 where it broadcasts."""
    return (added if added.shape[-2] == 1 else added[..., rows, :])[..., :keys]


_PIPELINE_STAGE = "torch.distributed.pipelining.stage"


def runs_for_shapes() -> bool:
    """Return whether torch's pipelining runs a stage for the shapes of its results, on memory that nobody has filled.

    It does so with gradients, before the first micro-batch. A checkpointed forward may run again on autograd's thread.
    """
    if _PIPELINE_STAGE not in sys.modules:
        return False
    if threading.current_thread() is threading.main_thread():
        return _infers_shapes(sys._getframe(1))
    return any(map(_infers_shapes, sys._current_frames().values()))


def _infers_shapes(frame: FrameType | None) -> bool:
    """Return whether a frame or one of its callers is such a run. Callers keep no frame: it would keep its locals."""
    while frame is not None:
        named = frame.f_code.co_name.endswith("_inference")
        if named and frame.f_globals.get("__name__") == _PIPELINE_STAGE:
            return True
        frame = frame.f_back
    return False


def _dense(mask: Any, batch: int, heads: int, queries: int, keys: int, device: torch.device) -> Tensor | None:
    if mask is None or isinstance(mask, Tensor):
        return mask
    from torch.nn.attention.flex_attention import create_mask

    return create_mask(mask.mask_mod, batch, heads, queries, keys, device=str(device))


KNOWN = ("sdpa", "eager", "flex_attention")
"""Attention implementations whose masks muonmesh can read, so that it can compute the logits a second time."""


_watchers: WeakKeyDictionary[nn.Module, ref[Any]] = WeakKeyDictionary()
"""For each attention module: the `QKClip` that receives its queries and keys, or the bound on its logits."""

_MARK = "_muonmesh_watched"
"""An attribute of the modules in `_watchers`: compiled code guards attributes, but no entries of such a dictionary."""


def watch(model: nn.Module, modules: list[nn.Module], watcher: Any) -> list[Any]:
    """Wrap the attention functions of `transformers`, so that a `QKClip` records the logits of its attention modules.

    A wrapper has the name of the function that it wraps, since models read these names. It changes nothing for modules
    that no `QKClip` watches. If the model changes to an implementation that is not in `KNOWN` later, `watch_functions`
    wraps it.

    Args:
        model: The model.
        modules: The attention modules to watch.
        watcher: The `QKClip`. Only a weak reference is kept.

    Returns:
        The models of `transformers` in the model.

    Raises:
        ValueError: another `QKClip` that still exists watches these modules; or a module of `transformers` attends
            without the attention interface.
    """
    from transformers.modeling_utils import PreTrainedModel

    for module in modules:
        if module in _watchers and _watchers[module]() is not None:
            problem, needed = "a QKClip that already clips this model", "one for a model, since each scales weights"
            write = "Change the threshold attribute of the one that exists, or delete it and its optimizer first"
            raise ValueError(explain_error(type(model).__name__, problem, needed, write))
        _refuse_hidden_attention(module)
    models = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    watch_functions(models)
    for module in modules:
        _watch_eager(module)
        _watchers[module] = ref(watcher)
        setattr(module, _MARK, True)
    return models


def watch_functions(models: Sequence[Any]) -> None:
    """Wrap the attention functions that models of `transformers` use now, and those of `KNOWN`, once."""
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in {str(part.config._attn_implementation) for part in models} | {*KNOWN}:
        function = ALL_ATTENTION_FUNCTIONS.get(name)  # None for eager: each model has a function of its own
        if function is not None and not hasattr(function, "watches"):
            AttentionInterface.register(name, _watched(name, function))


def _refuse_hidden_attention(module: nn.Module) -> None:
    """Raise ValueError if the forward of a class of `transformers` attends where nothing watches it, as Falcon's does.

    A forward of your own may tell a `QKClip` what it computes.
    """
    if _is_of_transformers(forward := inspect.unwrap(module.forward)) and not _uses_interface(forward):
        problem = "a forward that does not use the attention interface of transformers"
        needed = "attention that QKClip can watch"
        write = "Give the module a forward of your own before, which runs this one in `with clip.watching(module):` or "
        write += "calls clip.observe(module, query, key, scale=...); or leave QKClip out"
        raise ValueError(explain_error(type(module).__name__, problem, needed, write))


def refuse_unknown_attention(model: nn.Module, clipped: Collection[nn.Module], without: Collection[str]) -> None:
    """Raise ValueError if a module of `transformers` attends, and is trained, but its queries and keys are not known.

    Args:
        model: The model.
        clipped: The modules whose queries and keys are known.
        without: The names of modules without a softmax.
    """
    for name, module in model.named_modules():
        forward: Any = inspect.unwrap(module.forward)
        attends = _is_of_transformers(forward) and _uses_interface(forward)
        trains = [parameter.requires_grad for parameter in module.parameters()]
        if attends and module not in clipped and canonical_name(name) not in without and (any(trains) or not trains):
            problem = f"attention in {type(module).__name__}, whose queries and keys are not known"
            needed, write = "to know which weights to scale", "Leave QKClip out, or freeze this module"
            raise ValueError(explain_error(canonical_name(name), problem, needed, write))


def _is_of_transformers(forward: Any) -> bool:
    return str(getattr(forward, "__module__", "")).partition(".")[0] == "transformers"


def _uses_interface(forward: Any) -> bool:
    code = getattr(forward, "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _watch_eager(module: nn.Module) -> None:
    """Wrap the functions for eager attention that the forward of a module's class names, in the file of this forward.

    Their names end alike, but a file may have several of them, for attention modules of different kinds.
    """
    forward: Any = inspect.unwrap(type(module).forward)
    functions = forward.__globals__
    for name in forward.__code__.co_names:
        if name.endswith("eager_attention_forward") and name in functions and not hasattr(functions[name], "watches"):
            functions[name] = _watched("eager", functions[name])


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _watcher_of(module: nn.Module) -> Any:
    """Return the `QKClip` that watches a module; None if there is none or it is gone."""
    watcher = _watchers.get(module)
    return None if watcher is None else watcher()


def _watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        clip = _watcher_of(module) if getattr(module, _MARK, False) else None
        inputs = (module, query, key, value, attention_mask, *args)
        if clip is None or not module.training or not torch.is_grad_enabled():
            return function(*inputs, **kwargs)
        result, bound = (_flex if name == "flex_attention" else _observed)(function, inputs, kwargs)
        if kwargs.get("softcap") is not None or (bound is not None and len(bound) != query.shape[1]):
            bound = None  # a bound on capped logits, or heads in another layout
        if bound is not None:
            clip._record_in_forward(module, bound, bound=True)
        elif name in KNOWN:
            scale = kwargs.get("scaling")
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            causal = kwargs.get("is_causal")
            causal = getattr(module, "is_causal", True) if causal is None else causal
            causal = name == "sdpa" and attention_mask is None and bool(causal)
            bias = kwargs.get("position_bias")
            clip.observe(module, query, key, scale=scale, mask=attention_mask, bias=bias, causal=causal)
        else:
            needed = "a kernel known to return the log-sum-exp of each head's logits, without a softcap"
            write = 'Write model.set_attn_implementation("sdpa") before QKClip(model)'
            raise ValueError(explain_error(type(module).__name__, f"attention by {name!r}", needed, write))
        return result

    attention.watches = True  # type: ignore[attr-defined]
    return attention


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _observed(
    function: Callable[..., Any], inputs: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Tensor | None]:
    """Return the result of an attention function, and the bound from the kernels that it ran (None: no bound)."""
    with KernelBounds() as kernels:
        result = function(*inputs, **kwargs)
    return result, kernels.bound


def _flex(function: Callable[..., Any], inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Tensor | None]:
    """Return the result of flex attention, and the bound from the log-sum-exp in it (None: no bound).

    Its kernel is compiled, so `_observed` cannot observe it. `transformers` returns the log-sum-exp on a GPU,
    not on a CPU.
    """
    result = function(*inputs, **kwargs)
    return result, None if result[1] is None else bound_of(result[1])
