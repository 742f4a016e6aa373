"""Factors: gradients are multiplied by them, where that changes anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from muonmesh.clip.squares import half_of, number_of
from muonmesh.comm.gradients import GradientSource, scale_gradient


def scale_groups(
    groups: Sequence[Mapping[str, Any]], source: GradientSource, coefficients: Mapping[int, Tensor]
) -> None:
    """Multiply the gradients of each half by its coefficient, a 0-d fp64 tensor, by its place in the sums."""
    coefficients = {place: coefficient for place, coefficient in coefficients.items() if not is_one(coefficient)}
    for group in groups if coefficients else ():
        for parameter in group["params"]:
            place = half_of(group) + 2 * number_of(str(group.get("name")), parameter, source)
            if place in coefficients:
                scale_gradient(parameter, source, coefficients[place])


def is_one(coefficient: Tensor) -> bool:
    """Whether there is nothing to multiply, where asking does not make the host wait."""
    return coefficient.device.type == "cpu" and float(coefficient) == 1
