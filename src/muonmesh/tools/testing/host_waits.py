"""HostWaits: makes the steps of one optimizer wait, or not wait, for flags, whatever device the parameters are on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from muonmesh.step.runtime import Driver


@dataclass(frozen=True)
class HostWaits(Driver):
    """A driver that decides whether the CPU waits: False on a CPU runs the steps that a device runs.

    Attributes:
        waits: Whether the CPU waits; None: as without this driver.
    """

    waits: bool | None

    def host_waits(self, device: torch.device) -> bool:
        """Return whether the CPU waits."""
        return super().host_waits(device) if self.waits is None else self.waits
