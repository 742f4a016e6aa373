"""ParameterRecord: one parameter and its state, as whole tensors, of which this rank stores some boxes.

`CheckpointedOptimizer` gives `muonmesh.checkpoint` the ParameterRecords of a `Muon`; integrations derive classes of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from muonmesh.checkpoint.state import widen_state
from muonmesh.comm.storage import Storage, local_of, local_shape, this_rank
from muonmesh.comm.wrappers import layers_of
from muonmesh.layout import FlatShards, Layout
from muonmesh.numerics.dtypes import master_for
from muonmesh.numerics.kernels import told_products
from muonmesh.numerics.kernels.threads import plain_modes
from muonmesh.step.connection import connect, forget, plan
from muonmesh.step.members import OptimizedParameter
from muonmesh.step.parameter_steps import ParameterStep, prepare_state
from muonmesh.step.planning import set_of
from muonmesh.step.runtime import UNCLIPPED, Runtime
from muonmesh.step.state_layout import Precision, StateForm, check_state

Boxes = dict[tuple[int, ...], Tensor]
"""Boxes of a whole tensor, by their offsets in the tensor."""


def boxes_of(local: Tensor, layout: Layout | None, shape: tuple[int, ...]) -> Boxes:
    """Return the boxes of a whole tensor that this rank stores, as views.

    Args:
        local: This rank's local tensor, contiguous; a flat buffer may also contain other tensors.
        layout: The layout of the whole tensor; None means that each rank stores all of it.
        shape: The shape of the whole tensor.
    """
    if layout is None or not math.prod(shape):
        return {(0,) * len(shape): local.view(shape) if layout is None else local.new_empty(shape)}
    start = local.storage_offset()
    return {
        block.region.offset: local.as_strided(block.region.shape, block.strides, start + block.start)
        for block in layout.blocks(this_rank())
        if block.region.numel
    }


class LocalBoxes(NamedTuple):
    """What this rank writes of one tensor of a checkpoint.

    Attributes:
        shape: The shape of the whole tensor.
        dtype: Its dtype.
        boxes: The boxes of it that this rank writes.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: Boxes


MODEL = "model"
STATE = "optimizer.state"
"""The prefixes of the names of weights and of state in a checkpoint, as in torch's checkpoints."""

IN_PLACE = Precision(torch.float32, torch.float32, None)
"""The default precision of a ParameterRecord: fp32, no master weights, and state on the parameter's device."""


