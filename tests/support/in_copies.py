"""A CPU that works on copies of the state, as a device does whose state is in CPU memory."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

import muonmesh as mm
from muonmesh.step.runtime import Driver
from muonmesh.step.state_layout import Precision


@dataclass(frozen=True)
class Leaving(Precision):
    """A precision whose state counts as kept elsewhere, whatever device the parameters are on."""

    def leaves(self, device: torch.device) -> bool:
        return True


def work_in_copies(optimizer: mm.Muon) -> None:
    """Make the steps of an optimizer on a CPU copy its state to and fro."""
    precision = optimizer._runtime.precision
    optimizer._runtime.precision = Leaving(
        **{setting.name: getattr(precision, setting.name) for setting in fields(Precision)}
    )


def step_as_on_a_device(optimizer: mm.Muon) -> None:
    """Make an optimizer on a CPU decide as on a device, whose memory the host does not read."""
    optimizer._runtime.driver = Driver(False)
