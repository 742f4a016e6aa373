"""ParameterStep: the local part of each parameter in one step, with its gradient and its state."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from muonmesh.comm.gradients import PARAMETER_GRAD, gradient_of, partial_axes, unscaled
from muonmesh.comm.storage import is_freed, local_of
from muonmesh.errors import LayoutError, StateError, about, explain_error
from muonmesh.step.blocks import Momentum
from muonmesh.step.members import OptimizedParameter
from muonmesh.step.offload import fresh_copy
from muonmesh.step.planning import Planned
from muonmesh.step.precision import Precision
from muonmesh.step.runtime import Runtime
from muonmesh.step.snapshot import NOT_SEEN, Snapshot
from muonmesh.step.state_form import Refused, StateForm, check_state, forms_of

Momenta = Mapping[str, Tensor | Momentum]
"""The state that a rule keeps as "momentum", by key, in floating point or as int8 codes."""


_RESIZED = "Write del optimizer.state[parameter] after resizing a parameter, which needs fresh state"
REFUSED: Refused = {
    "shape": _RESIZED,
    "owned": _RESIZED,
    "device": "Move it back, or load the state again",
}
"""What a step refuses of a state, and what to write; what is missing begins anew."""


@dataclass(slots=True)
class ParameterStep:
    """One parameter in one step.

    Attributes:
        member: The parameter in the plan.
        local: The part of the parameter that this rank stores.
        state: The parameter's entry in the optimizer's state.
        gradient: Local part of the gradient, contiguous, or None. A partial gradient stays a DTensor.
        forms: The forms of its state (`forms_of`).
        in_form: Whether all of its state was found in these forms.
        present: Whether any rank has a gradient for the tensor; `preflight` asks the ranks of the plan. A 0-d bool
            tensor if only the device knows, because the gradient could only be on another rank.
        ready: Whether `ReadyParameters` has prepared the parameter. ``gradient`` then has the elements whose momentum
            this rank stores; it is zero if only this rank has no gradient. The attributes below are then set; all
            their tensors are local and contiguous, so that pieces can index them.
        weights: The parameter, or a contiguous copy that `ReadyParameters.finish` writes back.
        momenta: The state that the rule keeps as "momentum", by key. Gradients are folded into it in place, or into the
            decoded int8 codes. None if there is no state, because no rank has ever had a gradient. If the CPU does
            not wait for the flags, None if this rank has had no gradient and no other shard can have one.
        beside: The state that the rule keeps as "weights", by key, written in place together with the weights.
        master: The master weights, written in place and then rounded to the weights; None if there are none.
        seen: The parameter and its state in the last step; empty if the next step cannot use this object again.
    """

    member: OptimizedParameter
    local: Tensor
    state: dict[str, Any]
    gradient: Tensor | None
    forms: tuple[StateForm, ...]
    in_form: bool = False
    present: bool | Tensor = False
    ready: bool = False
    weights: Tensor = field(init=False)
    momenta: Momenta | None = None
    beside: Mapping[str, Tensor] = field(default_factory=dict)
    master: Tensor | None = None
    seen: Snapshot = NOT_SEEN

    def remember(self) -> None:
        """Note the tensors of this step, after which the next step may use this object again (`seen`)."""
        self.seen, self.in_form = Snapshot([self.member.tensor], [self.state]), True

    @property
    def lasts(self) -> bool:
        """Whether the next step may find this state again: all of it is there, and it consists of tensors alone."""
        plain = all(isinstance(value, Tensor) for value in self.state.values())
        return plain and self.created and self.present is True

    @property
    def created(self) -> bool:
        """Whether all state of the parameter's rule exists; true for a rule without state."""
        return self.member.state_layouts.keys() <= self.state.keys()


