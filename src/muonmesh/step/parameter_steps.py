"""ParameterStep: the local part of each parameter in one step, with its gradient and its state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from muonmesh.comm.gradients import gradient_of, partial_axes, unscaled
from muonmesh.comm.storage import local_of, local_shape
from muonmesh.errors import LayoutError, StateError, about, explain_error
from muonmesh.numerics.dtypes import master_for
from muonmesh.step.blocks import Momentum
from muonmesh.step.members import Member
from muonmesh.step.offload import fresh_copy
from muonmesh.step.planning import Planned
from muonmesh.step.precision import Precision
from muonmesh.step.runtime import Runtime
from muonmesh.step.state_layout import beside_rule

Momenta = Mapping[str, Tensor | Momentum]
"""The state that a rule keeps as "momentum", by key, in floating point or as int8 codes."""


@dataclass(slots=True)
class ParameterStep:
    """One parameter in one step.

    Attributes:
        member: The parameter in the plan.
        local: The part of the parameter that this rank stores.
        state: The parameter's entry in the optimizer's state.
        gradient: Local part of the gradient, contiguous, or None. A partial gradient stays a DTensor.
        matrices: How many matrices the tensor holds; None if the rule is elementwise. A flat tensor may hold several
            parameters; the matrices of all of them count.
        ready: Whether `ReadyParameters` has prepared the parameter. ``gradient`` then has the elements whose momentum
            this rank stores; it is zero if only this rank has no gradient. The attributes below are then set; all
            their tensors are local and contiguous, so that pieces can index them.
        weights: The parameter, or a contiguous copy that `ReadyParameters.finish` writes back.
        momenta: The state that the rule keeps as "momentum", by key. Gradients are folded into it in place, or into the
            decoded int8 codes. None if there is no state, because no rank has ever had a gradient. If the CPU does
            not wait for the flags, None if this rank has had no gradient and no other shard can have one.
        beside: The state that the rule keeps as "weights", by key, written in place together with the weights.
        master: The master weights, written in place and then rounded to the weights; None if there are none.
    """

    member: Member
    local: Tensor
    state: dict[str, Any]
    gradient: Tensor | None
    matrices: int | None
    ready: bool = False
    weights: Tensor = field(init=False)
    momenta: Momenta | None = None
    beside: Mapping[str, Tensor] = field(default_factory=dict)
    master: Tensor | None = None

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
        some: Whether any parameter of this rank has a gradient.
    """

    muon: list[ParameterStep | None]
    elementwise: list[ParameterStep | None]
    adamw: list[list[ParameterStep]]
    error: Exception | None
    missing: dict[str, Tensor]
    some: bool


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
    matrices_of, state = planned.matrices_of, optimizer.state

    def entry_of(member: Member, *, muon: bool = False) -> ParameterStep:
        nonlocal error
        if (known := entries.get(id(member))) is not None:
            return known
        tensor, gradient = member.tensor, None
        try:
            gradient = gradient_of(member.name, tensor, runtime.source)
        except Exception as found:  # whatever a source raises: the other ranks wait for this rank
            error = error or found
        if gradient is None:
            missing[member.name] = tensor
        if gradient is not None and loss_scale is not None:
            gradient = unscaled(gradient, loss_scale)
        if gradient is not None and (type(gradient) is Tensor or not any(partial_axes(gradient))):
            gradient = gradient.contiguous()
        matrices = len(matrices_of.get(tensor, ())) if muon else None
        entry = entries[id(member)] = ParameterStep(member, local_of(tensor), state[tensor], gradient, matrices)
        try:
            check_state(entry, runtime.precision, muon=muon)
            if muon and runtime.precision.int8:
                planned.blocks.check(runtime.wrote, member.name, tensor, entry.state)
        except (LayoutError, StateError) as found:
            error = error or found
        return entry

    muon = [None if member is None else entry_of(member, muon=True) for member in planned.muon]
    elementwise = [None if member is None else entry_of(member) for member in planned.elementwise]
    adamw = []
    for members in filter(None, planned.adamw):
        tensors = {id(member.tensor): member for member in members}  # a flat tensor is stepped once
        if len(tensors) < len(members) and optimizer.param_groups[members[0].group]["stochastic_rounding"] is not None:
            found, needed = "stochastic_rounding in a flat buffer of several", "a tensor for each parameter"
            error = error or LayoutError(explain_error(members[0].name, found, needed, "Write fully_shard(model)"))
        adamw.append([entry_of(member) for member in tensors.values()])
    some = any(entry.gradient is not None for entry in entries.values())
    return Collected(muon, elementwise, adamw, error, missing, some)


