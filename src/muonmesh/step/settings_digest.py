"""Settings digest: in every step, ranks that share a parameter compare a hash of its settings."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from muonmesh.comm.storage import local_of
from muonmesh.numerics.kernels.memory import upload
from muonmesh.settings.reading import SettingsFound
from muonmesh.step.flag_vector import DIGEST
from muonmesh.step.planning import Planned
from muonmesh.step.precision import Precision
from muonmesh.step.replicas import Fingerprint, text_of

_MIX = 6364136223846793005
"""Odd, so that no bit of a sum of products with its powers is lost (Knuth's MMIX generator)."""


def digests(
    planned: Planned, settings: SettingsFound, replicas: Mapping[int, Fingerprint], precision: Precision, loaded: bool
) -> Tensor:
    """Return a digest of this rank's settings for each set of ranks that share parameters: `DIGEST` bytes each, uint8.

    If learning rate, momentum, scale or dtype differed between the ranks that hold a parameter, replicas would drift
    apart without an error, and several rules would update one matrix. Half of the bytes are for values that only the
    device knows: learning rates on the device, and fingerprints. The CPU does not wait for these values.

    Args:
        planned: The plan with the parameters that are compared (`FlagVector.shared`).
        settings: The settings of the groups.
        replicas: `fingerprints` at the first step of a plan and after state was loaded; empty in other steps.
        precision: The optimizer's dtypes.
        loaded: Whether state has been loaded since the last step.
    """
    sets, said = list[list[int]](), list(map(_said, settings.rules))
    for groups, static in planned.terms:
        text = f"{static} {precision} {loaded} {[said[group] for group in groups]}"
        sets.append(list(hashlib.blake2b(text.encode(), digest_size=DIGEST // 2).digest()))
    if not sets or not (replicas or settings.on_device):
        zeros = [0] * (DIGEST // 2)
        return torch.tensor([some + zeros for some in sets], dtype=torch.uint8, device="cpu").view(-1)
    rest = []
    for numbers, (groups, _) in zip(planned.flag_vector.shared, planned.terms, strict=True):
        mixed = torch.zeros(1, dtype=torch.int64, device=planned.device)
        for group in groups:
            if (rule := settings.rules[group]) is not None and _on_device(rule.lr):
                mixed = mixed * _MIX + rule.lr.detach().double().reshape(1).view(torch.int64)
        # A set without fingerprints adds nothing, so its digest does not depend on fingerprints of other sets.
        for value in (value for number in numbers for value in replicas.get(number, {}).values()):
            mixed = mixed * _MIX + value
        rest.append(mixed.view(torch.uint8))
    host = upload(sets, dtype=torch.uint8, device=planned.device).view(-1, DIGEST // 2)
    return torch.cat([host, torch.stack(rest)], dim=1).view(-1)


def lines(
    planned: Planned, settings: SettingsFound, replicas: Mapping[int, Fingerprint], precision: Precision, loaded: bool
) -> dict[str, str]:
    """Return the compared settings of each parameter as text, by name. The CPU waits for values on the device."""
    found = {}
    for number, member in enumerate((*planned.muon, *planned.elementwise)):
        if member is not None:
            rule, dtype = settings.rules[member.group], local_of(member.tensor).dtype
            rate = f"lr={float(rule.lr)}, " if rule is not None and _on_device(rule.lr) else ""
            text = f"{rate}{_said(rule)}, {dtype}, {precision}, state loaded={loaded}"
            found[member.name] = ", ".join([text, *map(text_of, filter(None, [replicas.get(number)]))])
    return found


def _said(rule: Any) -> str:
    """Return the settings of a rule as text, which is the same on every rank with the same settings."""
    if rule is None:
        return "an error"
    found = {field.name: getattr(rule, field.name) for field in fields(rule)}
    lr = found["lr"]
    if isinstance(lr, Tensor):
        found["lr"] = "on the device" if _on_device(lr) else float(lr.detach())
    return ", ".join(f"{name}={_plain(value)!r}" for name, value in (("rule", type(rule).__name__), *found.items()))


def _on_device(lr: object) -> bool:
    return isinstance(lr, Tensor) and lr.device.type != "cpu"


def _plain(value: Any) -> Any:
    """Return lists as tuples and numbers as floats, so that equal settings have equal texts."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    return value if isinstance(value, (str, bool)) or value is None else float(value)