class Collected(NamedTuple):
    """All parameters of one step, each as a `ParameterStep`.

    Attributes:
        muon: Muon's parameters in the order of the plan; None for a parameter that only other ranks hold.
        elementwise: AdamW's parameters with known ranks in the order of the plan; None for a parameter that only other
            ranks hold.
        adamw: For each AdamW group with parameters on this rank, its parameters; a flat tensor occurs once.
        error: The first error. The rank does not raise it at once, but first takes part in the communication.
        missing: The parameters without a gradient, by name.
        any_gradient: Whether any parameter of this rank has a gradient.
        entries: All of these parameters, each once.
        unshared: Whether each tensor of AdamW's is one parameter's.
        seen: All of these parameters with their state, if the next step may use them again; else empty.
    """

    muon: list[ParameterStep | None]
    elementwise: list[ParameterStep | None]
    adamw: list[list[ParameterStep]]
    error: Exception | None
    missing: dict[str, Tensor]
    any_gradient: bool
    entries: list[ParameterStep]
    unshared: bool
    seen: Snapshot = NOT_SEEN

    def remember(self, planned: Planned) -> None:
        """At the end of a step, note which of AdamW's parameters the next step may use again, or whether all.

        `ReadyParameters` notes Muon's. All are used again only if each had a gradient, so that nothing is missing.
        """
        for entry in itertools.chain(*self.adamw):
            if not entry.seen and entry.lasts:
                entry.remember()
                planned.steps[id(entry.member)] = entry
        planned.collected, entries = None, self.entries
        if self.unshared and not self.missing and all([entry.seen for entry in entries]):
            seen = Snapshot([entry.member.tensor for entry in entries], [entry.state for entry in entries])
            planned.collected = self._replace(seen=seen)


def collect(planned: Planned, optimizer: Optimizer, runtime: Runtime, loss_scale: Tensor | None) -> Collected:
    """Read the gradient of every parameter, and check its state.

    Args:
        planned: The plan whose parameters are read.
        optimizer: The optimizer with the param groups and the state.
        runtime: The runtime state of the optimizer.
        loss_scale: The factor of a GradScaler; gradients are divided by it in fp32. None: no factor.
    """
    error: Exception | None = None
    entries: dict[int, ParameterStep] = {}
    missing: dict[str, Tensor] = {}
    state = optimizer.state
    steady = loss_scale is None and runtime.source is PARAMETER_GRAD

    def entry_of(member: OptimizedParameter) -> ParameterStep:
        nonlocal error
        if (known := entries.get(id(member))) is not None:
            return known
        tensor, gradient = member.tensor, None
        last: ParameterStep | None = planned.steps.get(id(member)) if steady else None
        if last is not None and (again := last.seen.again(state)) is not None:
            entries[id(member)], (last.gradient,) = last, again
            return last
        try:
            gradient = gradient_of(member.name, tensor, runtime.source)
            if gradient is not None and loss_scale is not None:
                gradient = unscaled(gradient, loss_scale)
            if gradient is not None and (type(gradient) is Tensor or not any(partial_axes(gradient))):
                gradient = gradient.contiguous()
        except Exception as found:  # whatever a source raises, or a lack of memory: the other ranks wait for this rank
            error = error or found
        if gradient is None:
            missing[member.name] = tensor
        kept: object = state.setdefault(tensor, {})
        if not isinstance(kept, dict):
            said = f"a {type(kept).__name__} as its state"  # its text may be that of a tensor whose memory is freed
            write = "Write del optimizer.state[parameter] to begin with fresh state"
            error, kept = error or StateError(explain_error(member.name, said, "a dict", write)), {}
        local, place = local_of(tensor), (id(member), "master" in kept)
        if (forms := planned.state_forms.get(place)) is None:
            forms = forms_of(member, runtime.precision, master="master" in kept)
            planned.state_forms[place] = forms
        entry = ParameterStep(member, local, kept, gradient, forms, present=gradient is not None)
        entries[id(member)] = entry
        try:
            check_parameter(entry)
            if member.is_matrix and runtime.precision.int8:
                planned.blocks.check(runtime.last.blocks, member.name, tensor, entry.state)
        except (LayoutError, StateError, TypeError) as found:
            error = error or found
        return entry

    muon = [None if member is None else entry_of(member) for member in planned.muon]
    elementwise = [None if member is None else entry_of(member) for member in planned.elementwise]
    adamw, unshared = [], True
    for members in filter(None, planned.adamw):
        tensors = {id(member.tensor): member for member in members}  # a flat tensor is stepped once
        unshared = unshared and len(tensors) == len(members)
        if len(tensors) < len(members) and optimizer.param_groups[members[0].group]["stochastic_rounding"] is not None:
            found, needed = "stochastic_rounding in a flat buffer of several", "a tensor for each parameter"
            error = error or LayoutError(explain_error(members[0].name, found, needed, "Write fully_shard(model)"))
        adamw.append([entry_of(member) for member in tensors.values()])
    any_gradient = any(entry.gradient is not None for entry in entries.values())
    return Collected(muon, elementwise, adamw, error, missing, any_gradient, [*entries.values()], unshared)


