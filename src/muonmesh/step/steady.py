"""Steady steps: all that a step depends on, compared with the last step in one pass, so that nothing is made again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from muonmesh.comm.gradients import PARAMETER_GRAD
from muonmesh.comm.storage import PLAIN, is_freed, local_of
from muonmesh.comm.wrappers import refuse_join
from muonmesh.settings.reading import SettingsFound
from muonmesh.step.runtime import Runtime

if TYPE_CHECKING:
    from muonmesh.step.parameter_steps import Collected


class Signature(NamedTuple):
    """What must stay the same for a plan to stay valid.

    Attributes:
        setup: The process group, the declared layouts and the source of gradients.
        terms: For each param group what a plan depends on (`muonmesh.settings.reading.plan_terms`).
        tensors: The form of each parameter.
        groups: The process group that the source of gradients knows for each parameter.
    """

    setup: object
    terms: object
    tensors: object
    groups: object

    @staticmethod
    def of(groups: Sequence[Mapping[str, Any]], runtime: Runtime, terms: object) -> Signature:
        """Return the signature of param groups; ``terms`` are theirs."""
        tensors = [tensor for group in groups for tensor in group["params"]]
        known = [runtime.source.group(tensor) for tensor in tensors]
        return Signature(_setup(runtime), terms, [*map(_form_of, tensors)], known)


def _setup(runtime: Runtime) -> object:
    layouts = [(name, id(entry)) for name, entry in runtime.layouts.items()]
    return runtime.process_group, layouts, id(runtime.source)


def _form_of(tensor: Tensor) -> tuple[object, ...]:
    found = tensor.shape, tensor.dtype, tensor.device
    if isinstance(tensor, DTensor):
        return *found, id(tensor.device_mesh), tuple(tensor.placements)
    return found


def steady(optimizer: Optimizer, runtime: Runtime, settings: SettingsFound, scale: Tensor | None) -> Collected | None:
    """Return the parameters of the last step with the gradients of this step, if nothing else has changed.

    Compared are: what a plan depends on in the groups, which `read_groups` has just compared with their current values;
    process group, layouts and source of gradients; and the tensors of each parameter with their memory and form
    (`Snapshot`).

    Args:
        optimizer: The optimizer with the state.
        runtime: Its runtime state.
        settings: The settings of this step.
        scale: The factor of a GradScaler; None: no factor.

    Returns:
        None if something has changed, if a parameter has no gradient, or if gradients are not in ``parameter.grad`` as
        they are. Then the step looks at everything again.
    """
    if runtime.connected is None or scale is not None or settings.error is not None:
        return None
    if runtime.ranks.wrappers:
        refuse_join(runtime.ranks.wrappers)
    planned, state = runtime.connected.planned, optimizer.state
    last: Collected | None = planned.collected
    if last is None or runtime.source is not PARAMETER_GRAD:
        return None
    if planned.signature.setup != _setup(runtime) or planned.signature.terms != settings.terms:
        return None
    if (gradients := last.seen.again(state)) is None:
        return None
    for entry, gradient in zip(last.entries, gradients, strict=True):
        entry.gradient = gradient
    return last


class Snapshot:
    """Some parameters with their state, and where all of these tensors lie.

    One attribute of all tensors is compared at a time, which Python does without a line of its own for each tensor.

    Args:
        parameters: The parameters.
        states: The entry of each in the optimizer's state, which consists of tensors.

    Attributes:
        moves: How often `again` has found gradients at other addresses than before.
    """

    def __init__(self, parameters: Sequence[Tensor], states: Sequence[dict[str, Any]]) -> None:
        self._parameters, self._states = parameters, states
        self._keys, self._counts = [*chain.from_iterable(states)], [*map(len, states)]
        self._tensors = [*parameters, *chain.from_iterable(map(dict.values, states))]
        self._is_plain = set(map(type, self._tensors)) <= set(PLAIN)
        self._places = self._places_now()
        self._of_gradients: list[int] = []
        self.moves = 0

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
        if type(None) in kinds or (self._is_plain and kinds != {Tensor}):
            return None
        local: list[Tensor] = found
        if not self._is_plain:
            local = [*map(local_of, found)]
            of = zip(self._parameters, found, local, strict=True)
            if any([_placed(tensor) != _placed(gradient) for tensor, gradient, own in of]):
                return None
        count, (_, shapes, _, dtypes, _) = len(found), self._places
        if [gradient.shape for gradient in local] != shapes[:count]:
            return None
        if [gradient.dtype for gradient in local] != dtypes[:count]:
            return None
        if not all([gradient.layout is torch.strided and gradient.is_contiguous() for gradient in local]):
            return None
        addresses = [*map(Tensor.data_ptr, local)]
        if addresses != self._of_gradients:  # memory that is where it was has not been freed
            if any(map(is_freed, local)):
                return None
            self._of_gradients = addresses
            self.moves += 1
        return local

    def _places_now(self) -> tuple[list[Any], ...]:
        """Return addresses, shapes, strides and dtypes. A square matrix transposed in place differs in strides only."""
        local = self._tensors if self._is_plain else [*map(local_of, self._tensors)]
        own = () if self._is_plain else zip(local, self._tensors, strict=True)
        return (
            [*map(Tensor.data_ptr, local)],
            [tensor.shape for tensor in local],
            [*map(Tensor.stride, local)],
            [tensor.dtype for tensor in local],
            [(id(tensor), _placed(of)) for tensor, of in own],
        )


def _placed(tensor: Any) -> object:
    """Return mesh and placements of a DTensor; None for others."""
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


NOT_SEEN = Snapshot((), ())
"""The snapshot of nothing."""
