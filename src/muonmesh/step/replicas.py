"""Replicas: whether ranks that hold the same parameter hold the same numbers, looked at when that may have changed.

DDP sees to it that replicas begin alike. A loop without it does not, nor does a checkpoint that was loaded on one rank
alone; and replicas that differ stay different for ever, without an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from muonmesh.comm.storage import Storage, local_of
from muonmesh.step.planning import Member, Planned


def fingerprints(planned: Planned, state: Mapping[Tensor, Mapping[str, Any]]) -> dict[int, str]:
    """Return for each parameter that all of its ranks hold whole, by number, a text of all bits of weights and state.

    Parameters of which ranks hold different parts are left out. Waits for the device; called at the first step of a
    plan and after state was loaded.
    """
    found = {}
    for number, member in enumerate((*planned.muon, *planned.elementwise)):
        if member is None or member.storage.layout is None:
            continue
        if member.storage.copies == len(member.storage.layout.ranks) > 1:
            found[number] = f"weights {_sum(member.storage, member.tensor):x}" + "".join(
                f", {key} {_sum(storage, value):x}" for key, value, storage in _state(member, state)
            )
    return found


def _state(member: Member, state: Mapping[Tensor, Mapping[str, Any]]) -> Iterable[tuple[str, Tensor, Storage]]:
    for key, value in sorted(state.get(member.tensor, {}).items()):
        storage = member.homes[key].storage if key in member.homes else member.storage
        if isinstance(value, Tensor) and storage.copies == member.storage.copies:
            yield key, value, storage


def _sum(storage: Storage, tensor: Tensor) -> int:
    """Return the sum of all bits of a tensor, read as whole numbers: the same in any order."""
    local = local_of(tensor.detach())
    parts = storage.parts(local) if local.ndim else [local]
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[local.element_size()]
    # Times the place, so that two elements that have changed places are seen.
    total = 0
    for part in parts:
        flat = part.reshape(-1).view(whole).long()
        total += int((flat * torch.arange(1, len(flat) + 1, device=flat.device)).sum())
    return total % 2**64
