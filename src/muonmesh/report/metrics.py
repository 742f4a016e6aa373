"""Metrics: figures of the last step by group, summed over shards and counted once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from muonmesh.comm.agreement import agree_on_plan
from muonmesh.comm.exchange import Exchange
from muonmesh.comm.gradients import GradientSource
from muonmesh.comm.storage import local_of
from muonmesh.numerics.normalize import sums_of_squares
from muonmesh.step.planning import Planned
from muonmesh.step.sums import Sums

_FIGURES = ("gradient", "momentum", "weight", "update")


Here = tuple[Sequence[Mapping[str, Any]], Mapping[Tensor, Mapping[str, Any]], GradientSource, Sums | None]
"""An optimizer's groups, its state, where its gradients are, and the sums of its last step's updates."""


def measure(
    planned: Planned, exchange: Exchange, here: Here | None, error: Exception | None
) -> dict[str, float] | None:
    """Return `Muon.metrics`: one all-reduce of an fp64 vector over the exchange's ranks, which may have other groups.

    Args:
        planned: The plan that all ranks know of.
        exchange: Reduces.
        here: What is measured; None if this rank has other parameters than planned, and only tells the others.
        error: What is wrong with its groups.

    Returns:
        None if some rank has changed, so that all must plan again first.

    Raises:
        Exception: ``error``, on the rank that found it.
        PlanError: on the others.
    """
    groups = here[0] if here is not None else ()
    names = planned.group_names([group["name"] for group in groups], exchange.group)
    # Squares and elements; the last row says whether a rank has changed, and whether one has found an error.
    totals = torch.zeros(len(names) + 1, len(_FIGURES), 2, dtype=torch.float64, device=planned.device)
    totals[-1, 0, 0], totals[-1, 1, 0] = here is None, error is not None
    if here is not None and error is None:
        _add(totals, names, planned, *here)
    *rows, told = exchange.reduce_sums(totals, what="the sum of the metrics").tolist()
    if told[1][0]:
        agree_on_plan(exchange.group, exchange.plan, error)
    if told[0][0]:
        return None
    figures: dict[str, float] = {}
    mine = {group["name"] for group in groups}
    for group_name, row in zip(names, rows, strict=True):
        if group_name not in mine:
            continue
        rms = {name: math.sqrt(s / n) for name, (s, n) in zip(_FIGURES, row, strict=True) if n}
        for name in ("gradient", "momentum", "update"):
            if name in rms:
                figures[f"{group_name}/{name}_rms"] = rms[name]
        if "update" in rms and rms.get("weight"):
            figures[f"{group_name}/update_to_weight"] = rms["update"] / rms["weight"]
    return figures


def _add(
    totals: Tensor,
    names: Sequence[str],
    planned: Planned,
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[Tensor, Mapping[str, Any]],
    source: GradientSource,
    sums: Sums | None,
) -> None:
    """Add the squares and the number of elements of what this rank stores."""
    places = [names.index(group["name"]) for group in groups]
    for member in planned.members:
        held = state.get(member.tensor, {})
        momentum = held.get("momentum_buffer", held.get("exp_avg"))
        if momentum is not None and local_of(momentum).dtype == torch.int8:
            momentum = planned.blocks.wide(member.name, member.tensor, "momentum_buffer", held)
        for figure, value in enumerate((source.gradient(member.tensor), momentum, member.tensor)):
            if value is None:
                continue
            storage = member.momentum_storage if figure == 1 and "momentum_buffer" in held else member.storage
            for part in storage.parts(local_of(value.detach())):
                totals[places[member.group], figure, 0] += sums_of_squares([part])[0] / storage.copies
                totals[places[member.group], figure, 1] += part.numel() / storage.copies
    for number, place in enumerate(places):
        update = sums.of(number) if sums is not None else None
        if update is not None:
            totals[place, 3, 0] = update
            totals[place, 3, 1] = totals[place, 2, 1]
