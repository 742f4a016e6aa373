"""Kernels of attention: the log-sum-exp that they return beside their output bounds the logits."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

_FORWARD = re.compile(
    # torch's, of scaled_dot_product_attention and of varlen_attn; those of flash-attn, whose builds are called "fwd"
    r"aten::_scaled_dot_product_(flash|efficient|cudnn|fused)_attention(_for_cpu|_overrideable)?"
    r"|aten::_(flash|efficient)_attention_forward|torch_attn::_varlen_attn"
    r"|\w*flash_attn\w*::(_flash_attn_)?(varlen_)?(forward|fwd)"
)
"""Operators whose second result is the log-sum-exp of each query's scaled logits, a natural logarithm."""


class KernelBounds(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that reads the log-sum-exp off the attention kernels that run in it.

    The largest logit of a query that looks at n keys lies in [lse − ln n, lse]. Nothing is computed but a maximum.

    Attributes:
        bound: fp32 (heads,), what no logit of a head was above; None where no such kernel ran.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bound: Tensor | None = None

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name: str = func._schema.name  # type: ignore[attr-defined]
        if _FORWARD.fullmatch(name) and result[1].numel():
            found = bound_of(result[1])
            self.bound = found if self.bound is None else torch.maximum(self.bound, found)
        return result


@torch.no_grad()
def bound_of(lse: Tensor) -> Tensor:
    """Return what no logit of each head is above, fp32 (heads,), by the log-sum-exp of each query.

    Args:
        lse: Shape (batch, heads, queries), (batch, heads, queries, 1), or (heads, queries) of packed sequences. A query
            that looks at no key has −inf, or +inf as flash-attn writes it.
    """
    local = lse.to_local() if isinstance(lse, DTensor) else lse
    wide = local.detach().float()
    if local.dtype != torch.float32:  # rounded: up again, by half a unit in the last place
        wide = wide + wide.abs() * (torch.finfo(local.dtype).eps / 2)
    wide = wide.masked_fill(wide == torch.inf, -torch.inf)
    heads = 0 if wide.ndim == 2 else 1
    return wide.amax([dim for dim in range(wide.ndim) if dim != heads])
