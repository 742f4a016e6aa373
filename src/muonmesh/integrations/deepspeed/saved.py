"""Saved: the parameters of an engine as `muonmesh.checkpoint` sees them, at every stage of ZeRO."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from muonmesh.checkpoint.record import Record, adamw_parts
from muonmesh.comm.storage import Storage
from muonmesh.integrations.deepspeed.calls import Call

_THEIRS = {"momentum_buffer": "exp_avg"}
"""What DeepSpeed calls the state of ours."""


def engine_records(
    calls: Iterable[Call], groups: Iterable[dict[str, Any]], states: MutableMapping[Tensor, dict[str, Any]]
) -> Iterator[Record]:
    """Yield the parameters of all calls, with their state under DeepSpeed's names.

    Args:
        calls: What the engine steps.
        groups: Of the engine's optimizer, whose settings count.
        states: Of the engine's optimizer.
    """
    group_of = {name: group for group in groups for name in group["parameters"]}
    for call in calls:
        if call.layouts and call.algorithm == "adamw":
            state = states[call.tensor]
            # DeepSpeed loads a count as a number.
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32).clone()
            for name, layout in call.layouts.items():
                storage, tensor = Storage(layout, layout.shape), call.tensor
                parts = adamw_parts(storage, tuple(tensor.shape), tensor.dtype, tensor.device, tensor.device)
                yield Record(name, tensor, storage, states, tuple(parts), group_of[name])
            continue
        for record in call.muon.checkpoint_records():
            parts = []
            for part in record.parts:
                stored = _THEIRS.get(part.key, part.key)
                held = states[record.tensor].get(stored)
                if part.key == "step":
                    states[record.tensor]["step"] = torch.as_tensor(held, dtype=torch.float32).clone()
                dtype = held.dtype if isinstance(held, Tensor) else part.dtype
                parts.append(replace(part, stored=stored, dtype=dtype))
            yield replace(record, states=states, parts=tuple(parts), group=group_of[record.name])


def frozen_whole(model: nn.Module, *, write: bool) -> AbstractContextManager[Any]:
    """Return a context in which the frozen parameters that stage 3 has partitioned are whole; all ranks enter it."""
    parted = [p for p in model.parameters() if not p.requires_grad and hasattr(p, "ds_id")]
    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(
        parted, modifier_rank=0 if write else None, enabled=bool(parted)
    )
    return context


def publish(zero: Any) -> None:
    """Let the module compute with the fp32 weights of a ZeRO optimizer as they are now."""
    if hasattr(zero, "update_lp_params"):
        zero.update_lp_params()
    elif hasattr(zero, "fp16_partitioned_groups_flat"):
        for number in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(number)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
    elif hasattr(zero, "fp32_groups"):
        for masters, weights in zip(zero.fp32_groups, zero.fp16_groups, strict=True):
            for master, weight in zip(masters, weights, strict=True):
                weight.data.copy_(master)