def prepare_state(entry: ParameterStep, precision: Precision, *, create: bool = True) -> None:
    """Bring the state of a parameter into the form in which a step uses it, after the ranks have agreed on the step.

    State that is missing begins as zeros, master weights as a copy. A user, a checkpoint or ``model.to(dtype)`` may
    have left state with another dtype or strides; it is copied. Momentum that is to be int8 stays: the step encodes
    it.

    Args:
        entry: The parameter.
        precision: The dtypes of state.
        create: Whether to create what is missing.
    """
    local, state = entry.local, entry.state
    for form in entry.forms:
        key, layout, dtype = form.key, form.layout, form.dtype
        if (held := state.get(key)) is None:
            state.pop(key, None)
            if create and key == "master":
                state[key] = layout.storage.wrap(fresh_copy(local, dtype, precision))
            elif create:
                state[key] = layout.fresh(form.shape, dtype, local.device, precision)
            continue
        kept = local_of(held)
        dtype = kept.dtype if dtype == torch.int8 else dtype
        if not _has(form._replace(dtype=dtype), held):
            state[key] = layout.fresh(form.shape, dtype, local.device, precision)
            if kept.shape == form.shape:
                local_of(state[key]).copy_(kept)


def check_parameter(entry: ParameterStep) -> None:
    """Check that a step can write a parameter and use its state. Writes nothing.

    Raises:
        LayoutError: the parameter's memory has been freed, or several of its elements share memory.
        TypeError: the parameter is not dense, or an inference tensor.
        StateError: an entry is no tensor of numbers, its shape is not the shape on this rank, or it is on the wrong
            device; or the state belongs to the other algorithm (Muon or AdamW).
    """
    held, state = entry.local, entry.state
    name = entry.member.name
    if held.layout is not torch.strided or held.is_inference():
        found = "an inference tensor" if held.is_inference() else f"a parameter with layout {held.layout}"
        needed = "a dense tensor made outside of torch.inference_mode, which a step can write"
        write = "Write parameter.data = parameter.data.to_dense().clone() outside of torch.inference_mode"
        raise TypeError(explain_error(name, found, needed, write))
    if not held.is_contiguous() and _shares_memory(held):
        found = f"shape {tuple(held.shape)} with strides {held.stride()}, so that several elements share memory"
        write = "Write parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)"
        raise LayoutError(explain_error(name, found, "memory for each element", write))
    if is_freed(held):
        what = "FSDP or ZeRO has freed the memory of this parameter. Reshard it before the step: module.reshard()"
        raise LayoutError(about(name, what))
    foreign = "exp_avg" if entry.member.is_matrix else "momentum_buffer"
    if foreign in state:
        algorithm, other = ("muon", "adamw") if entry.member.is_matrix else ("adamw", "muon")
        found = f"{foreign}, state of {other}, in a group of {algorithm}"
        write = "Write del optimizer.state[parameter] to begin with fresh state, or set the group back"
        raise StateError(explain_error(name, found, f"state of {algorithm}", write))
    entry.in_form = True
    for form in entry.forms:
        if not _has(form, state.get(form.key)):
            entry.in_form = False
            check_state(name, entry.forms, state, REFUSED)
            break


def _has(form: StateForm, value: object) -> bool:
    """Return whether a step can use a value of the state as it is."""
    if not isinstance(value, Tensor):
        return False
    local = value if type(value) is Tensor else local_of(value)
    alike = local.dtype == form.dtype and local.shape == form.shape and local.device == form.device
    if not (alike and local.layout is torch.strided and local.is_contiguous() and not local.is_inference()):
        return False
    return not is_freed(local)


def _shares_memory(tensor: Tensor) -> bool:
    """Return whether several elements of a tensor may have the same place in memory."""
    reach = 0  # the largest distance of two elements along the dims so far
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
