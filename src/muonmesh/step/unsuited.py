"""Unsuited: warns once, by name, of matrices for which their rule cannot keep its promise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from muonmesh.errors import warn
from muonmesh.numerics.rules import Rule
from muonmesh.step.late import LateAnswer
from muonmesh.step.planning import Planned


def unsuited_of(
    planned: Planned, rules: Sequence[Rule | None], flags: Mapping[int, Tensor], told: set[str]
) -> LateAnswer | None:
    """Return a warning of the matrices that did not suit their rule in a step; None if no rule asked.

    Args:
        planned: The plan of the step.
        rules: Of each param group.
        flags: Whether a matrix does not suit, 0-d bool, by its assignment.
        told: Names of the parameters of which a warning was given; the others are added when they are told.
    """
    texts, found = list[tuple[str, str]](), []
    for assignment, flag in flags.items():
        member = planned.muon[planned.plan.assignments[assignment].parameter]
        rule = None if member is None else rules[member.group]
        if member is not None and rule is not None:
            texts.append((member.name, rule.unsuited_warning))
            found.append(flag)

    def say(unsuited: Tensor) -> None:
        for (name, text), one in zip(texts, unsuited.tolist(), strict=True):
            if one and name not in told:
                told.add(name)
                warn(f"{name}: found {text.format(name=name)}")

    return LateAnswer.of(torch.stack(found), say) if found else None
