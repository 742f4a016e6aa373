"""Lacking: matrices that lack what their rule needs, told once by name."""

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
class Lacking:
    """Which matrices of one step lacked something.

    Attributes:
        texts: For each matrix the name of its parameter and what its rule tells.
        found: Whether it lacks something, bool (matrices,), on the host.
        arrived: After which ``found`` can be read; None: now.
    """

    texts: tuple[tuple[str, str], ...]
    found: Tensor
    arrived: torch.cuda.Event | None

    def warn(self, told: set[str]) -> None:
        """Warn of each parameter that is not yet among the names told, and add it to them."""
        if self.arrived is not None:
            self.arrived.synchronize()
        for (name, text), lacks in zip(self.texts, self.found.tolist(), strict=True):
            if lacks and name not in told:
                told.add(name)
                warn(f"{name}: found {text.format(name=name)}")


def lacking_of(planned: Planned, rules: Sequence[Rule | None], lacking: Mapping[int, Tensor]) -> Lacking | None:
    """Return what matrices lacked in a step, by assignment 0-d bool each; None if there is nothing to ask."""
    texts, flags = [], []
    for assignment, flag in lacking.items():
        member = planned.muon[planned.plan.assignments[assignment].parameter]
        rule = None if member is None else rules[member.group]
        if member is not None and rule is not None:
            texts.append((member.name, rule.lacking))
            flags.append(flag)
    return Lacking(tuple(texts), *download(torch.stack(flags))) if flags else None
