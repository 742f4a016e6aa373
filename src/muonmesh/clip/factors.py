"""Factors: gradients are multiplied by them, where that changes anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from muonmesh.clip.squares import half_of
from muonmesh.comm.gradients import GradientSource, scale_gradient


def scale_groups(
    groups: Sequence[Mapping[str, Any]], source: GradientSource, coefficients: Mapping[int, Tensor]
) -> None:
    """Multiply the gradients of each half by its coefficient, a 0-d fp64 tensor."""
    for group in groups:
        coefficient = coefficients.get(half_of(group))
        if coefficient is None or is_one(coefficient):
            continue
        for parameter in group["params"]:
            scale_gradient(parameter, source, coefficient)


def is_one(coefficient: Tensor) -> bool:
    """Whether there is nothing to multiply, where asking does not make the host wait."""
    return coefficient.device.type == "cpu" and float(coefficient) == 1
