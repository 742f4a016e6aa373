"""Rounding: a warning where low-precision weights without masters would swallow typical steps."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from muonmesh.comm.storage import local_of
from muonmesh.numerics.scale import step_size
from muonmesh.settings import Precision
from muonmesh.step.planning import Planned


def warn_about_rounding(planned: Planned, groups: Sequence[Mapping[str, Any]], precision: Precision) -> None:
    """Warn if a Muon parameter is of low precision, without a master, and leaves many elements of a step unchanged."""
    if precision.master is not None:
        return
    for member, parameter in zip(planned.muon, planned.plan.parameters, strict=True):
        if member is None:
            continue
        local = local_of(member.tensor).detach()
        if local.dtype not in (torch.bfloat16, torch.float16) or not local.numel():
            continue
        size = step_size(groups[member.group], parameter.matrices[0].rows, parameter.matrices[0].cols)
        moved = (local.float() + size.rms).to(local.dtype) != local
        share = 1 - float(moved.float().mean())
        warnings.warn(
            f"{member.name} and perhaps others are {local.dtype} without masters: a typical step of RMS "
            f"{size.rms:.1e} leaves {share:.0%} of its entries unchanged by rounding. Write "
            "Muon(..., master_dtype=torch.float32) to keep fp32 copies in the optimizer state",
            stacklevel=5,
        )
        return
