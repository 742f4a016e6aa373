"""Replicas: checks that ranks which hold the same parameter hold the same numbers.

DDP lets all replicas begin with the same numbers. A loop without DDP does not, nor does a checkpoint that one rank
alone loaded. Replicas that differ would stay different without an error. So the check runs when they may have changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muonmesh.comm.copies import Claim
from muonmesh.comm.gradients import GradientSource, gradient_of
from muonmesh.comm.storage import Storage, local_of, this_rank
from muonmesh.errors import LayoutError
from muonmesh.layout import FlatShards
from muonmesh.step.members import Member
from muonmesh.step.planning import Planned

_AT_ONCE = 2**22
"""Elements that are widened at a time, so that a large embedding takes little memory beside its own."""


Fingerprint = Mapping[str, Tensor]
"""A number made of all bits of a parameter, and of each tensor of its state, by name: 0-d int64, where they are."""


def fingerprints(planned: Planned, state: Mapping[Tensor, Mapping[str, Any]]) -> dict[int, Fingerprint]:
    """Return the fingerprints of the parameters that each of their ranks holds whole, by number of the parameter.

    Only these are compared, since every rank that is asked must have the same to say: where shards are replicated, as
    under HSDP, the ranks of a parameter hold different parts of it. Called at the first step of a plan and after state
    was loaded; the host waits for nothing.
    """
    found = dict[int, Fingerprint]()
    for number, member in enumerate((*planned.muon, *planned.elementwise)):
        if member is None or member.storage.layout is None:
            continue
        if member.storage.copies == len(member.storage.layout.ranks) > 1:
            stored = (("weights", member.tensor, member.storage), *_state(member, state))
            found[number] = {key: sum_of_bits(where, value, member.tensor.device) for key, value, where in stored}
    return found


def _state(member: Member, state: Mapping[Tensor, Mapping[str, Any]]) -> Iterable[tuple[str, Tensor, Storage]]:
    """Yield the state that is stored as the parameter is; that of a flat tensor may be of other parameters too."""
    flat = isinstance(member.storage.layout, FlatShards)
    for key, value in sorted(state.get(member.tensor, {}).items()):
        storage = member.state_layouts[key].storage if key in member.state_layouts else member.storage
        own = key in member.state_layouts or key == "master" or not flat
        if isinstance(value, Tensor) and own and storage.copies == member.storage.copies:
            yield key, value, storage


def claims_of(planned: Planned, ranks: Sequence[int], source: GradientSource) -> list[Claim]:
    """Return what this rank holds that others of its connected set may hold too, which nobody has said."""
    found = list[Claim]()
    for member in planned.members:
        tensor, storage = member.tensor, member.storage
        if not member.may_have_copies(ranks) or dist.get_backend() == "fake":
            continue
        try:
            gradient = gradient_of(member.name, tensor, source)
        except (LayoutError, TypeError):  # the step will say so
            gradient = None
        slopes = None if gradient is None else _norm_and_sum(local_of(gradient.detach()))
        held = "plain" if storage.mesh is None else str(storage.placements)
        kind = f"{storage.shape}, {tensor.dtype}, {held} on {len(member.ranks)} ranks"
        bits = int(sum_of_bits(storage, tensor, tensor.device))
        found.append(Claim(member.name, kind, member.ranks, bits, slopes, member.holders == "unknown"))
    return found


def _norm_and_sum(local: Tensor) -> tuple[float, float]:
    return float(torch.linalg.vector_norm(local, dtype=torch.float64)), float(local.sum(dtype=torch.float64))


def text_of(fingerprint: Fingerprint) -> str:
    """Return it as text. Waits for the device that it is on."""
    return ", ".join(f"{key} {int(number) % 2**64:x}" for key, number in fingerprint.items())


def sum_of_bits(storage: Storage, tensor: Tensor, device: torch.device) -> Tensor:
    """Return the sum of all bits of a tensor, read as whole numbers: the same in whatever order ranks store it.

    On the device of the parameter, where state may have to be brought from the host for it.
    """
    local = local_of(tensor.detach()).to(device, non_blocking=True)
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[local.element_size()]
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    for first, part in _placed(storage, local.reshape(-1)):
        for flat in torch.split(part.view(whole), _AT_ONCE):
            # Times the place in the parameter, so that two elements that have changed places are seen.
            places = torch.arange(first + 1, first + len(flat) + 1, dtype=torch.int64, device=flat.device)
            total += (flat.long() * places).sum()
            first += len(flat)
    return total


def _placed(storage: Storage, flat: Tensor) -> Iterable[tuple[int, Tensor]]:
    """Yield what is stored of a parameter, with the place of its first element in the flattened parameter."""
    if not isinstance(storage.layout, FlatShards) or flat.numel() == 1:
        yield 0, flat
        return
    for first, length, start in storage.layout.held(this_rank()):
        yield first, flat[start : start + length]
