"""UpdateSquares: the squares of the updates of one step, added up by group for `Muon.metrics`."""

from __future__ import annotations

import torch
from torch import Tensor


class UpdateSquares:
    """Sums of squares of one step's updates by group, for `Muon.metrics`."""

    def __init__(self) -> None:
        self._squares: dict[int, list[Tensor]] = {}

    def add(self, group: int, squares: Tensor) -> None:
        """Add squares to the sum of a group. Any thread may call this."""
        self._squares.setdefault(group, []).append(squares)

    def of(self, group: int) -> Tensor | None:
        """Return a group's sum, 0-d fp64, or None if nothing was added."""
        squares = self._squares.get(group)
        return torch.stack(squares).sort().values.sum() if squares else None  # threads add in any order
