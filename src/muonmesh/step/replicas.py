"""Replicas: checks that all ranks that share a parameter have the same settings for it, and copies the same numbers.

With DDP all replicas begin with the same numbers. This is not sure in a loop without DDP, or if only one rank loaded a
checkpoint. Replicas that differ would stay different without an error. So this check runs when they may have changed.
The settings are compared in every step, as a hash.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muonmesh.comm.agreement import SILENT, bits_of
from muonmesh.comm.gradients import GradientSource, gradient_of, partial_axes
from muonmesh.comm.same_plan import CHECKSUM
from muonmesh.comm.storage import Storage, local_of, this_rank
from muonmesh.comm.undeclared_replicas import Claim, Gradients, Sums
from muonmesh.layout import FlatShards, MeshLayout, Replicate
from muonmesh.numerics.dtypes import real_of
from muonmesh.settings.reading import StepSettings
from muonmesh.step.flag_vector import DIGEST
from muonmesh.step.int8_momentum import SCALE
from muonmesh.step.members import OptimizedParameter
from muonmesh.step.planning import StepPlan
from muonmesh.step.state_layout import Precision

_AT_ONCE = 2**18
"""Number of elements that are converted to int64 or fp64 at a time, so that a large embedding needs little extra
memory. With more, a CPU is up to eight times slower (measured); with fewer, a device launches more kernels."""

_MIX = 6364136223846793005
"""Odd, so that no bit of a sum of products with its powers is lost (Knuth's MMIX generator)."""

_SILENT = bytes([SILENT]) * DIGEST

Fingerprint = Mapping[str, Tensor]
"""Checksums of a parameter ("weights") and of each tensor of its state, by name: 0-d int64 on the parameter's
device."""


def fingerprints(planned: StepPlan, state: Mapping[Tensor, Mapping[str, Any]]) -> dict[int, Fingerprint]:
    """Return the fingerprints of all parameters of which several ranks hold whole copies, by number of the parameter.

    Replicated shards, as with HSDP, are not compared, because the ranks of such a parameter hold different parts of it.
    This function is called at the first step of a plan and after state was loaded. The CPU does not wait.
    """
    sums = dict[int, Fingerprint]()
    for number, member in enumerate((*planned.muon, *planned.elementwise)):
        if member is not None and member.storage.replicated:
            stored = (("weights", member.tensor, member.storage), *_state(member, state))
            sums[number] = {key: sum_of_bits(storage, value, member.tensor.device) for key, value, storage in stored}
    return sums


def _state(
    member: OptimizedParameter, state: Mapping[Tensor, Mapping[str, Any]]
) -> Iterable[tuple[str, Tensor, Storage]]:
    """Yield the state with as many copies as the parameter has; without state that other parameters share."""
    flat, layouts = isinstance(member.storage.layout, FlatShards), member.state_layouts
    for key, value in sorted(state.get(member.tensor, {}).items()):
        storage = layouts[key].storage if key in layouts else member.storage
        codes = layouts.get(key.removesuffix(SCALE))  # scales have as many copies as their codes
        copies = storage.copies if codes is None else codes.storage.copies
        is_of_parameter = key in layouts or key == "master" or not flat
        if isinstance(value, Tensor) and is_of_parameter and copies == member.storage.copies:
            yield key, value, storage


def said_of_copies(
    planned: StepPlan, ranks: Sequence[int], source: GradientSource | None
) -> tuple[list[Claim], Gradients]:
    """Return what this rank says of the parameters that other ranks hold too, as the ranks of a set compare it.

    Args:
        planned: The plan of this rank.
        ranks: The ranks of the connected set.
        source: The source of the gradients; None: gradients are not compared.

    Returns:
        A claim for each parameter that other ranks may hold, unknown to muonmesh; and the sums of the gradients of all
        parameters of which the same ranks hold declared copies, or copies of the same shard.
    """
    claims, sums_of = list[Claim](), dict[tuple[Any, ...], dict[str, Sums]]()
    if len(ranks) == 1 or dist.get_backend() == "fake":
        return claims, {}
    # A source with a `complete` of its own brings gradients after this. A source may also be a proxy of another one.
    later = getattr(getattr(source, "complete", None), "__func__", None) is not GradientSource.complete
    for member in planned.members:
        tensor, storage = member.tensor, member.storage  # a flat buffer may hold other parameters beside this one
        if member.may_have_copies(ranks):
            slopes = None if source is None else _sums_of(_gradient(member, source))
            kind_of_ranks = "plain" if storage.mesh is None else str(storage.placements)
            kind = f"{storage.shape}, {tensor.dtype}, {kind_of_ranks} on {len(member.ranks)} ranks"
            bits = int(sum_of_bits(storage, tensor, tensor.device))
            claims.append(Claim(member.name, kind, member.ranks, bits, slopes, member.holders == "unknown"))
        elif source is not None and not later and isinstance(storage.layout, MeshLayout) and storage.copies > 1:
            gradient = _gradient(member, source)
            if (slopes := _sums_of(gradient)) is not None and not any(partial_axes(gradient)):
                layout = storage.layout  # of a sharded parameter, ranks with the same shard have equal gradients
                copied = tuple(isinstance(placement, Replicate) for placement in layout.placements)
                holders = member.ranks, layout.mesh, copied, layout.parts(this_rank())
                sums_of.setdefault(holders, {})[member.name] = slopes
    return claims, {zlib.crc32(repr((holders, list(sums))).encode()): sums for holders, sums in sums_of.items()}


def _gradient(member: OptimizedParameter, source: GradientSource) -> Tensor | None:
    try:
        return gradient_of(member.name, member.tensor, source)
    except Exception:  # the step raises this error later, on every rank
        return None


def _sums_of(gradient: Tensor | None) -> Sums | None:
    if gradient is None:
        return None
    flat = real_of(local_of(gradient.detach())).reshape(-1)
    sums = torch.zeros(2, dtype=torch.float64, device=flat.device)
    # Norms of two large batches are nearly equal, and a plain sum is 0 for many weights, as before a LayerNorm.
    wave = torch.arange(min(len(flat), _AT_ONCE), dtype=torch.float64, device=flat.device).cos_()
    for part in torch.split(flat, _AT_ONCE):
        wide = part.double()
        sums += torch.stack([wide.dot(wide), wide.dot(wave[: len(wide)])])
    squares, total = sums.tolist()
    return math.sqrt(squares), total


def text_of(fingerprint: Fingerprint) -> str:
    """Return a fingerprint as text. The CPU waits for the device."""
    return ", ".join(f"{key}{CHECKSUM}{int(number) % 2**64:x}" for key, number in fingerprint.items())


def sum_of_bits(storage: Storage, tensor: Tensor, device: torch.device) -> Tensor:
    """Return a checksum of all bits of a tensor, read as integers: 0-d int64, the same in any order of storage.

    Each element counts times its place. The sum is computed on ``device``; state in CPU memory is copied there.
    """
    local = real_of(local_of(tensor.detach())).to(device, non_blocking=True)
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[local.element_size()]
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    for first, part in _placed(storage, local.reshape(-1)):
        for flat in torch.split(part.view(whole), _AT_ONCE):
            # Each element is multiplied by its place in the parameter, so that swapped elements change the sum.
            places = torch.arange(first + 1, first + len(flat) + 1, dtype=torch.int64, device=flat.device)
            total += (flat.long() * places).sum()
            first += len(flat)
    return total


def _placed(storage: Storage, flat: Tensor) -> Iterable[tuple[int, Tensor]]:
    """Yield the stored parts of a parameter, each with the place of its first element in the flattened parameter."""
    if not isinstance(storage.layout, FlatShards) or flat.numel() == 1:
        yield 0, flat
        return
    for first, length, start in storage.layout.intervals_of(this_rank()):
        yield first, flat[start : start + length]


# ---------------------------------------------------------------- settings


def said_of_settings(
    planned: StepPlan, settings: StepSettings, replicas: Mapping[int, Fingerprint], precision: Precision, loaded: bool
) -> dict[str, bytes | Tensor]:
    """Return what this rank says of its settings, for each set of ranks that share parameters: see `FlagVector`.

    If learning rate, momentum, scale or dtype differed between the ranks that hold a parameter, replicas would drift
    apart without an error, and several rules would update one matrix. The CPU does not wait for fingerprints, which
    only the device knows.

    Args:
        planned: The plan with the parameters that are compared (`FlagVector.shared`).
        settings: The settings of the groups.
        replicas: `fingerprints` at the first step of a plan and after state was loaded; empty in other steps.
        precision: The optimizer's dtypes.
        loaded: Whether state has been loaded since the last step.
    """
    flag_vector, before = planned.flag_vector, planned.said_of_settings
    if before is None or before[0] is not settings or before[1] is not precision or before[2] != loaded:
        texts = list(map(_text_of_rule, settings.rules))
        sets = [
            bits_of(f"{static} {precision} {loaded} {[texts[group] for group in groups]}") if groups else _SILENT
            for groups, static in planned.terms
        ]
        before = planned.said_of_settings = settings, precision, loaded, b"".join(sets)
    *_, digests = before
    if not replicas:
        return {"settings": digests}
    values = torch.full((len(planned.terms), DIGEST), SILENT, dtype=torch.uint8, device=planned.device)
    bits = torch.arange(DIGEST, dtype=torch.int64, device=planned.device)
    for index, (groups, _) in enumerate(planned.terms):
        if groups:
            mixed = torch.zeros((), dtype=torch.int64, device=planned.device)
            # A set without fingerprints adds nothing, so its digest does not depend on fingerprints of other sets.
            for value in (value for number in flag_vector.shared[index] for value in replicas.get(number, {}).values()):
                mixed = mixed * _MIX + value
            values[index] = mixed >> bits & 1
    return {"settings": digests, "values": values.view(-1)}


def lines(
    planned: StepPlan, settings: StepSettings, replicas: Mapping[int, Fingerprint], precision: Precision, loaded: bool
) -> dict[str, str]:
    """Return the compared settings of each parameter as text, by name. The CPU waits for values on the device."""
    text_by_name = {}
    for number, member in enumerate((*planned.muon, *planned.elementwise)):
        if member is not None:
            rule, dtype = settings.rules[member.group], local_of(member.tensor).dtype
            text = f"{_text_of_rule(rule)}, {dtype}, {precision}, state loaded={loaded}"
            text_by_name[member.name] = ", ".join([text, *map(text_of, filter(None, [replicas.get(number)]))])
    return text_by_name


def _fields_of(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


_names_of_fields: Callable[[Any], tuple[str, ...]] = cache(_fields_of)  # rules are few, and told in many steps


def _text_of_rule(rule: Any) -> str:
    """Return the settings of a rule as text, which is the same on every rank with the same settings."""
    if rule is None:
        return "an error"
    values = {name: getattr(rule, name) for name in _names_of_fields(type(rule))}
    return ", ".join(f"{name}={_plain(value)!r}" for name, value in (("rule", type(rule).__name__), *values.items()))


def _plain(value: Any) -> Any:
    """Return lists as tuples and numbers as floats, so that equal settings have equal texts."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    return value if isinstance(value, (str, bool)) or value is None else float(value)
