"""SettingsDigest: at every step, ranks that share a parameter compare a hash of its settings."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from muonmesh.comm.storage import local_of
from muonmesh.numerics.kernels.memory import upload
from muonmesh.step.flag_vector import DIGEST
from muonmesh.step.planning import Planned
from muonmesh.step.precision import Precision
from muonmesh.step.replicas import Fingerprint, text_of

_MIX = 6364136223846793005
"""Odd, so that no bit of a sum of products with its powers is lost (Knuth's MMIX generator)."""


@dataclass
class SettingsDigest:
    """A hash of the settings of this rank's parameters in one step.

    If learning rate, momentum, scale or dtype differed between the ranks that hold a parameter, replicas would drift
    apart without an error, and several rules would update one matrix.

    Attributes:
        planned: The plan with the parameters that are compared.
        groups: The param groups.
        rules: The snapshots of their rules.
        precision: The optimizer's dtypes.
        loaded: Whether state has been loaded since the last step.
        replicas: `fingerprints`, at the first step of a plan and after state was loaded; none at others.
    """

    planned: Planned
    groups: Sequence[Mapping[str, Any]]
    rules: Sequence[Any]
    precision: Precision
    loaded: bool
    replicas: Mapping[int, Fingerprint]

    @cached_property
    def _said(self) -> list[str]:
        return list(map(_said, self.rules))

    def digests(self) -> Tensor:
        """Return `DIGEST` bytes for each set of ranks that share parameters (`FlagVector.shared`), uint8."""
        planned, sets = self.planned, []
        on_host = planned.device.type == "cpu"
        device_knows = bool(self.replicas) and not on_host
        for numbers in planned.flag_vector.shared:
            groups, static = planned.terms_of(numbers)
            text = f"{static} {self.precision} {self.loaded} {[self._said[group] for group in groups]}"
            told = [self.replicas[number] for number in numbers if number in self.replicas] if on_host else []
            # A set without fingerprints adds nothing, so ranks that have some of another set say the same of this one.
            if told:
                text += f" {[text_of(replica) for replica in told]}"
            sets.append(list(hashlib.blake2b(text.encode(), digest_size=DIGEST // 2).digest()))
            device_knows = device_knows or any(_on_device(self.groups[group]["lr"]) for group in groups)
        if not device_knows:
            zeros = [0] * (DIGEST // 2)
            return torch.tensor([some + zeros for some in sets], dtype=torch.uint8, device="cpu").view(-1)
        host = upload(sets, dtype=torch.uint8, device=planned.device).view(-1, DIGEST // 2)
        rest = [self._on_device(planned.terms_of(numbers)[0], numbers) for numbers in planned.flag_vector.shared]
        return torch.cat([host, torch.stack(rest)], dim=1).view(-1)

    def _on_device(self, groups: Sequence[int], numbers: Sequence[int]) -> Tensor:
        """Return 8 bytes of what only the device knows: learning rates there, and replicas; without waiting for it."""
        device = self.planned.device
        mixed = torch.zeros(1, dtype=torch.int64, device=device)
        for group in groups:
            lr = self.groups[group]["lr"]
            if _on_device(lr):
                mixed = mixed * _MIX + lr.detach().double().reshape(1).view(torch.int64)
        if device.type != "cpu":
            for number in numbers:
                for value in self.replicas.get(number, {}).values():
                    mixed = mixed * _MIX + value
        return mixed.view(torch.uint8)

    def lines(self) -> dict[str, str]:
        """Return for each parameter what is compared, as text. Waits for what only the device knows."""
        found = {}
        for number, member in enumerate((*self.planned.muon, *self.planned.elementwise)):
            if member is not None:
                group = self.groups[member.group]
                rate = f"lr={float(group['lr'])}, " if _on_device(group["lr"]) else ""
                dtype = local_of(member.tensor).dtype
                text = f"{rate}{self._said[member.group]}, {dtype}, {self.precision}, state loaded={self.loaded}"
                replica = self.replicas.get(number)
                found[member.name] = text if replica is None else f"{text}, {text_of(replica)}"
        return found


def _said(rule: Any) -> str:
    """Return what a rule has read, as text that is the same on every rank that has set the same."""
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
    """Return tuples for lists and floats for numbers, so that one setting has one text."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    return value if isinstance(value, (str, bool)) or value is None else float(value)
