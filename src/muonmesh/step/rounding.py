"""Rounding: a warning where low-precision weights without masters would swallow typical steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from muonmesh.comm.storage import local_of
from muonmesh.errors import warn
from muonmesh.numerics.kernels.memory import download
from muonmesh.numerics.rules import rule_of
from muonmesh.settings import Precision
from muonmesh.step.planning import Planned


@dataclass(frozen=True)
class Rounding:
    """What rounding does to a typical step of the first parameter that it may hurt.

    Attributes:
        name: Name of the parameter.
        dtype: Its dtype.
        rms: Root mean square of a typical step.
        unchanged: Share of its entries that such a step leaves unchanged, 0-d on the host.
        arrived: After which ``unchanged`` can be read; None: now.
    """

    name: str
    dtype: torch.dtype
    rms: float
    unchanged: Tensor
    arrived: torch.cuda.Event | None

    def warn(self) -> None:
        """Warn of it."""
        if self.arrived is not None:
            self.arrived.synchronize()
        warn(
            f"{self.name} and perhaps others are {self.dtype} without masters: a typical step of RMS "
            f"{self.rms:.1e} leaves {float(self.unchanged):.0%} of its entries unchanged by rounding. Write "
            "Muon(..., master_dtype=torch.float32) to keep fp32 copies in the optimizer state"
        )


def rounding_of(planned: Planned, groups: Sequence[Mapping[str, Any]], precision: Precision) -> Rounding | None:
    """Return what rounding does to the first Muon parameter of low precision; None if there is none, or masters."""
    if precision.master is not None:
        return None
    for member, parameter in zip(planned.muon, planned.plan.parameters, strict=True):
        if member is None:
            continue
        local = local_of(member.tensor).detach()
        if local.dtype not in (torch.bfloat16, torch.float16) or not local.numel():
            continue
        size = rule_of(groups[member.group]).step_size(parameter.matrices[0].rows, parameter.matrices[0].cols)
        if math.isnan(size.rms):
            continue
        moved = (local.float() + size.rms).to(local.dtype) != local
        return Rounding(member.name, local.dtype, size.rms, *download(1 - moved.float().mean()))
    return None
