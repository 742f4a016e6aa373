"""Metrics: figures of the last step by group, summed over shards and counted once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from muonmesh.comm.exchange import Exchange
from muonmesh.comm.storage import copies_of, local_of
from muonmesh.step import Sums

_FIGURES = ("gradient", "momentum", "weight", "update")


def measure(
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[Tensor, Mapping[str, Any]],
    replicas: Sequence[int] | None,
    sums: Sums | None,
    exchange: Exchange,
) -> dict[str, float]:
    """Return `Muon.metrics`; one all-reduce of an fp64 vector over the exchange's ranks."""
    device = groups[0]["params"][0].device
    totals = torch.zeros(len(groups), len(_FIGURES), 2, dtype=torch.float64, device=device)  # squares, elements
    for number, group in enumerate(groups):
        for tensor in group["params"]:
            held = state.get(tensor, {})
            momentum = held.get("momentum_buffer", held.get("exp_avg"))
            copies = copies_of(tensor, replicas)
            for figure, value in enumerate((tensor.grad, momentum, tensor)):
                if value is not None:
                    local = local_of(value.detach())
                    totals[number, figure, 0] += local.double().square().sum() / copies
                    totals[number, figure, 1] += local.numel() / copies
        update = sums.of(number) if sums is not None else None
        if update is not None:
            totals[number, 3, 0] = update
            totals[number, 3, 1] = totals[number, 2, 1]
    figures: dict[str, float] = {}
    for group, rows in zip(groups, exchange.reduce_sums(totals).tolist(), strict=True):
        rms = {name: math.sqrt(s / n) for name, (s, n) in zip(_FIGURES, rows, strict=True) if n}
        for name in ("gradient", "momentum", "update"):
            if name in rms:
                figures[f"{group['name']}/{name}_rms"] = rms[name]
        if "update" in rms and rms.get("weight"):
            figures[f"{group['name']}/update_to_weight"] = rms["update"] / rms["weight"]
    return figures
