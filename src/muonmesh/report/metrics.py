"""Metrics: figures of the last step by group, summed over shards and counted once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from muonmesh.comm.agreement import STANDING, Agreement, standing
from muonmesh.comm.gather_objects import gather_objects
from muonmesh.comm.storage import local_of, local_shape
from muonmesh.numerics.dtypes import real_of
from muonmesh.numerics.kernels.pinned_copies import upload
from muonmesh.numerics.normalize import sums_of_squares
from muonmesh.step.planning import StepPlan
from muonmesh.step.preflight import host_waits
from muonmesh.step.runtime import Runtime

_FIGURES = ("gradient", "momentum", "weight", "update")
_AGREEMENT = Agreement(*STANDING)


def measure(
    planned: StepPlan, optimizer: Optimizer | None, error: Exception | None, runtime: Runtime
) -> dict[str, float] | None:
    """Return the figures of `Muon.metrics`, by one all-reduce of an fp64 vector over the ranks of the exchange.

    The ranks may have different groups. If the CPU does not wait for other ranks, figures are 0-d fp64 tensors on the
    device. They are NaN if another rank could not follow the plan; the next step then raises an error on all ranks.

    Args:
        planned: The plan that all ranks have compared.
        optimizer: The optimizer to measure; None if the parameters of this rank have changed, so that it only takes
            part.
        error: The error of the groups of this rank, if any.
        runtime: The runtime state of the optimizer.

    Returns:
        The figures by name; None if the parameters of some rank have changed, so that all ranks must plan again first.

    Raises:
        Exception: ``error``, on the rank that found it, if the CPU waits; otherwise the next step raises it.
        PlanError: on the other ranks.
    """
    exchange, waits = planned.exchange, host_waits(runtime, planned)
    groups = optimizer.param_groups if optimizer is not None else ()
    names = planned.group_names([group["name"] for group in groups], exchange.group)
    totals = torch.zeros(len(names), len(_FIGURES), 2, dtype=torch.float64, device=planned.device)
    filled, follows = set[tuple[int, str]](), optimizer is not None
    if optimizer is not None and error is None:
        try:
            filled = _add(totals, names, planned, optimizer, runtime)
        except Exception as found:  # whatever a source raises: the other ranks wait for this rank
            error = found
    if error is not None and not waits and len(exchange.plan.ranks) == 1:
        raise error
    reduce = partial(exchange.reduce_sums, name="the sum of the metrics")
    summed, agreed = _AGREEMENT.ask(standing(error, follows=follows), totals, reduce)
    if waits and bool(agreed.any("error")):
        gather_objects(None, error, group=exchange.group)
    if agreed.plan_again(waits=waits, follows=follows):
        return None
    own_names = {group["name"] for group in groups}
    squares, elements = summed.unbind(-1)
    # All weights count, also those that have not changed, such as experts without tokens, or have no momentum so far,
    # for which a device keeps zeros.
    for figure in (1, 3):
        elements[:, figure] = torch.where(elements[:, figure] > 0, elements[:, 2], 0.0)
    rms = (squares / elements).sqrt_()
    if waits:  # includes groups that only other ranks have
        filled = {(position, _FIGURES[figure]) for position, figure in elements.nonzero().tolist()}
        rms = rms.cpu()
    else:  # the CPU reads nothing, so only figures to which this rank contributes
        rms = torch.where(agreed.any("error", "replan"), torch.nan, rms)
    figures: dict[str, Any] = {}
    for position, (group_name, row) in enumerate(zip(names, rms.tolist() if waits else rms.unbind(), strict=True)):
        of = dict(zip(_FIGURES, row, strict=True))
        if group_name not in own_names:
            continue
        for name in ("gradient", "momentum", "update"):
            if (position, name) in filled:
                figures[f"{group_name}/{name}_rms"] = of[name]
        if (position, "update") in filled and not (waits and of["weight"] == 0):
            figures[f"{group_name}/update_to_weight"] = of["update"] / of["weight"]
    return figures


def _add(
    totals: Tensor,
    names: Sequence[str],
    planned: StepPlan,
    optimizer: Optimizer,
    runtime: Runtime,
) -> set[tuple[int, str]]:
    """Add squares and numbers of elements of this rank's shards to ``totals``; return the entries that it changed."""
    places, sums = [names.index(group["name"]) for group in optimizer.param_groups], runtime.last.squares
    cells, parts, copies = list[int](), list[Tensor](), list[int]()
    filled = set[tuple[int, str]]()
    masks = dict[int, Tensor]()  # by number of a part: zeros that count if other shards have a gradient
    for member in planned.members:
        state = optimizer.state.get(member.tensor, {})
        key = next(iter(member.state_layouts), "")  # the first state of a rule is its momentum
        momentum = state.get(key)
        if momentum is not None and local_of(momentum).dtype == torch.int8:
            momentum = planned.blocks.wide(member.name, member.tensor, key, state)
        gradient, present = runtime.source.gradient(member.tensor), runtime.last.absent.get(member.tensor, False)
        if gradient is None and present is not False:  # missing on this shard only
            gradient = totals.new_zeros(local_shape(member.gradient_storage))
        for figure, value in enumerate((gradient, momentum, member.tensor)):
            if value is None:
                continue
            filled.add((places[member.group], _FIGURES[figure]))
            if figure == 1 and local_of(value).device != totals.device:  # in CPU memory: in order with its copies back
                value = local_of(value).to(totals.device, non_blocking=True)
            home = member.gradient_storage if figure == 0 else member.storage
            storage = member.state_layouts[key].storage if figure == 1 else home
            for part in storage.parts(local_of(value.detach())):
                if value is gradient and isinstance(present, Tensor):
                    masks[len(parts)] = present
                cells.append(places[member.group] * len(_FIGURES) + figure)
                parts.append(real_of(part))
                copies.append(storage.copies)
    if parts:  # all at once: one launch for many parts, and two copies to a device
        index = upload(cells, dtype=torch.int64, device=totals.device)
        counts = [[float(copy), part.numel() / copy] for part, copy in zip(parts, copies, strict=True)]
        divisors = upload(counts, dtype=torch.float64, device=totals.device)
        for number, present in masks.items():
            divisors[number, 1] *= present
        squares = sums_of_squares(parts) / divisors[:, 0]
        totals.view(-1, 2).index_add_(0, index, torch.stack([squares, divisors[:, 1]], dim=1))
    if runtime.last.scale is not None:
        totals[:, 0, 0] /= runtime.last.scale.to(totals).square()
    for number, position in enumerate(places):
        if sums is not None and number in sums:
            filled.add((position, "update"))
            totals[position, 3, 0] = torch.stack(sums[number]).sort().values.sum()  # threads add in any order
            totals[position, 3, 1] = totals[position, 2, 1]
    return filled