@dataclass(frozen=True)
class ParameterRecord:
    """One parameter with its state, as a checkpoint saves and loads them; or a tensor that no optimizer steps.

    Attributes:
        parameter: The facts about the parameter, or about the tensor.
        states: The optimizer's state by tensor. Loading a checkpoint adds missing entries.
        parts: The forms of the tensors that the state of this parameter may have, besides the master weight, with the
            dtype in which each is saved. The local tensor may also contain the numbers of other parameters.
        group: The param group, whose settings are saved too; empty for a tensor that no optimizer steps.
        precision: The dtype of master weights, the device of per-element state, and the kernels of matrix products.
    """

    parameter: OptimizedParameter
    states: MutableMapping[Tensor, dict[str, Any]] = field(default_factory=dict)
    parts: tuple[StateForm, ...] = ()
    group: dict[str, Any] = field(default_factory=dict)
    precision: Precision = IN_PLACE

    @property
    def name(self) -> str:
        """The name of the parameter."""
        return self.parameter.name

    @property
    def state(self) -> dict[str, Any]:
        """The state of the tensor; empty before the first step."""
        return self.states.get(self.parameter.tensor, {})

    @property
    def products(self) -> str:
        """The implementation of the products of its matrices; with ns_coefficients "auto", also the chosen set.

        That is the set of large matrices, so that it is the same whichever of a group's matrices a rank holds.
        """
        precision, device = self.precision, self.parameter.tensor.device
        products = told_products(precision.kernels, device=device, dtype=precision.compute)
        if self.group["ns_coefficients"] != "auto":
            return products
        named, scope = set_of(self.group, device, precision)
        return f"{products}, {named}{scope}"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which its weights are trained."""
        dtype = self.parameter.tensor.dtype
        return master_for(dtype, self.precision.master) or dtype

    @property
    def created(self) -> bool:
        """Whether the parameter has state, because a step was taken."""
        return any(part.key in self.state for part in self.parts)

    def entries(self) -> Iterator[tuple[str, StateForm | None]]:
        """Yield the name in checkpoints of the weights, with None, and of each part of the state, with its form."""
        yield f"{MODEL}.{self.name}", None
        for part in self.parts:
            yield f"{STATE}.{self.name}.{part.key}", part

    def storage_of(self, part: StateForm | None) -> Storage:
        """Return the storage of an entry."""
        return self.parameter.storage if part is None else part.layout.storage

    def shares(self) -> Iterator[tuple[str, LocalBoxes]]:
        """Yield what this rank writes of each entry that it has, by name.

        The weights are those in the precision in which they are trained, so a checkpoint has no separate master
        weights. On loading, a master weight takes the saved weights, and the parameter takes the same weights rounded,
        as after every step.
        """
        for name, part in self.entries():
            if part is None:
                yield name, _written(self.parameter.weights(self.state), self.parameter.storage)
            elif part.key in self.state:
                yield name, _written(local_of(self.state[part.key]).detach(), part.layout.storage)

    def boxes_for(self, part: StateForm | None, dtype: torch.dtype) -> Boxes:
        """Return new memory for this rank's boxes of an entry, so that loading does not change memory in use."""
        device = local_of(self.parameter.tensor).device if part is None else part.device
        return new_boxes(self.storage_of(part), dtype, device)

    def take(self, part: StateForm | None, boxes: Boxes | None) -> None:
        """Copy what was read of an entry into the weights or the state; None resets state as before the first step."""
        if part is not None:
            self._take_state(part, boxes)
        elif boxes is not None:
            self._take_weights(boxes)

    def _take_weights(self, boxes: Boxes) -> None:
        tensor, storage = self.parameter.tensor, self.parameter.storage
        fill(local_of(tensor).detach(), storage, boxes)
        if self.dtype != tensor.dtype:
            state = self.states[tensor]
            if "master" not in state:
                *_, form = self.parameter.forms(self.precision, master=True)
                state["master"] = form.fresh()
                local_of(state["master"]).copy_(local_of(tensor).detach())
            fill(local_of(state["master"]), storage, boxes)

    def _take_state(self, part: StateForm, boxes: Boxes | None) -> None:
        state = self.state.get(part.key)
        if boxes is None and state is None:
            return
        if state is None or local_of(state).dtype != part.dtype or tuple(local_of(state).shape) != part.shape:
            state = self.states[self.parameter.tensor][part.key] = part.fresh()
        local, storage = local_of(state), part.layout.storage
        if boxes is None:
            for box in boxes_of(local, storage.layout, storage.shape).values():
                box.zero_()
        else:
            fill(local, storage, boxes)


def _written(local: Tensor, storage: Storage) -> LocalBoxes:
    layout = storage.layout
    # On a mesh, all replicas have the same boxes, and `folder.write` writes each box once.
    # Replicas of FlatShards may be cut at different places, and their boxes overlap: only the first replica is written.
    first = not isinstance(layout, FlatShards) or layout.replica(this_rank()) == layout.replicas[0]
    return LocalBoxes(storage.shape, local.dtype, boxes_of(local.contiguous(), layout, storage.shape) if first else {})


def new_boxes(storage: Storage, dtype: torch.dtype, device: torch.device) -> Boxes:
    """Return new memory for this rank's boxes of a whole tensor, so that loading does not change memory in use."""
    span = storage.shape if storage.layout is None else (math.prod(local_shape(storage)),)
    empty_boxes = boxes_of(torch.empty(span, dtype=dtype, device="meta"), storage.layout, storage.shape)
    return {at: torch.empty(box.shape, dtype=dtype, device=device) for at, box in empty_boxes.items()}


def fill(local: Tensor, storage: Storage, boxes: Boxes) -> None:
    """Copy boxes that were read into this rank's local tensor, rounding to its dtype."""
    memory = local.contiguous()
    for at, box in boxes_of(memory, storage.layout, storage.shape).items():
        box.copy_(boxes[at])
    if memory is not local:
        local.copy_(memory)


