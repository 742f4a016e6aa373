"""Metrics: figures of the last step by group, summed over shards and counted once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from muonmesh.comm.exchange import Exchange
from muonmesh.comm.storage import local_of
from muonmesh.numerics.normalize import sums_of_squares
from muonmesh.planning import Member
from muonmesh.step import Sums

_FIGURES = ("gradient", "momentum", "weight", "update")


def measure(
    members: Sequence[Member],
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[Tensor, Mapping[str, Any]],
    sums: Sums | None,
    exchange: Exchange,
    device: torch.device,
) -> dict[str, float]:
    """Return `Muon.metrics`; one all-reduce of an fp64 vector over the exchange's ranks."""
    totals = torch.zeros(len(groups), len(_FIGURES), 2, dtype=torch.float64, device=device)  # squares, elements
    for member in members:
        held = state.get(member.tensor, {})
        momentum = held.get("momentum_buffer", held.get("exp_avg"))
        for figure, value in enumerate((member.tensor.grad, momentum, member.tensor)):
            if value is None:
                continue
            storage = member.state if value is held.get("momentum_buffer") else member.storage
            for part in storage.parts(local_of(value.detach())):
                totals[member.group, figure, 0] += sums_of_squares([part])[0] / storage.copies
                totals[member.group, figure, 1] += part.numel() / storage.copies
    for number in range(len(groups)):
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
