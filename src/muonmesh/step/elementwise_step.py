"""The half of a step that needs no whole matrices, such as AdamW's: each rank updates the elements that it stores."""

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
from muonmesh.step.parameter_steps import COUNT, ParameterStep, create_kept, create_master
from muonmesh.step.stochastic_rounding import round_stored
from muonmesh.step.update_squares import UpdateSquares


def step_elementwise(
    rules: Sequence[Any],
    entries_of: Sequence[Sequence[ParameterStep]],
    precision: Precision,
    flags: Flags,
    update_squares: UpdateSquares | None,
    offload: Offload | None = None,
) -> None:
    """Step the groups of elementwise rules.

    Args:
        rules: The snapshots of the groups' rules.
        entries_of: What this rank stores of the parameters of each such group.
        precision: Whether there are masters, and where state is kept.
        flags: What all ranks agreed on.
        update_squares: To which the squares of the updates, without decay, are added, if anybody asked for them.
        offload: Brings the state, where it lies on the host.
    """
    for entries in entries_of:
        if not entries:
            continue
        rule: ElementwiseRule = rules[entries[0].group]
        for entry in entries:
            _create(entry, precision)
        if offload is None:
            _step(entries, rule, flags, update_squares)
            continue
        for some, states in offload.portions([entry.state for entry in entries], (*rule.keeps(), "master")):
            lent = [replace(entry, state=state) for entry, state in zip(entries[some], states, strict=True)]
            _step(lent, rule, flags, update_squares)


def _create(entry: ParameterStep, precision: Precision) -> None:
    """Create what is missing of the state."""
    create_master(entry, precision)
    create_kept(entry, precision)
    if COUNT not in entry.state:
        device = entry.tensor.device  # torch's fused kernels want it on the device
        counted_on = device if device.type == "cuda" else torch.device("cpu")
        entry.state[COUNT] = torch.zeros((), dtype=torch.float32, device=counted_on)


def _step_widened(
    entry: ParameterStep, rule: ElementwiseRule, flags: Flags, update_squares: UpdateSquares | None
) -> None:
    """Step a parameter and what is kept of it in fp32 copies, and round both up or down."""
    stored = {"": local_of(entry.tensor), **{key: local_of(entry.state[key]) for key in rule.keeps()}}
    wide = {
        key: tensor.to(torch.promote_types(tensor.dtype, torch.float32)).contiguous() for key, tensor in stored.items()
    }
    assert entry.gradient is not None
    squares = rule.step(
        [wide[""]],
        [entry.gradient.to(wide[""].dtype)],
        {key: [wide[key]] for key in rule.keeps()},
        [entry.state[COUNT]],
        stop=flags.stop,
        measured=update_squares is not None,
    )
    for square in squares:
        assert update_squares is not None
        update_squares.add(entry.group, square / entry.storage.copies)
    for key, tensor in stored.items():
        if tensor.dtype == torch.bfloat16:
            round_stored(f"{entry.name} {key}".rstrip(), entry.storage, rule, wide[key], tensor)
        elif tensor is not wide[key]:
            tensor.copy_(wide[key])


def _step(
    entries: Sequence[ParameterStep], rule: ElementwiseRule, flags: Flags, update_squares: UpdateSquares | None
) -> None:
    """Step parameters of one group whose state is where they are."""
    entries = [entry for entry in entries if entry.gradient is not None]
    if flags.only_creates_state or not entries:
        return
    if rule.stochastic_rounding is not None:
        for entry in entries:
            _step_widened(entry, rule, flags, update_squares)
        return
    weights = [local_of(entry.state.get("master", entry.tensor)) for entry in entries]
    gradients = [
        entry.gradient.to(weight.dtype)
        for entry, weight in zip(entries, weights, strict=True)
        if entry.gradient is not None
    ]
    state = {key: [local_of(entry.state[key]) for entry in entries] for key in rule.keeps()}
    counts, measured = [entry.state[COUNT] for entry in entries], update_squares is not None
    squares = rule.step(weights, gradients, state, counts, stop=flags.stop, measured=measured)
    for entry, square in zip(entries, squares, strict=False):
        assert update_squares is not None
        update_squares.add(entry.group, square / entry.storage.copies)
    for entry, weight in zip(entries, weights, strict=True):
        if "master" in entry.state:
            local_of(entry.tensor).copy_(weight)