class CheckpointedOptimizer:
    """What `muonmesh.checkpoint` saves of a `Muon` and loads into it.

    A framework that wraps one optimizer or several derives a class, and overrides the methods whose answers are others
    there. The calls of all ranks, in order:

    1. `save` calls `refuse_if_interrupted`.
    2. Both enter `whole`, which communicates.
    3. Both call `checkpoint_records` and `renamed`. The former communicates if owners of matrices keep state and no
       step has assigned them.
    4. `load` calls `checkpoint_changing`, then `ParameterRecord.take` for each entry.
    5. Both leave `whole`.
    6. `load` calls `checkpoint_restored`.

    `create_state` is for frameworks that read the state of their optimizer before the first step.

    Attributes:
        muons: The optimizers.
    """

    muons: tuple[Any, ...]

    def __init__(self, *muons: Any) -> None:
        self.muons = muons

    def refuse_if_interrupted(self) -> None:
        """Raise StateError if a step or a load was interrupted while it wrote, and no state has been loaded since."""
        for muon in self.muons:
            muon._runtime.refuse_if_interrupted()

    @torch.no_grad()
    def create_state(self) -> None:
        """Create the state that a first step would create; no communication."""
        for muon in self.muons:
            precision = muon._runtime.precision
            for member in plan(muon.param_groups, muon._runtime).members:
                state = muon.state[member.tensor]
                forms = member.forms(precision, master="master" in state)
                entry = ParameterStep(member, local_of(member.tensor), state, [None], 0, forms)
                prepare_state(entry)

    @plain_modes()
    def checkpoint_records(self) -> list[ParameterRecord]:
        """Return a `ParameterRecord` of every parameter of this rank, with its state.

        The ranks communicate only if a rule keeps state at the owner of a matrix (the rank that orthogonalizes it), and
        no step has assigned the owners yet.

        Raises:
            StateError: a parameter has state that the optimizer does not read.
            LayoutError, ValueError, TypeError: no plan can be made.
        """
        return [record for muon in self.muons for record in _records_of(muon, muon._runtime)]

    def checkpoint_changing(self) -> None:
        """Mark weights, state and settings as incomplete until `checkpoint_restored`: a load begins to write."""
        for muon in self.muons:
            muon._runtime.interrupted = "a load of a checkpoint"

    def checkpoint_restored(self) -> None:
        """Mark weights, state and settings as complete, because a load has written them."""
        for muon in self.muons:
            runtime = muon._runtime
            runtime.interrupted, runtime.loaded, runtime.clip = None, True, UNCLIPPED

    def renamed(self, model: nn.Module) -> dict[str, str]:
        """Return the checkpoint's names of tensors that the model names differently, by the model's canonical names.

        Names differ if ranks use one name for different tensors, as DeepSpeed does with experts. Here none does.
        """
        return {}

    @contextmanager
    def whole(self, model: nn.Module, *, write: bool) -> Iterator[None]:
        """Return a context in which frozen parameters of the model are whole; all ranks enter it. Here they always are.

        For a save before the first step, the ranks find in this context which of their plain parameters are copies, by
        comparing weights. The first step repeats this, since gradients are then known too.

        Args:
            model: The model.
            write: Whether values that are written into them in the context are kept.

        Raises:
            LayoutError, PlanError: on every rank: no plan can be made, or plain parameters of one name differ.
        """
        unconnected = [muon for muon in self.muons if muon._runtime.connected is None]
        for muon in unconnected if not write else ():
            connect(muon.param_groups, muon._runtime, gradients=False)
        try:
            yield
        finally:
            for muon in unconnected:
                forget(muon._runtime)


def recorded_in(optimizer: Any) -> CheckpointedOptimizer | None:
    """Return the optimizer of muonmesh inside wrappers, such as Accelerate's and DeepSpeed's; None if there is none."""
    for inner in layers_of(optimizer):
        if isinstance(inner, CheckpointedOptimizer):
            return inner
        if isinstance(getattr(inner, "_runtime", None), Runtime):
            return CheckpointedOptimizer(inner)
    return None


def _records_of(optimizer: Any, runtime: Runtime) -> Iterator[ParameterRecord]:
    """Yield a `ParameterRecord` of every parameter that an optimizer steps on this rank."""
    optimizer.finish()
    planned = plan(optimizer.param_groups, runtime)
    if not planned.connected and planned.plan.keepers:
        planned = connect(optimizer.param_groups, runtime, gradients=False)
    if runtime.precision.int8:
        widen_state(optimizer.state, planned, runtime.last.blocks)
    for member in planned.members:
        forms = member.forms(runtime.precision, master=True)
        state, group = optimizer.state, optimizer.param_groups[member.group]
        check_state(member.name, forms, state.get(member.tensor, {}), {"stranger": "Remove it from the state"})
        parts = tuple(form.saved for form in forms if form.key != "master")
        yield ParameterRecord(member, state, parts, group, runtime.precision)
