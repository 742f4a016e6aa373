"""Unsuited: matrices to which their rule cannot do what it promises, told once by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from muonmesh.errors import warn
from muonmesh.numerics.kernels.memory import download
from muonmesh.numerics.rules import Rule
from muonmesh.step.planning import Planned


@dataclass(frozen=True)
class Unsuited:
    """Which matrices of one step did not suit their rules.

    Attributes:
        texts: For each matrix the name of its parameter and what its rule tells.
        found: Whether it does not suit, bool (matrices,), on the host.
        arrived: After which ``found`` can be read; None: now.
    """

    texts: tuple[tuple[str, str], ...]
    found: Tensor
    arrived: torch.cuda.Event | None

    def warn(self, told: set[str]) -> None:
        """Warn of each parameter that is not yet among the names told, and add it to them."""
        if self.arrived is not None:
            self.arrived.synchronize()
        for (name, text), unsuited in zip(self.texts, self.found.tolist(), strict=True):
            if unsuited and name not in told:
                told.add(name)
                warn(f"{name}: found {text.format(name=name)}")


def unsuited_of(planned: Planned, rules: Sequence[Rule | None], flags: Mapping[int, Tensor]) -> Unsuited | None:
    """Return which matrices did not suit in a step, from one 0-d bool each by assignment; None if none was asked."""
    texts, found = [], []
    for assignment, flag in flags.items():
        member = planned.muon[planned.plan.assignments[assignment].parameter]
        rule = None if member is None else rules[member.group]
        if member is not None and rule is not None:
            texts.append((member.name, rule.unsuited_warning))
            found.append(flag)
    return Unsuited(tuple(texts), *download(torch.stack(found))) if found else None
