"""Snapshot: tensors as a step has seen them, by which the next step sees in one pass whether any has moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from muonmesh.comm.storage import PLAIN, is_freed, local_of


class Snapshot:
    """Some parameters with their state, and where all of these tensors lie.

    One attribute of all tensors is compared at a time, which Python does without a line of its own for each tensor.

    Args:
        parameters: The parameters.
        states: The entry of each in the optimizer's state, which consists of tensors.

    Attributes:
        is_plain: Whether there are tensors, and none is a DTensor or another subclass; nor is a gradient of `again`.
        version: All addresses of gradients: another object whenever `again` has found gradients at other
            addresses than before. None before the first call.
    """

    def __init__(self, parameters: Sequence[Tensor], states: Sequence[dict[str, Any]]) -> None:
        self._parameters, self._states = parameters, states
        self._keys, self._counts = [*chain.from_iterable(states)], [*map(len, states)]
        self._tensors = [*parameters, *chain.from_iterable(map(dict.values, states))]
        self.is_plain = bool(self._tensors) and set(map(type, self._tensors)) <= set(PLAIN)
        self._places = self._places_now()
        self.version: list[int] | None = None

    def __len__(self) -> int:
        """Return the number of parameters."""
        return len(self._parameters)

    def again(self, state: Mapping[Tensor, Any]) -> list[Tensor] | None:
        """Return the local gradients of a step in which nothing else has moved; None if anything has.

        Args:
            state: The optimizer's state.
        """
        return self._gradients() if self._is_current(state) else None

    def _is_current(self, state: Mapping[Tensor, Any]) -> bool:
        """Return whether the parameters have the same state, and all tensors the same memory and form, as before."""
        states = self._states
        if not all(map(is_, map(state.get, self._parameters), states)):
            return False
        if [*map(len, states)] != self._counts or [*chain.from_iterable(states)] != self._keys:
            return False
        values = chain.from_iterable(map(dict.values, states))
        return all(map(is_, values, self._tensors[len(states) :])) and self._places_now() == self._places

    def _gradients(self) -> list[Tensor] | None:
        """Return the local gradient of each parameter; None if one is missing or has not the form of its parameter."""
        found: list[Any] = [parameter.grad for parameter in self._parameters]
        kinds = set(map(type, found))
        if type(None) in kinds or (self.is_plain and kinds != {Tensor}):
            return None
        local: list[Tensor] = found
        if not self.is_plain:
            local = [*map(local_of, found)]
            pairs = zip(self._parameters, found, strict=True)
            if any([_placed(tensor) != _placed(gradient) for tensor, gradient in pairs]):
                return None
        count, (_, shapes, _, dtypes, _) = len(found), self._places
        if [*map(Tensor.size, local)] != shapes[:count]:
            return None
        if [gradient.dtype for gradient in local] != dtypes[:count]:
            return None
        if not all([gradient.layout is torch.strided and gradient.is_contiguous() for gradient in local]):
            return None
        addresses = [*map(Tensor.data_ptr, local)]
        if addresses != self.version:  # memory that is where it was has not been freed
            if any(map(is_freed, local)):
                return None
            self.version = addresses
        return local

    def _places_now(self) -> tuple[list[Any], ...]:
        """Return where all tensors lie, and in which form. A transposed square matrix only ceases to be contiguous."""
        local = self._tensors if self.is_plain else [*map(local_of, self._tensors)]
        own = () if self.is_plain else zip(local, self._tensors, strict=True)
        contiguous = [*map(Tensor.is_contiguous, local)]
        return (
            [*map(Tensor.data_ptr, local)],
            [*map(Tensor.size, local)],
            contiguous if all(contiguous) else [*map(Tensor.stride, local)],
            [tensor.dtype for tensor in local],
            [(id(tensor), _placed(of)) for tensor, of in own],
        )


def _placed(tensor: Any) -> object:
    """Return mesh and placements of a DTensor; None for others."""
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


NOT_SEEN = Snapshot((), ())
"""The snapshot of nothing."""
