"""Parameters: those of one step with their gradients and state: read, or as the last step left them; and made ready.

A step in which nothing has moved but gradients goes on with the parameters of the last step (`steady`). If only weights
and state are where they were, they are not checked again (`collect`). `ReadyParameters` have local tensors that pieces
can index, and the matrices of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from muonmesh.comm.communicator import Communicator
from muonmesh.comm.gradients import PARAMETER_GRAD, gradient_of, partial_axes, unscaled
from muonmesh.comm.sharing import restricted
from muonmesh.comm.storage import PLAIN, any_is_freed, bytes_of, local_of, local_shape
from muonmesh.comm.wrappers import refuse_join
from muonmesh.errors import LayoutError, StateError, explain_error
from muonmesh.numerics.rules import Rule
from muonmesh.settings.reading import StepSettings
from muonmesh.step.flag_vector import Flags
from muonmesh.step.members import OptimizedParameter
from muonmesh.step.parameter_steps import (
    Kind,
    MatrixStep,
    ParameterStep,
    StateCodec,
    check_parameter,
    prepare_state,
)
from muonmesh.step.planning import StepPlan
from muonmesh.step.runtime import Runtime
from muonmesh.step.state_layout import Precision

_DTYPE, _GRADIENT = attrgetter("dtype"), attrgetter("grad")


class Snapshot:
    """Some parameters with their state, and where all of these tensors lie.

    One attribute of all tensors is compared at a time, which Python does without a line of its own for each tensor.

    Args:
        parameters: The parameters.
        states: The entry of each in the optimizer's state, which consists of tensors.
        state: The optimizer's state.

    Attributes:
        is_plain: Whether there are tensors, and none is a DTensor or another subclass; nor is a gradient of
            `gradients`.
        forms: The form of each parameter and its gradient.
        version: All addresses of gradients: another object whenever `gradients` has found them at other addresses than
            before. None before the first call.
    """

    def __init__(
        self, parameters: Sequence[Tensor], states: Sequence[dict[str, Any]], state: Mapping[Tensor, Any]
    ) -> None:
        self._parameters, self._states = parameters, states
        self._keys, self._entries = [*state], [*state.values()]
        self._holders, self._names = [entry for entry in states for _ in entry], [*chain.from_iterable(states)]
        self._state_tensors = [*chain.from_iterable(map(dict.values, states))]
        self._tensors = [*parameters, *self._state_tensors]
        self.is_plain = bool(self._tensors) and set(map(type, self._tensors)) <= set(PLAIN)
        _, *self._places = self._places_of(self._tensors)
        local, _, self.forms = self._places_of([*parameters])
        self._sizes = [*map(bytes_of, local)]
        self.version: list[int] | None = None

    def is_current(self, state: Mapping[Tensor, Any]) -> bool:
        """Return whether the parameters have the same state, and all tensors the same memory and form, as before."""
        if len(state) != len(self._keys) or sum(map(len, self._states)) != len(self._state_tensors):
            return False
        tensors = map(dict.get, self._holders, self._names)  # a tensor's hash costs more than what is compared
        before = chain(self._keys, self._entries, self._state_tensors)
        if not all(map(is_, chain(state, state.values(), tensors), before)):
            return False
        _, *places = self._places_of(self._tensors)
        return places == self._places

    def gradients(self) -> list[Tensor] | None:
        """Return the local gradient of each parameter; None if one is missing or has not the form of its parameter."""
        gradients: list[Any] = [*map(_GRADIENT, self._parameters)]
        kinds = set(map(type, gradients))
        if type(None) in kinds or (self.is_plain and kinds != {Tensor}):
            return None
        try:
            local, addresses, forms = self._places_of(gradients)
        except RuntimeError:  # one that is not dense
            return None
        if forms != self.forms:
            return None
        if addresses != self.version:  # memory that is where it was has not been freed
            if any_is_freed(local, self._sizes):
                return None
            self.version = addresses
        return local

    def _places_of(self, tensors: list[Any]) -> tuple[list[Tensor], list[int], list[list[Any]]]:
        """Return the local tensors, their addresses and forms. A transposed square only ceases to be contiguous."""
        local = tensors if self.is_plain else [*map(local_of, tensors)]
        forms: list[list[Any]] = [
            [*map(Tensor.size, local)],
            [] if all(map(Tensor.is_contiguous, local)) else [*map(Tensor.stride, local)],
            [*map(_DTYPE, local)],
            [] if self.is_plain else [*map(_placed, tensors)],
        ]
        return local, [*map(Tensor.data_ptr, local)], forms


def _placed(tensor: Any) -> object:
    """Return mesh and placements of a DTensor; None for others."""
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


class Collected(NamedTuple):
    """All parameters of one step, each as a `ParameterStep`.

    Attributes:
        muon: Muon's parameters in the order of the plan; None for a parameter that only other ranks hold.
        elementwise: AdamW's parameters with known ranks in the order of the plan; None for a parameter that only other
            ranks hold.
        adamw: For each AdamW group with parameters on this rank, its parameters; a flat tensor occurs once.
        error: The first error. The rank does not raise it at once, but first takes part in the communication.
        missing: The parameters without a gradient, by name.
        entries: All of these parameters, each once, Muon's first.
        gradients: The gradient of each.
        snapshot: The snapshot by which this step was found to be steady; None in other steps.
        work: The work of the last step (`muon_step.MuonStep`), with which a steady step goes on.
    """

    muon: list[ParameterStep | None]
    elementwise: list[ParameterStep | None]
    adamw: list[list[ParameterStep]]
    error: Exception | None
    missing: dict[str, Tensor]
    entries: list[ParameterStep]
    gradients: list[Tensor | None]
    snapshot: Snapshot | None = None
    work: Any = None

    @property
    def any_gradient(self) -> bool:
        """Whether any parameter of this rank has a gradient."""
        return any(gradient is not None for gradient in self.gradients)


def steady(optimizer: Optimizer, runtime: Runtime, settings: StepSettings, scale: Tensor | None) -> Collected | None:
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
    planned = runtime.connected
    last: Collected | None = planned.collected
    if last is None or last.snapshot is None or runtime.source is not PARAMETER_GRAD:
        return None
    if planned.signature.setup != setup_of(runtime) or planned.signature.terms != settings.terms:
        return None
    if not last.snapshot.is_current(optimizer.state) or (gradients := last.snapshot.gradients()) is None:
        return None
    last.gradients[:] = gradients
    return last


def setup_of(runtime: Runtime) -> object:
    """Return what a plan depends on besides the groups: process group, declared layouts and source of gradients."""
    layouts = runtime.layouts
    return runtime.process_group, [*layouts], [*map(id, layouts.values())], id(runtime.source)


def collect(planned: StepPlan, optimizer: Optimizer, runtime: Runtime, loss_scale: Tensor | None) -> Collected:
    """Read the gradient of every parameter, and check its state unless all state is where the last step left it.

    Args:
        planned: The plan whose parameters are read.
        optimizer: The optimizer with the param groups and the state.
        runtime: The runtime state of the optimizer.
        loss_scale: The factor of a GradScaler; gradients are divided by it in fp32. None: no factor.
    """
    error: Exception | None = None
    entries, gradients = dict[int, ParameterStep](), list[Tensor | None]()
    missing: dict[str, Tensor] = {}
    state = optimizer.state
    checked = planned.snapshot is not None and planned.snapshot.is_current(state)

    def entry_of(member: OptimizedParameter) -> ParameterStep:
        nonlocal error
        if (entry_before := entries.get(id(member))) is not None:
            return entry_before
        tensor, gradient = member.tensor, None
        try:
            gradient = gradient_of(member.name, tensor, runtime.source)
            if gradient is not None and loss_scale is not None:
                gradient = unscaled(gradient, loss_scale)
            if gradient is not None and (type(gradient) is Tensor or not any(partial_axes(gradient))):
                gradient = gradient.contiguous()
        except Exception as wrong:  # whatever a source raises, or a lack of memory: the other ranks wait for this rank
            error = error or wrong
        if gradient is None:
            missing[member.name] = tensor
        stored: object = state.setdefault(tensor, {})
        if not isinstance(stored, dict):
            text = f"a {type(stored).__name__} as its state"  # its text may be that of a tensor whose memory is freed
            write = "Write del optimizer.state[parameter] to begin with fresh state"
            error, stored = error or StateError(explain_error(member.name, text, "a dict", write)), {}
        key = id(member), "master" in stored
        if (forms := planned.state_forms.get(key)) is None:
            forms = planned.state_forms[key] = member.forms(runtime.precision, master="master" in stored)
        gradients.append(gradient)
        holder = gradients, len(gradients) - 1
        entry = ParameterStep(member, local_of(tensor), stored, *holder, forms, present=gradient is not None)
        entries[id(member)] = entry
        if checked:
            entry.in_form = all([form.key in stored for form in forms])
            return entry
        try:
            check_parameter(entry)
            if member.is_matrix and runtime.precision.int8:
                planned.blocks.check(runtime.last.blocks, member.name, tensor, entry.state)
        except (LayoutError, StateError, TypeError) as wrong:
            error = error or wrong
        return entry

    muon = [None if member is None else entry_of(member) for member in planned.muon]
    elementwise = [None if member is None else entry_of(member) for member in planned.elementwise]
    adamw = list[list[ParameterStep]]()
    for tensors in planned.elementwise_tensors:
        first = tensors[0].member
        rounds = optimizer.param_groups[first.group]["stochastic_rounding"] is not None
        if rounds and any(tensor.parameters > 1 for tensor in tensors):
            problem, needed = "stochastic_rounding in a flat buffer of several", "a tensor for each parameter"
            error = error or LayoutError(explain_error(first.name, problem, needed, "Write fully_shard(model)"))
        adamw.append([entry_of(tensor.member) for tensor in tensors])
        for entry, tensor in zip(adamw[-1], tensors, strict=True):
            entry.places = tensor.places
    return Collected(muon, elementwise, adamw, error, missing, [*entries.values()], gradients)


def remember(planned: StepPlan, collected: Collected, state: Mapping[Tensor, Any], work: Any) -> None:
    """At the end of a step, note what the next step may use again: all of it, or that weights and state are checked.

    Args:
        planned: The plan of the step.
        collected: Its parameters. All are used again only if each had a gradient, so that nothing is missing.
        state: The optimizer's state.
        work: The work of the step (`muon_step.MuonStep`).
    """
    entries, stepped = collected.entries, sum(map(len, collected.adamw))
    states = [entry.state for entry in entries]
    snapshot = None
    if all([isinstance(value, Tensor) for state in states for value in state.values()]):
        snapshot = Snapshot([entry.member.tensor for entry in entries], states, state)
    distinct = work.ready.lasts and stepped == sum(map(len, planned.adamw))  # each has its own tensor
    lasts = distinct and snapshot is not None and not collected.missing and all([entry.created for entry in entries])
    planned.snapshot, planned.collected = snapshot, collected._replace(snapshot=snapshot, work=work) if lasts else None


class ReadyParameters:
    """The parameters of one step on this rank, and their matrices by their numbers in the plan.

    Args:
        planned: The plan of the step.
        entries: The parameters in the order of the plan; None for a parameter that only other ranks hold.
        precision: The optimizer's dtypes.

    Attributes:
        plan: The plan with the owner of each matrix.
        device: The device of the parameters.
        vectors: See `StepPlan`.
        rules, nonzero, squares, version: See `begin`.
        codec: Reads and writes state that is kept otherwise than it is computed with; None if there is no such state.
    """

    def __init__(self, planned: StepPlan, entries: Sequence[ParameterStep | None], precision: Precision) -> None:
        self.plan, self.device = planned.plan, planned.device
        self.vectors = planned.vectors
        self.entries, self.precision, self._orthogonalizers = entries, precision, planned.orthogonalizers
        self.codec: StateCodec | None = None
        self._fresh = [entry for entry in entries if entry is not None]
        self.rules: Sequence[Rule | None] = ()
        self.nonzero: Sequence[bool] | Tensor = ()
        self.squares: dict[int, list[Tensor]] | None = None
        self.version: object = None
        self._matrix_steps: dict[int, MatrixStep] = {}
        self._kinds: dict[tuple[int, int, int], Kind] = {}

    # ---------------------------------------------------------------- before and after the step

    def begin(
        self,
        communicator: Communicator,
        rules: Sequence[Rule | None],
        flags: Flags,
        squares: dict[int, list[Tensor]] | None,
        version: object,
    ) -> None:
        """Create missing state, bring all state into its form, and let its codec begin. All ranks call this.

        Args:
            communicator: Sends to the other ranks.
            rules: For each param group the snapshot of its rule.
            flags: The flags that all ranks agreed on. ``flags.nonzero`` says of each matrix whether its gradient is not
                zero.
            squares: The squares of the updates by group, to which the step adds; None if no metrics are wanted.
            version: `Snapshot.version`, if all tensors but gradients are those of the last step; else None.
        """
        on_device = isinstance(flags.nonzero, Tensor) or isinstance(self.nonzero, Tensor)
        if rules is not self.rules:
            self._kinds.clear()
        if on_device or rules is not self.rules or flags.nonzero != self.nonzero:
            self._matrix_steps.clear()
        self.rules, self.nonzero, self.squares, self.version = rules, flags.nonzero, squares, version
        for entry in self._fresh:
            self._make_ready(entry)
        if self.codec is not None:
            self.codec.begin(communicator)

    def _make_ready(self, entry: ParameterStep) -> None:
        member = entry.member
        if not entry.in_form:  # state is created unless the CPU knows that no rank has a gradient
            prepare_state(entry, create=entry.present is not False)
        if self.codec is None:
            entry.bind({})
        else:
            self.codec.bind(entry)
        if entry.created:
            if entry.gradient is None:  # missing on this shard only: counts as zero
                shape = local_shape(member.momentum_storage)
                entry.gradient = torch.zeros(shape, dtype=self.precision.state, device=self.device)
            elif member.momentum_storage is not member.gradient_storage:
                entry.gradient = restricted(entry.gradient, member.storage, member.momentum_storage)
        entry.weights = entry.local if entry.local.is_contiguous() else entry.local.contiguous()

    def finish(self) -> None:
        """Write back contiguous copies of weights, and bring state to where it is kept."""
        for entry in self._fresh:
            if entry.weights is not entry.local:
                entry.local.copy_(entry.weights)
        self._fresh = []
        if self.codec is not None:
            self.codec.finish()

    @property
    def lasts(self) -> bool:
        """Whether the next step may use these parameters again: their tensors are their own and those of the state."""
        entries = [entry for entry in self.entries if entry is not None]
        whole = all([entry.member.momentum_storage is entry.member.storage for entry in entries])
        return self.codec is None and whole and all([entry.weights is entry.local for entry in entries])

    # ---------------------------------------------------------------- matrices, each made when it is first asked for

    def find(self, number: int) -> MatrixStep | None:
        """Return a matrix; None if this rank stores nothing of it."""
        return None if self.entries[self.plan.assignments[number].parameter] is None else self.of(number)

    def of(self, number: int) -> MatrixStep:
        """Return a matrix of which this rank stores something."""
        if (matrix_step := self._matrix_steps.get(number)) is None:
            assignment, nonzero = self.plan.assignments[number], self.nonzero[number]
            entry = self.entries[assignment.parameter]
            assert entry is not None
            matrix_step = MatrixStep(number, assignment.matrix, entry, self.kind_of(number), nonzero)
            self._matrix_steps[number] = matrix_step
        return matrix_step

    def kind_of(self, number: int) -> Kind:
        """Return what a matrix of which this rank stores something has in common with others."""
        assignment = self.plan.assignments[number]
        entry, matrix = self.entries[assignment.parameter], assignment.matrix
        assert entry is not None
        key = entry.member.group, matrix.rows, matrix.cols
        if (kind := self._kinds.get(key)) is None:
            rule = self.rules[entry.member.group]
            assert rule is not None
            kind = self._kinds[key] = Kind(rule, self._orthogonalizers[entry.member.group, matrix.shape], matrix)
        return kind
