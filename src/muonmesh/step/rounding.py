"""Rounding: warns where weights of low precision would lose typical steps to rounding, and no fp32 master is kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from muonmesh.comm.storage import local_of
from muonmesh.errors import warn
from muonmesh.numerics.rules import rule_of
from muonmesh.settings import Precision
from muonmesh.step.late import LateAnswer
from muonmesh.step.planning import Planned


def rounding_of(planned: Planned, groups: Sequence[Mapping[str, Any]], precision: Precision) -> LateAnswer | None:
    """Return a warning of what rounding does to the first Muon parameter of low precision.

    None if there is no such parameter, or if there are masters.
    """
    if precision.master is not None:
        return None
    for member, parameter in zip(planned.muon, planned.plan.parameters, strict=True):
        if member is None or groups[member.group]["stochastic_rounding"] is not None:
            continue
        local = local_of(member.tensor).detach()
        if local.dtype not in (torch.bfloat16, torch.float16) or not local.numel():
            continue
        size = rule_of(groups[member.group]).step_size(parameter.matrices[0].rows, parameter.matrices[0].cols)
        if math.isnan(size.rms):
            continue
        told = (
            f"{member.name} and perhaps others are {local.dtype} without masters: a typical step of RMS "
            f"{size.rms:.1e} leaves {{:.0%}} of its entries unchanged by rounding. Write "
            "Muon(..., master_dtype=torch.float32) to keep fp32 copies in the optimizer state"
        )

        def say(unchanged: Tensor, told: str = told) -> None:
            warn(told.format(float(unchanged)))

        return LateAnswer.of(((local.float() + size.rms).to(local.dtype) == local).float().mean(), say)
    return None
