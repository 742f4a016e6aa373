"""Checkpoint: gives `muonmesh.checkpoint` the parameters and state of an engine, at every ZeRO stage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import torch.distributed as dist
from deepspeed.moe.experts import Experts
from deepspeed.utils import groups as deepspeed_groups
from torch import Tensor, nn

from muonmesh.checkpoint.of_muon import OfMuon
from muonmesh.checkpoint.record import Record
from muonmesh.integrations.deepspeed.calls import Call
from muonmesh.names import canonical_name


def engine_records(calls: Iterable[Call], groups: Iterable[dict[str, Any]]) -> Iterator[Record]:
    """Yield a `Record` of each parameter of all calls, with its state.

    Args:
        calls: The calls of the engine, with their current state.
        groups: The param groups of the engine's optimizer, whose settings are saved.
    """
    group_of = {name: group for group in groups for name in group["parameters"]}
    for call in calls:
        for record in OfMuon(call.told).checkpoint_records():
            held = {key: value.dtype for key, value in call.muon.state[record.tensor].items()}
            parts = tuple(replace(part, dtype=held.get(part.key, part.dtype)) for part in record.parts)
            yield replace(record, parts=parts, group=group_of[record.name])


def expert_names(model: nn.Module) -> dict[str, str]:
    """Return the checkpoint names of the parameters and buffers of this rank's experts, by their names in the model.

    In the model, each rank numbers its experts from 0. In a checkpoint, an expert has its number among the experts of
    all ranks, so a checkpoint loads at any size of expert parallelism.
    """
    found = {}
    for path, module in model.named_modules():
        if not isinstance(module, Experts):
            continue
        size, ranks = module.num_local_experts, next((p.group_name for p in module.parameters()), None)
        first = 0 if ranks is None else size * deepspeed_groups._get_expert_parallel_rank(ranks)
        for number, expert in enumerate(module.deepspeed_experts):
            for name, _ in chain(expert.named_parameters(remove_duplicate=False), expert.named_buffers()):
                names = [f"{path}.deepspeed_experts.{each}.{name}" for each in (number, first + number)]
                found[canonical_name(names[0])] = canonical_name(names[1])
    return found


def masters_of(zero: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the fp32 weights that this rank steps, each with the module's weights that DeepSpeed rounds from it.

    Both have the same shape and order. Weights that are swapped out have no memory here and are left out.
    """
    pairs: Iterable[tuple[Any, Any]] = ()
    if hasattr(zero, "fp16_partitioned_groups_flat"):
        pairs = zip(zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat, strict=True)
    elif hasattr(zero, "fp32_groups"):
        pairs = zip(chain(*zero.fp32_groups), chain(*zero.fp16_groups), strict=True)
    elif hasattr(zero, "real_dp_process_group"):
        stages = hasattr(zero, "parallel_partitioned_bit16_groups")  # 1 and 2; else `BF16_Optimizer`
        masters = zero.single_partition_of_fp32_groups if stages else zero.fp32_groups_flat_partition
        parts = zero.parallel_partitioned_bit16_groups if stages else zero.bf16_partitioned_groups
        ranks = [dist.get_rank(group) for group in zero.real_dp_process_group]
        pairs = [(master, part[rank]) for master, part, rank in zip(masters, parts, ranks, strict=True)]
    for master, weight in pairs:
        if weight is not None and weight.numel() == master.numel():
            yield master.detach(), weight.detach()


def publish(zero: Any) -> None:
    """Copy the current fp32 weights of a ZeRO optimizer into the weights with which the module computes."""
    if hasattr(zero, "update_lp_params"):
        zero.update_lp_params()
    elif hasattr(zero, "fp16_partitioned_groups_flat"):
        for number in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(number)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
    elif hasattr(zero, "fp32_groups"):
        for master, weight in masters_of(zero):
            weight.copy_(master)
