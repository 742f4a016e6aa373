"""Stack: many small matrices side by side, so that what is done element by element takes as many calls as for one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from muonmesh.comm.views import contiguous
from muonmesh.numerics.kernels.memory import scratch
from muonmesh.numerics.rules import Rule, parts

Columns: TypeAlias = dict[str, list[Tensor]]

SMALL = 1 << 12
"""Elements of a matrix up to which to copy it beside others is cheaper than a few calls more [measured]."""


@dataclass
class Stack:
    """Matrices of one shape, stored in one order, under one rule with one scale; each has a gradient that counts.

    Attributes:
        rule: Theirs.
        scale: Their update scale.
        transposed: Whether they are stored so, as against how they are assembled.
    """

    rule: Rule
    scale: float
    transposed: bool
    _gradient: Columns = field(default_factory=dict)
    _momenta: Columns = field(default_factory=dict)
    _weights: Columns = field(default_factory=dict)
    _beside: Columns = field(default_factory=dict)
    _rounded: Columns = field(default_factory=dict)

    def add(self, shape: tuple[int, int], **tensors: Mapping[str, Tensor]) -> None:
        """Add a matrix, stored in this shape.

        Args:
            shape: See above.
            tensors: ``gradient``, read only; what is written: ``momenta`` and ``beside``, what the rule keeps as
                "momentum" and as "weights", by key; ``weights``, or masters, and ``rounded``, weights that masters are
                rounded to, if there are any. All contiguous.
        """
        for name, held in tensors.items():
            columns: Columns = getattr(self, f"_{name}")
            for key, tensor in held.items():
                columns.setdefault(key, []).append(tensor.view(shape))

    def is_alike(self, count: int) -> bool:
        """Whether each of so many matrices has added the same, in the same dtypes."""
        every = (self._gradient, self._momenta, self._weights, self._beside, self._rounded)
        lists = [some for columns in every for some in columns.values()]
        return all(len(some) == count and len({tensor.dtype for tensor in some}) == 1 for some in lists)

    def fold(self, into: Tensor) -> None:
        """Fold the gradients into the momenta, and write the directions into a batch as it is assembled."""
        gradient, momenta = _together("gradient", self._gradient)[""], _together("momentum", self._momenta)
        parts.fold(self.rule, gradient, momenta, into=into.mT if self.transposed else into)
        _give_back(momenta, self._momenta)

    def apply(self, updates: Tensor) -> None:
        """Decay and update the weights by a batch of results."""
        weights, beside = _together("weights", self._weights), _together("beside", self._beside)
        update = contiguous(updates.mT if self.transposed else updates)
        parts.apply(self.rule, weights[""], update, beside, scale=self.scale)
        _give_back(weights, self._weights)
        _give_back(weights, self._rounded)
        _give_back(beside, self._beside)


def _together(role: str, columns: Columns) -> dict[str, Tensor]:
    found = {}
    for key, some in columns.items():
        shape, first = (len(some), *some[0].shape), some[0]
        found[key] = scratch(f"stack, {role} {key}", shape, dtype=first.dtype, device=first.device)
        torch.stack(some, out=found[key])
    return found


def _give_back(together: Mapping[str, Tensor], columns: Columns) -> None:
    for key, some in columns.items():
        torch._foreach_copy_(some, together[key].unbind())
