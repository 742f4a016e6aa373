"""The largest attention logit of each head, some queries at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

AT_ONCE = 1 << 24
"""Logits that are computed at a time, so that they take at most 64 MiB."""


@torch.no_grad()
def largest_logits(query: Tensor, key: Tensor, *, scale: float, mask: Any = None, causal: bool = False) -> Tensor:
    """Return the largest logit of each head, fp32 (heads,); -inf where a mask leaves none.

    Args:
        query: Shape (batch, heads, queries, size).
        key: Shape (batch, groups, keys, size); each of the groups serves heads/groups heads, as `transformers` orders
            them.
        scale: What the products are multiplied by.
        mask: None; bool, true where a query may look; or numbers to be added. It broadcasts to (batch, heads, queries,
            keys). A `BlockMask` of flex attention too.
        causal: Whether a query looks at no later key, the last query at all keys. Only without a mask.
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
