"""Terms: what the ranks that share a parameter must have set alike, compared by digests at every step."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from muonmesh.comm.storage import local_of
from muonmesh.numerics.rules import RULES
from muonmesh.settings import Precision
from muonmesh.step.census import DIGEST
from muonmesh.step.planning import Planned

_MIX = 6364136223846793005
"""Odd, so that no bit of a sum of products with its powers is lost (Knuth's MMIX generator)."""


class Terms:
    """What this rank has set for its parameters in one step.

    Learning rate, momentum, scale and dtypes that differ between the ranks that hold a parameter would make replicas
    drift apart, and a matrix be updated by several rules at once, without an error.
    """

    def __init__(
        self,
        planned: Planned,
        groups: Sequence[Mapping[str, Any]],
        precision: Precision,
        *,
        loaded: bool = False,
        replicas: Mapping[int, str] | None = None,
    ) -> None:
        """Take a snapshot.

        Args:
            planned: Whose.
            groups: The param groups.
            precision: The optimizer's dtypes.
            loaded: Whether state has been loaded since the last step.
            replicas: `fingerprints`, at the first step of a plan and after state was loaded.
        """
        self._planned, self._groups, self._precision = planned, groups, precision
        self._loaded, self._replicas = loaded, replicas or {}
        self._said = [_said(group) for group in groups]

    def digests(self) -> Tensor:
        """Return `DIGEST` bytes for each set of ranks that share parameters (`Census.shared`), uint8."""
        planned, sets = self._planned, []
        device_rates = False
        for numbers in planned.census.shared:
            groups, static = planned.terms_of(numbers)
            text = f"{static} {self._precision} {self._loaded} {[self._said[group] for group in groups]}"
            told = [self._replicas[number] for number in numbers if number in self._replicas]
            if told:  # else the other ranks, which may share nothing else that is replicated, would say less
                text += f" {told}"
            sets.append(list(hashlib.blake2b(text.encode(), digest_size=DIGEST // 2).digest()))
            device_rates = device_rates or any(_on_device(self._groups[group]["lr"]) for group in groups)
        host = torch.tensor(sets, dtype=torch.uint8).view(-1, DIGEST // 2)
        if not device_rates:
            return torch.cat([host, torch.zeros_like(host)], dim=1).view(-1)
        rates = [self._rates(planned.terms_of(numbers)[0]) for numbers in planned.census.shared]
        return torch.cat([host.to(planned.device, non_blocking=True), torch.stack(rates)], dim=1).view(-1)

    def _rates(self, groups: Sequence[int]) -> Tensor:
        """Return 8 bytes of the learning rates that only the device knows, without waiting for it."""
        mixed = torch.zeros(1, dtype=torch.int64, device=self._planned.device)
        for group in groups:
            lr = self._groups[group]["lr"]
            if _on_device(lr):
                mixed = mixed * _MIX + lr.detach().double().reshape(1).view(torch.int64)
        return mixed.view(torch.uint8)

    def lines(self) -> dict[str, str]:
        """Return for each parameter what is compared, as text. Waits for learning rates on a device."""
        found = {}
        for number, member in enumerate((*self._planned.muon, *self._planned.elementwise)):
            if member is not None:
                group = self._groups[member.group]
                rate = f"lr={float(group['lr'])}, " if _on_device(group["lr"]) else ""
                dtype = local_of(member.tensor).dtype
                text = f"{rate}{self._said[member.group]}, {dtype}, {self._precision}, state loaded={self._loaded}"
                replica = self._replicas.get(number)
                found[member.name] = text if replica is None else f"{text}, {replica}"
        return found


def _said(group: Mapping[str, Any]) -> str:
    """Return what a group's rule reads, as text that is the same on every rank that has set the same."""
    rule = RULES[group["algorithm"]].of(group)
    fields = {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)}
    lr = fields["lr"]
    if isinstance(lr, Tensor):
        fields["lr"] = "on the device" if _on_device(lr) else float(lr.detach())
    return ", ".join(f"{name}={_plain(value)!r}" for name, value in (("rule", type(rule).__name__), *fields.items()))


def _on_device(lr: object) -> bool:
    return isinstance(lr, Tensor) and lr.device.type != "cpu"


def _plain(value: Any) -> Any:
    """Return tuples for lists and floats for numbers, so that one setting has one text."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    return value if isinstance(value, (str, bool)) or value is None else float(value)
