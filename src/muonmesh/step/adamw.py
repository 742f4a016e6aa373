"""AdamW: the other half of a step, torch's own on what a rank stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from muonmesh.comm.storage import local_of
from muonmesh.numerics.rules import AdamWRule
from muonmesh.settings import Precision
from muonmesh.step.flags import Flags
from muonmesh.step.offload import Offload, fresh_zeros
from muonmesh.step.slots import Slot, create_master
from muonmesh.step.update_squares import UpdateSquares

_MOMENTS = ("exp_avg", "exp_avg_sq")


def step_adamw(
    groups: Sequence[Mapping[str, Any]],
    slots_of: Sequence[Sequence[Slot]],
    precision: Precision,
    flags: Flags,
    update_squares: UpdateSquares | None,
    offload: Offload | None = None,
) -> None:
    """Step the AdamW groups.

    Args:
        groups: The param groups.
        slots_of: What this rank stores of the parameters of each AdamW group.
        precision: Whether there are masters, and where state is kept.
        flags: What all ranks agreed on.
        update_squares: To which the squares of the updates, without decay, are added, if anybody asked for them.
        offload: Brings the state, where it lies on the host.
    """
    for slots in slots_of:
        if not slots:
            continue
        rule: AdamWRule = AdamWRule.of(groups[slots[0].group])
        for slot in slots:
            create_master(slot, precision)
            _create(slot, precision)
        if offload is None:
            _step_group(slots, rule, flags, update_squares)
            continue
        for some, states in offload.portions([slot.state for slot in slots], (*_MOMENTS, "master")):
            lent = [replace(slot, state=state) for slot, state in zip(slots[some], states, strict=True)]
            _step_group(lent, rule, flags, update_squares)


def _create(slot: Slot, precision: Precision) -> None:
    """Create moments in the dtype of the weights they move, the parameter's or the master's, where they are missing."""
    if "step" in slot.state:
        return
    local = local_of(slot.tensor)
    moved = local_of(slot.state.get("master", slot.tensor))
    fused = local.device.type == "cuda"
    slot.state["step"] = torch.zeros((), dtype=torch.float32, device=local.device if fused else "cpu")
    for key in _MOMENTS:
        if precision.leaves(local.device):
            zeros = fresh_zeros(local.shape, moved.dtype, local.device, precision)
        else:
            zeros = torch.zeros_like(moved)
        slot.state[key] = slot.storage.wrap(zeros)


def _step_group(slots: Sequence[Slot], rule: AdamWRule, flags: Flags, update_squares: UpdateSquares | None) -> None:
    """Step parameters of one group whose state is where they are."""
    if rule.weight_decay and rule.decay_mode == "cautious":
        for slot in slots:
            _decay(slot, rule, flags)
        rule = replace(rule, weight_decay=0.0)
    before = [local_of(slot.tensor).double() for slot in slots] if update_squares is not None else []
    _step(slots, rule, flags)
    for slot, old in zip(slots, before, strict=False):
        assert update_squares is not None
        moved = local_of(slot.tensor).double() - old * (1 - rule.lr * rule.weight_decay)
        update_squares.add(slot.group, moved.square().sum() / slot.storage.copies)


def _decay(slot: Slot, rule: AdamWRule, flags: Flags) -> None:
    """Decay the weights that AdamW is about to move towards zero: its update has the sign of the new first moment."""
    if slot.gradient is None or flags.only_creates_state:
        return
    weight = local_of(slot.state.get("master", slot.tensor))
    gradient = slot.gradient.to(weight.dtype)
    fresh = weight.clone()
    rule.decay(fresh, torch.lerp(local_of(slot.state["exp_avg"]), gradient, 1 - rule.betas[0]))
    weight.copy_(fresh if flags.stop is None else torch.where(flags.stop, weight, fresh))
    if "master" in slot.state and flags.stop is None:
        local_of(slot.tensor).copy_(weight)


def _step(slots: Sequence[Slot], rule: AdamWRule, flags: Flags) -> None:
    """Step one AdamW group with torch's own AdamW on what this rank stores.

    Moments have the dtype of the weights they move: the parameter's, or the master's.
    """
    weights, gradients, means, squares, steps, masters = [], [], [], [], [], []
    fused = slots[0].tensor.device.type == "cuda"
    for slot in slots:
        weight = slot.state.get("master", slot.tensor)
        if slot.gradient is None:
            continue
        weights.append(local_of(weight))
        gradients.append(slot.gradient.to(weights[-1].dtype))
        means.append(local_of(slot.state["exp_avg"]))
        squares.append(local_of(slot.state["exp_avg_sq"]))
        steps.append(slot.state["step"])
        if "master" in slot.state:
            masters.append((local_of(slot.tensor), weights[-1]))
    if flags.only_creates_state or not weights:
        return
    lr = rule.lr
    if isinstance(lr, Tensor) and lr.device.type == "cpu":
        lr = float(lr)
    beta1, beta2 = rule.betas
    adamw(
        weights,
        gradients,
        means,
        squares,
        [],
        steps,
        foreach=not fused,
        fused=fused,
        found_inf=flags.stop.float() if fused and flags.stop is not None else None,
        amsgrad=False,
        maximize=False,
        beta1=beta1,
        beta2=beta2,
        lr=lr,
        weight_decay=rule.weight_decay,
        eps=rule.eps,
    )
    for parameter, master in masters:
        parameter.copy_(master)
