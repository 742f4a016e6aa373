"""Settings digest: in every step, ranks that share a parameter compare a hash of its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from muonmesh.comm.agreement import SILENT, bits_of
from muonmesh.comm.storage import local_of
from muonmesh.settings.reading import SettingsFound
from muonmesh.step.flag_vector import DIGEST
from muonmesh.step.planning import Planned
from muonmesh.step.precision import Precision
from muonmesh.step.replicas import Fingerprint, text_of

_MIX = 6364136223846793005
"""Odd, so that no bit of a sum of products with its powers is lost (Knuth's MMIX generator)."""

_SILENT = bytes([SILENT]) * DIGEST


def said_of_settings(
    planned: Planned, settings: SettingsFound, replicas: Mapping[int, Fingerprint], precision: Precision, loaded: bool
) -> dict[str, bytes | Tensor]:
    """Return what this rank says of its settings, for each set of ranks that share parameters: see `FlagVector`.

    If learning rate, momentum, scale or dtype differed between the ranks that hold a parameter, replicas would drift
    apart without an error, and several rules would update one matrix. The CPU does not wait for values that only the
    device knows: learning rates on the device, and fingerprints.

    Args:
        planned: The plan with the parameters that are compared (`FlagVector.shared`).
        settings: The settings of the groups.
        replicas: `fingerprints` at the first step of a plan and after state was loaded; empty in other steps.
        precision: The optimizer's dtypes.
        loaded: Whether state has been loaded since the last step.
    """
    flag_vector, texts = planned.flag_vector, list(map(_said, settings.rules))
    sets = [
        bits_of(f"{static} {precision} {loaded} {[texts[group] for group in groups]}") if belongs else _SILENT
        for belongs, (groups, static) in zip(flag_vector.stored, planned.terms, strict=True)
    ]
    if not (replicas or settings.on_device):
        return {"settings": b"".join(sets)}
    values = torch.full((len(sets), DIGEST), SILENT, dtype=torch.uint8, device=planned.device)
    bits = torch.arange(DIGEST, dtype=torch.int64, device=planned.device)
    for place, belongs in enumerate(flag_vector.stored):
        if belongs:
            mixed = torch.zeros((), dtype=torch.int64, device=planned.device)
            for group in planned.terms[place][0]:
                if (rule := settings.rules[group]) is not None and _on_device(rule.lr):
                    mixed = mixed * _MIX + rule.lr.detach().double().reshape(()).view(torch.int64)
            # A set without fingerprints adds nothing, so its digest does not depend on fingerprints of other sets.
            for value in (value for number in flag_vector.shared[place] for value in replicas.get(number, {}).values()):
                mixed = mixed * _MIX + value
            values[place] = mixed >> bits & 1
    return {"settings": b"".join(sets), "values": values.view(-1)}


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
