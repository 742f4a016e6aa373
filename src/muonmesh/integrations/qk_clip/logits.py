"""Logits: the largest attention logit of each head, or an upper bound from the log-sum-exp that fast kernels return."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

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
            found = bound_of(result[1])
            self.bound = found if self.bound is None else torch.maximum(self.bound, found)
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
def largest_logits(query: Tensor, key: Tensor, *, scale: float, mask: Any = None, causal: bool = False) -> Tensor:
    """Return the largest logit of each head, fp32 (heads,); -inf if a mask excludes all logits of a head.

    Args:
        query: Shape (batch, heads, queries, size).
        key: Shape (batch, groups, keys, size). Each group serves heads/groups successive heads, as in `transformers`.
        scale: The factor of the products of queries and keys.
        mask: None; bool, True where a query attends to a key; numbers to add to the logits; or a `BlockMask` of flex
            attention. Tensors broadcast to (batch, heads, queries, keys).
        causal: Whether a query ignores later keys; the last query attends to all keys. Only without a mask.
    """
    batch, heads, queries, _ = query.shape
    groups, keys = key.shape[1], key.shape[2]
    allowed = _dense(mask, batch, heads, queries, keys, query.device)
    transposed = key.detach().transpose(-1, -2).unsqueeze(2)  # (batch, groups, 1, size, keys)
    grouped = query.detach().reshape(batch, groups, heads // groups, queries, -1)
    found = torch.full((heads,), -torch.inf, dtype=torch.float32, device=query.device)
    at_once = max(1, AT_ONCE // max(1, batch * heads * keys))
    for start in range(0, queries, at_once):
        some = grouped[:, :, :, start : start + at_once]
        logits = (some @ transposed).float().mul_(scale).flatten(1, 2)
        if allowed is not None:
            part = allowed if allowed.shape[-2] == 1 else allowed[..., start : start + at_once, :]
            part = part[..., :keys]
            logits = logits.masked_fill_(~part, -torch.inf) if part.dtype == torch.bool else logits + part
        elif causal:
            last = torch.arange(start, start + some.shape[3], dtype=torch.int64, device=query.device) + keys - queries
            later = torch.arange(keys, dtype=torch.int64, device=query.device) > last[:, None]
            logits.masked_fill_(later, -torch.inf)
        if logits.numel():
            torch.maximum(found, logits.amax((0, 2, 3)), out=found)
    return found


def _dense(mask: Any, batch: int, heads: int, queries: int, keys: int, device: torch.device) -> Tensor | None:
    if mask is None or isinstance(mask, Tensor):
        return mask
    from torch.nn.attention.flex_attention import create_mask

    return create_mask(mask.mask_mod, batch, heads, queries, keys, device=str(device))
