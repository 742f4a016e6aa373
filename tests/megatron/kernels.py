"""What Megatron-Core's Mamba takes from a package of kernels that needs CUDA, computed step by step on a CPU.

ssm/mamba_mixer.py asks for it when it is imported, so `install` comes before. The recurrence and the gated norm
are those of Mamba-2 (arXiv 2405.21060), under the names and arguments by which megatron-core 0.16.1 calls them.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class RMSNorm(nn.Module):
    """Norm of groups of channels."""

    def __init__(self, size: int, eps: float, group_size: int, norm_before_gate: bool, device: Any, dtype: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))
        self.eps, self.group_size = eps, group_size

    def forward(self, x: Tensor) -> Tensor:
        groups = x.view(*x.shape[:-1], -1, self.group_size)
        return functional.rms_norm(groups, (self.group_size,), eps=self.eps).view(x.shape) * self.weight


def split_conv1d_scan(
    zxbcdt: Tensor,
    weight: Tensor,
    bias: Tensor,
    dt_bias: Tensor,
    a: Tensor,
    *,
    D: Tensor,
    headdim: int,
    ngroups: int,
    **_: Any,
) -> Tensor:
    """A convolution along the sequence, the recurrence of each head, and its gate.

    Args:
        zxbcdt: (batch, length, channels): gate, input, input and output projections of the states, time steps.
        weight: (channels, width) of the convolution, with its bias.
        dt_bias: (heads,), like ``a``, the decay, and ``D``, which lets inputs through.
    """
    heads = len(a)
    states = (zxbcdt.shape[-1] - 2 * heads * headdim - heads) // (2 * ngroups)
    z, x, dt = zxbcdt.split([heads * headdim, heads * headdim + 2 * ngroups * states, heads], dim=-1)
    width = weight.shape[1]
    x = functional.conv1d(x.mT, weight[:, None], bias, padding=width - 1, groups=len(weight))[..., : x.shape[1]]
    x, b, c = functional.silu(x).mT.split([heads * headdim, ngroups * states, ngroups * states], dim=-1)
    x = x.unflatten(-1, (heads, headdim))
    b, c = (per_head.unflatten(-1, (ngroups, states)).repeat_interleave(heads // ngroups, dim=2) for per_head in (b, c))
    dt = functional.softplus(dt + dt_bias)
    state, outputs = torch.zeros(len(x), heads, headdim, states), []
    for i in range(x.shape[1]):
        decayed = torch.exp(dt[:, i] * a)[..., None, None] * state
        state = decayed + (dt[:, i, :, None] * x[:, i])[..., None] * b[:, i, :, None]
        outputs.append((state * c[:, i, :, None]).sum(-1) + D[:, None] * x[:, i])
    return torch.stack(outputs, dim=1).flatten(2) * functional.silu(z)


def install() -> None:
    """Let the package be found in this process."""
    members: dict[str, dict[str, Any]] = {
        "mamba_ssm": {},
        "mamba_ssm.ops": {},
        "mamba_ssm.ops.triton": {},
        "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": RMSNorm},
        "mamba_ssm.ops.triton.ssd_combined": {
            "mamba_chunk_scan_combined": None,
            "mamba_split_conv1d_scan_combined": split_conv1d_scan,
        },
    }
    for name, inside in members.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(inside)
