"""Steady steps: all that a step depends on, compared with the last step in one pass, so that nothing is made again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from muonmesh.comm.gradients import PARAMETER_GRAD
from muonmesh.comm.wrappers import refuse_join
from muonmesh.settings.reading import SettingsFound
from muonmesh.step.parameter_steps import Collected
from muonmesh.step.runtime import Runtime


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