def create_state(entry: ParameterStep, precision: Precision) -> None:
    """Create the missing state of a parameter: zeros, and the master weights if ``master_dtype`` asks for them.

    The running norms of `clip` are always created, so that a checkpoint has something to be loaded into.
    """
    local, state = entry.local, entry.state
    for state_layouts in (entry.member.state_layouts, beside_rule(entry.matrices)):
        for key, layout in state_layouts.items():
            if key not in state:
                shape = layout.shape_here(entry.member.storage, local)
                state[key] = layout.fresh(shape, layout.kept_dtype(precision), local.device, precision)
    master = master_for(local.dtype, precision.master)
    if master is not None and "master" not in state:
        state["master"] = entry.member.storage.wrap(fresh_copy(local, master, precision))


def check_state(entry: ParameterStep, precision: Precision, *, muon: bool) -> None:
    """Check that a step can use the state of a parameter; make the state of matrices contiguous.

    A checkpoint or the user may have written the state, with other strides.

    Raises:
        LayoutError: the parameter's memory has been freed.
        StateError: an entry is no tensor, its shape is not the shape on this rank, or it is on the wrong device; or the
            state belongs to the other algorithm (Muon or AdamW).
    """
    held, state = entry.local, entry.state
    name, storage, state_layouts = entry.member.name, entry.member.storage, entry.member.state_layouts
    if 0 in held.stride() and any(size > 1 and not step for size, step in zip(held.shape, held.stride(), strict=True)):
        what = "Elements of this parameter share memory, as expand() makes them. Write "
        raise LayoutError(about(name, what + "torch.nn.Parameter(parameter.detach().clone()) in its place"))
    if held.untyped_storage().nbytes() < held.nbytes and not held.is_meta:
        what = "FSDP or ZeRO has freed the memory of this parameter. Reshard it before the step: module.reshard()"
        raise LayoutError(about(name, what))
    foreign = "exp_avg" if muon else "momentum_buffer"
    if foreign in state:
        algorithm, other = ("muon", "adamw") if muon else ("adamw", "muon")
        found = f"{foreign}, state of {other}, in a group of {algorithm}"
        write = "Write del optimizer.state[parameter] to begin with fresh state, or set the group back"
        raise StateError(explain_error(name, found, f"state of {algorithm}", write))
    value: object
    for key, value in state.items():
        state_layout = state_layouts.get(key)
        if value is None or (state_layout is None and key != "master"):
            continue
        if not isinstance(value, Tensor):
            raise StateError(explain_error(name, f"{key} = {value!r}", "a tensor", "Load the state again"))
        place = storage if state_layout is None else state_layout.storage
        local = local_of(value)
        needed = tuple(held.shape) if place is storage else local_shape(place)
        if local.shape != needed:
            found = f"{key} of shape {tuple(local.shape)} on this rank"
            write = "Write del optimizer.state[parameter] after resizing a parameter, which needs fresh state"
            raise StateError(explain_error(name, found, f"{needed}, the shape in which this rank stores it", write))
        companion = state_layout is not None and state_layout.companion is not None
        device = held.device if companion or not precision.on_host else precision.kept_on(held.device)
        if local.device != device:
            found, where = f"{key} on {local.device}", f"it on {device}"
            where += ", with its parameter" if device == held.device else ", as state_device says"
            raise StateError(explain_error(name, found, where, "Move it back, or load the state again"))
        if muon and not local.is_contiguous():
            state[key] = place.wrap(local.contiguous())
