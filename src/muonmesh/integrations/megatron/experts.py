"""Experts: the weights of a GroupedMLP, which are one matrix an expert in memory, whatever their shape says.

It reads ``weight1`` as (experts, hidden, ffn) and ``weight2`` as (experts, ffn, hidden), stored in × out; as parameters
they are hidden × (experts · ffn) and (experts · ffn) × hidden. So each expert is stepped as a tensor of its own, a view
of that memory, under the number that it has in the whole model. Read from megatron-core 0.16.1, the last that has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from muonmesh.groups.fused_projections import class_names
from muonmesh.groups.sites import Role, Site
from muonmesh.integrations.megatron.roles import HALVES
from muonmesh.integrations.megatron.saved_boxes import SavedBox


def is_grouped(module: nn.Module) -> bool:
    """Whether a module is a GroupedMLP of Megatron's."""
    return "GroupedMLP" in class_names(module, "megatron")


def expert_role(site: Site) -> Role | None:
    """Say what one expert of a GroupedMLP's weight is; None of other parameters."""
    if not is_grouped(site.module):
        return None
    config: Any = site.module.config
    gated = site.key == "weight1" and config.gated_linear_unit
    return Role("muon", "matrices", "experts, each its own (GroupedMLP)", ("transposed", HALVES if gated else "whole"))


def expert_names(site: Site, name: str, expert_rank: int) -> list[str]:
    """Return the names of the tensors that a parameter is stepped as: its own, or one for each expert.

    Args:
        site: Where the model holds it.
        name: Its name in the whole model.
        expert_rank: Of this rank among those of expert parallelism.
    """
    if not is_grouped(site.module):
        return [name]
    before, _, key = name.rpartition(".")
    count: Any = site.module.num_local_experts
    return [f"{before}.{expert_rank * count + i}.{key}" for i in range(count)]


def expert_of(place: int, boxes: Sequence[SavedBox]) -> tuple[int, int, tuple[int, int], list[SavedBox]]:
    """Return the elements low to high of a weight that are one expert, its shape (in, out), and its boxes.

    Args:
        place: Of the expert among those of this rank.
        boxes: Of the weight, as Megatron's checkpoints have it: boxes of (experts, out, in), which follow each other
            along the last dim of the memory.
    """
    rows, cols = boxes[0].shape[2], sum(box.shape[1] for box in boxes)
    found, start = [], 0
    for box in boxes:
        whole, offset, shape = ((sizes[2], sizes[1]) for sizes in (box.whole, box.offset, box.shape))
        found.append(SavedBox(box.key, whole, offset, shape, start, (cols, 1)))
        start += box.shape[1]
    size = rows * cols
    return place * size, (place + 1) * size, (rows, cols), found
