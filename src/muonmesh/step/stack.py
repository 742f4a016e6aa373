"""Stack: many small matrices side by side, so that what is done element by element takes as many calls as for one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from muonmesh.comm.views import contiguous
from muonmesh.numerics.kernels.memory import scratch
from muonmesh.numerics.rules import Rule, parts
from muonmesh.step.adjacent import AdjacentMatrices

SMALL = 1 << 14
"""Elements of a matrix up to which to copy it beside others is cheaper than a few calls more [measured]."""


@dataclass
class Stack:
    """Matrices of one shape, stored in one order, under one rule with one scale; each has a gradient that counts.

    Attributes:
        rule: The rule of all these matrices.
        scale: The update scale of each matrix.
        transposed: Whether the parameters store the matrices transposed, compared with how they are assembled.
    """

    rule: Rule
    scale: float
    transposed: bool
    _columns: dict[str, dict[str, list[Tensor]]] = field(default_factory=dict)

    def add(self, run: AdjacentMatrices, shape: tuple[int, int], **tensors: Mapping[str, Tensor]) -> None:
        """Add matrices that lie one after the other in one parameter.

        Args:
            run: The place of the matrices in the storage of the parameter.
            shape: The shape of each matrix, as the parameter stores it.
            tensors: Contiguous storages of the parameter, by key. ``gradient`` is read. These are written: ``momenta``
                and ``beside``, the state that the rule keeps as "momentum" and as "weights"; ``weights``, the masters
                if there are any; and ``rounded``, the weights to which masters are rounded.
        """
        alone = run.count == 1 and tensors["weights"][""].shape == shape  # the common case, and all are shaped alike
        for name, held in tensors.items():
            if held:
                columns = self._columns.setdefault(name, {})
                for key, storage in held.items():
                    columns.setdefault(key, []).extend((storage,) if alone else run.of(storage, shape, apart=True))

    def is_alike(self, count: int) -> bool:
        """Whether each of so many matrices has added the same, in the same dtypes."""
        lists = [some for columns in self._columns.values() for some in columns.values()]
        return all(len(some) == count and len({tensor.dtype for tensor in some}) == 1 for some in lists)

    def fold(self, into: Tensor) -> None:
        """Fold the gradients into the momenta, and write the directions into a batch as it is assembled."""
        (gradient,), momenta = self._together("gradient").values(), self._together("momenta")
        parts.fold(self.rule, gradient, momenta, into=into.mT if self.transposed else into)
        self._give_back("momenta", momenta)

    def apply(self, updates: Tensor) -> None:
        """Decay and update the weights by a batch of results."""
        weights, beside = self._together("weights"), self._together("beside")
        update = contiguous(updates.mT if self.transposed else updates)
        parts.apply(self.rule, weights[""], update, beside, scale=self.scale)
        self._give_back("weights", weights)
        self._give_back("rounded", weights)
        self._give_back("beside", beside)

    def _together(self, name: str) -> dict[str, Tensor]:
        found = {}
        for key, some in self._columns.get(name, {}).items():
            shape, first = (len(some), *some[0].shape), some[0]
            found[key] = scratch(f"stack, {name} {key}", shape, dtype=first.dtype, device=first.device)
            torch.stack(some, out=found[key])
        return found

    def _give_back(self, name: str, together: Mapping[str, Tensor]) -> None:
        for key, some in self._columns.get(name, {}).items():
            if some[0].dtype == together[key].dtype:
                torch.unbind_copy(together[key], out=some)
            else:
                torch._foreach_copy_(some, together[key].unbind())
