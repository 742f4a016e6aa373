"""The step of elementwise rules, such as AdamW: each rank updates the elements that it stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from muonmesh.comm.storage import local_of
from muonmesh.numerics.dtypes import real_of
from muonmesh.numerics.kernels.threads import all_threads
from muonmesh.numerics.rules import ElementwiseRule, parts
from muonmesh.step.flag_vector import Flags
from muonmesh.step.offload import Offload
from muonmesh.step.parameter_steps import ParameterStep, prepare_state, round_stored
from muonmesh.step.state_layout import COUNT, Precision


@all_threads()
def step_elementwise(
    rule: ElementwiseRule,
    entries: Sequence[ParameterStep],
    precision: Precision,
    flags: Flags,
    squares_by_group: dict[int, list[Tensor]] | None,
    offload: Offload | None = None,
) -> None:
    """Step the parameters of one group whose rule is elementwise.

    Args:
        rule: The snapshot of the group's rule.
        entries: The local parts of the parameters.
        precision: Says whether there are master weights, and where state is kept.
        flags: The flags that all ranks agreed on.
        squares_by_group: Squares of updates, without weight decay, to which this adds; None if no metrics are wanted.
        offload: Copies the state to the device and back, if it is in CPU memory; else None.
    """
    for entry in entries:
        if not entry.in_form:
            prepare_state(entry)
    if offload is None:
        _step(entries, rule, flags, squares_by_group)
        return
    for portion, states in offload.portions([entry.state for entry in entries], (*rule.keeps(), "master")):
        lent = [replace(entry, state=state) for entry, state in zip(entries[portion], states, strict=True)]
        _step(lent, rule, flags, squares_by_group)


def _step(
    entries: Sequence[ParameterStep],
    rule: ElementwiseRule,
    flags: Flags,
    squares_by_group: dict[int, list[Tensor]] | None,
) -> None:
    """Step parameters of one group whose state is on their device.

    A gradient that only other shards of the parameter have counts as zero here. If only the device knows whether they
    have one, it masks the writes.
    """
    if flags.only_creates_state:
        return
    rounds = rule.stochastic_rounding is not None
    for entry in entries:
        if entry.present is not False and "master" in entry.state:
            parts.follow(real_of(local_of(entry.state["master"])), real_of(entry.local))
    present = [entry for entry in entries if entry.present is True]
    batches = [[entry] for entry in present] if rounds else [present]  # copies of one parameter at a time
    for batch in filter(None, [*batches, *([entry] for entry in entries if isinstance(entry.present, Tensor))]):
        absent = ~batch[0].present if isinstance(batch[0].present, Tensor) else None
        stored = [_stored(entry, rule) for entry in batch]
        used = [{key: _widened(tensor) if rounds else tensor for key, tensor in state.items()} for state in stored]
        stop = flags.stop if absent is None or flags.stop is None else flags.stop | absent
        pieces = [
            (entry, state, place)
            for entry, state in zip(batch, used, strict=True)
            for place in ((None,) if entry.places is None else entry.places)
        ]
        squares = rule.step(
            [_at(place, state[""]) for _, state, place in pieces],
            [
                torch.zeros_like(_at(place, state[""]))
                if entry.gradient is None
                else _at(place, real_of(entry.gradient)).to(state[""].dtype)
                for entry, state, place in pieces
            ],
            {key: [_at(place, state[key]) for _, state, place in pieces] for key in rule.keeps()},
            [_count(entry, place) for entry, _, place in pieces],
            stop=stop,
            measured=squares_by_group is not None,
        )
        for (entry, *_), square in zip(pieces, squares, strict=False):
            assert squares_by_group is not None
            square = square if stop is None else torch.where(stop, 0.0, square)
            squares_by_group.setdefault(entry.member.group, []).append(square / entry.member.storage.copies)
        for entry, before, after in zip(batch, stored, used, strict=True):
            _write(entry, rule, before, after)


def _stored(entry: ParameterStep, rule: ElementwiseRule) -> dict[str, Tensor]:
    """Return the tensor to step under the key "" (the master weights if there are any), and the rule's state by key."""
    state = {key: local_of(entry.state[key]) for key in rule.keeps()}
    stored = {"": local_of(entry.state.get("master", entry.member.tensor)), **state}
    return {key: real_of(tensor) for key, tensor in stored.items()}  # as torch.optim does it


def _at(interval: slice | None, tensor: Tensor) -> Tensor:
    """Return the elements at a place in a flat buffer; the whole tensor for None."""
    return tensor if interval is None else tensor[interval]


def _count(entry: ParameterStep, interval: slice | None) -> Tensor:
    """Return the count of steps for a place in a flat buffer; a copy behind the first place, or each would count."""
    count: Tensor = entry.state[COUNT]
    return count.clone() if entry.places and interval is not entry.places[0] else count


def _widened(stored: Tensor) -> Tensor:
    """Return a tensor in fp32 or wider, contiguous."""
    return stored.to(torch.promote_types(stored.dtype, torch.float32)).contiguous()


def _write(
    entry: ParameterStep, rule: ElementwiseRule, stored: Mapping[str, Tensor], after: Mapping[str, Tensor]
) -> None:
    """Write stepped copies back, with stochastic rounding to bf16; and round master weights to the parameter."""
    for key, tensor in stored.items():
        if tensor is not after[key] and tensor.dtype == torch.bfloat16:
            round_stored(f"{entry.member.name} {key}".rstrip(), entry.member.storage, rule, after[key], tensor)
        elif tensor is not after[key]:
            tensor.copy_(after[key])
    if "master" in entry.state:
        weights = real_of(entry.local)
        for place in [...] if entry.places is None else entry.places:
            weights[place].copy_(stored[""][place])
