"""Optimizers: the two opponents, built alike: the same groups, the same decay, the same schedule."""

from __future__ import annotations

import torch
from torch import nn

import muonmesh as mm
from muonmesh.cli.settings import Optimizer, Settings

ADAMW_BETAS = (0.9, 0.95)  # as in Muon's AdamW groups
ADAMW_EPS = 1e-8


def build_optimizer(name: Optimizer, model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Muon with its AdamW groups, or torch's AdamW on every parameter.

    Both get their groups from :func:`muonmesh.split_params`, so vectors are decayed by neither.
    """
    if name == "muon":
        return mm.Muon(
            mm.split_params(model),
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            adamw_betas=ADAMW_BETAS,
            adamw_eps=ADAMW_EPS,
            process_group="world" if settings.parallel == "ddp" else None,
        )
    groups = [
        {"params": group["params"], "weight_decay": group.get("weight_decay", settings.weight_decay)}
        for group in mm.split_params(model)
    ]
    return torch.optim.AdamW(
        groups,
        lr=settings.adamw_lr,
        betas=ADAMW_BETAS,
        eps=ADAMW_EPS,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def clip_gradients(optimizer: torch.optim.Optimizer, model: nn.Module, max_norm: float) -> None:
    """Clip to ``max_norm``, zero for never. Muon clips what its AdamW groups hold: its own update has no magnitude."""
    if max_norm == 0:
        return
    if isinstance(optimizer, mm.Muon):
        optimizer.clip_grad_norm_(max_norm, norms=False)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def explain(optimizer: torch.optim.Optimizer) -> str:
    """Who goes where and why, as text. Called on all ranks."""
    if isinstance(optimizer, mm.Muon):
        return str(optimizer.explain())
    lines = [f"torch.optim.AdamW, betas {ADAMW_BETAS}, eps {ADAMW_EPS}"]
    for number, group in enumerate(optimizer.param_groups):
        count = sum(parameter.numel() for parameter in group["params"])
        lines.append(
            f"group {number}: {len(group['params'])} parameters, {count:,} entries, "
            f"lr {group['lr']:g}, weight decay {group['weight_decay']:g}"
        )
    return "\n".join(lines)


def metrics(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """What the optimizer says of its last step; nothing for AdamW. Called on all ranks."""
    figures = optimizer.metrics() if isinstance(optimizer, mm.Muon) else {}
    return {key: float(value) for key, value in figures.items()}  # on a device they are tensors


def communication_seconds(optimizer: torch.optim.Optimizer) -> float:
    """Host seconds that the last step spent waiting for collectives."""
    return optimizer.communication_seconds if isinstance(optimizer, mm.Muon) else 0.0
