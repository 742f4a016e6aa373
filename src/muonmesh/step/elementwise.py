"""Elementwise: the half of a step that needs no whole matrices, AdamW's, on what a rank stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from muonmesh.comm.storage import local_of
from muonmesh.numerics.rules import ElementwiseRule
from muonmesh.settings import Precision
from muonmesh.step.flags import Flags
from muonmesh.step.offload import Offload
from muonmesh.step.slots import COUNT, Slot, create_kept, create_master
from muonmesh.step.update_squares import UpdateSquares


def step_elementwise(
    rules: Sequence[Any],
    slots_of: Sequence[Sequence[Slot]],
    precision: Precision,
    flags: Flags,
    update_squares: UpdateSquares | None,
    offload: Offload | None = None,
) -> None:
    """Step the groups of elementwise rules.

    Args:
        rules: The snapshots of the groups' rules.
        slots_of: What this rank stores of the parameters of each such group.
        precision: Whether there are masters, and where state is kept.
        flags: What all ranks agreed on.
        update_squares: To which the squares of the updates, without decay, are added, if anybody asked for them.
        offload: Brings the state, where it lies on the host.
    """
    for slots in slots_of:
        if not slots:
            continue
        rule: ElementwiseRule = rules[slots[0].group]
        for slot in slots:
            _create(slot, precision)
        if offload is None:
            _step(slots, rule, flags, update_squares)
            continue
        for some, states in offload.portions([slot.state for slot in slots], (*rule.keeps(), "master")):
            lent = [replace(slot, state=state) for slot, state in zip(slots[some], states, strict=True)]
            _step(lent, rule, flags, update_squares)


def _create(slot: Slot, precision: Precision) -> None:
    """Create what is missing of the state."""
    create_master(slot, precision)
    create_kept(slot, precision)
    if COUNT not in slot.state:
        device = slot.tensor.device  # torch's fused kernels want it on the device
        counted_on = device if device.type == "cuda" else torch.device("cpu")
        slot.state[COUNT] = torch.zeros((), dtype=torch.float32, device=counted_on)


def _step(slots: Sequence[Slot], rule: ElementwiseRule, flags: Flags, update_squares: UpdateSquares | None) -> None:
    """Step parameters of one group whose state is where they are."""
    slots = [slot for slot in slots if slot.gradient is not None]
    if flags.only_creates_state or not slots:
        return
    weights = [local_of(slot.state.get("master", slot.tensor)) for slot in slots]
    gradients = [
        slot.gradient.to(weight.dtype) for slot, weight in zip(slots, weights, strict=True) if slot.gradient is not None
    ]
    state = {key: [local_of(slot.state[key]) for slot in slots] for key in rule.keeps()}
    counts, measured = [slot.state[COUNT] for slot in slots], update_squares is not None
    squares = rule.step(weights, gradients, state, counts, stop=flags.stop, measured=measured)
    for slot, square in zip(slots, squares, strict=False):
        assert update_squares is not None
        update_squares.add(slot.group, square / slot.storage.copies)
    for slot, weight in zip(slots, weights, strict=True):
        if "master" in slot.state:
            local_of(slot.tensor).copy_(weight)
