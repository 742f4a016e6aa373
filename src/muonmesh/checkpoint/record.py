"""Record: one parameter and its state as whole tensors, of each of which this rank stores some boxes."""

from __future__ import annotations

import math
from collections.abc import Iterator, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from muonmesh.checkpoint.share import Share, boxes_of
from muonmesh.comm.storage import Storage, local_of, local_shape, this_rank
from muonmesh.errors import StateError, explain_error
from muonmesh.layout import FlatShards, split_matrices
from muonmesh.numerics.coefficients import choose
from muonmesh.numerics.kernels import told_products
from muonmesh.numerics.rules import is_matrix_rule
from muonmesh.step.offload import fresh_copy
from muonmesh.step.planning import Planned
from muonmesh.step.precision import Precision
from muonmesh.step.state_layout import StateLayout, beside_rule

MODEL = "model"
STATE = "optimizer.state"
"""What the names of weights and of state begin with: the names under which torch saves a model and an optimizer."""

IN_PLACE = Precision(torch.float32, torch.float32, None)
"""The precision of a Record whose state lies beside its parameter: an engine makes that state itself."""


@dataclass(frozen=True)
class Part:
    """One tensor in the state of a parameter.

    Attributes:
        key: Its name.
        layout: Where the numbers of this parameter live, and what they are.
        local: Shape of the local tensor, which may have the numbers of others too.
        dtype: In which it is saved.
        device: Where it is kept.
        positions: Where its numbers are in what the state keeps, which has those of all parameters of a flat tensor one
            after the other; None: the state keeps these alone.
    """

    key: str
    layout: StateLayout
    local: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    positions: slice | None = None

    @staticmethod
    def of(key: str, layout: StateLayout, storage: Storage, local: Tensor, precision: Precision) -> Part:
        """Return the tensor under a key in the state of a parameter that lives in ``storage`` as ``local``."""
        shape, device = layout.shape_here(storage, local), layout.device_beside(local.device, precision)
        return Part(key, layout, shape, layout.saved_dtype(precision), device)

    def view(self, stored: Tensor) -> Tensor:
        """Return what belongs to this parameter of a contiguous local tensor."""
        return stored if self.positions is None else stored.view(-1)[self.positions]


@dataclass(frozen=True)
class Record:
    """One parameter with its state, as a checkpoint saves and loads them; or a tensor that no optimizer steps.

    Attributes:
        name: Canonical name.
        tensor: What the optimizer steps: the parameter, or a flat tensor that holds it among others.
        storage: Where it lives.
        states: The optimizer's state by tensor; an entry is made when a checkpoint is loaded.
        parts: The tensors that the state of this parameter may have, besides the master.
        group: The param group, whose settings are written too; empty for what no optimizer steps.
        spec: How it splits into matrices.
        precision: Says in what masters are kept, where what has a number for each element is, and what multiplies.
    """

    name: str
    tensor: Tensor
    storage: Storage
    states: MutableMapping[Tensor, dict[str, Any]] = field(default_factory=dict)
    parts: tuple[Part, ...] = ()
    group: dict[str, Any] = field(default_factory=dict)
    spec: Any = None
    precision: Precision = IN_PLACE

    @property
    def state(self) -> dict[str, Any]:
        """The state of its tensor; empty before the first step."""
        return self.states.get(self.tensor, {})

    @property
    def algorithm(self) -> str:
        """What steps it."""
        return str(self.group["algorithm"])

    @property
    def is_matrix(self) -> bool:
        """Whether it is stepped as matrices, and not by AdamW."""
        return is_matrix_rule(self.algorithm)

    @property
    def products(self) -> str:
        """Which products multiply its matrices, and which coefficient set "auto" is."""
        told, device = self.precision, local_of(self.tensor).device
        asked, steps = self.group["ns_coefficients"], self.group["ns_steps"]
        named = choose(asked, steps, device=device, dtype=told.compute)
        products = told_products(told.kernels, device=device, dtype=told.compute)
        return f"{products}, {named}" if asked == "auto" else products

    @property
    def weights(self) -> Tensor:
        """The weights that this rank stores, in the precision in which they are trained: the master's if there is one.

        So a checkpoint has no masters. Loaded where there are some, they take the weights as they were saved, and the
        parameter takes them rounded, as after every step.
        """
        return local_of(self.state.get("master", self.tensor)).detach()

    @property
    def dtype(self) -> torch.dtype:
        """The precision in which its weights are trained."""
        return self.precision.master or self.tensor.dtype

    @property
    def created(self) -> bool:
        """Whether it has state: a step has been taken."""
        return any(part.key in self.state for part in self.parts)

    def shares(self) -> Iterator[tuple[str, Share]]:
        """Yield what this rank writes of weights and state, by name."""
        yield f"{MODEL}.{self.name}", _written(self.weights, self.storage)
        for part in self.parts:
            if part.key in self.state:
                local = part.view(local_of(self.state[part.key]).detach().contiguous())
                yield f"{STATE}.{self.name}.{part.key}", _written(local, part.layout.storage)

    def take_weights(self, share: Share) -> None:
        """Write weights that were read for it."""
        fill(local_of(self.tensor).detach(), self.storage, share)
        if self.dtype != self.tensor.dtype:
            state = self.states[self.tensor]
            if "master" not in state:
                copy = fresh_copy(local_of(self.tensor), self.dtype, self.precision, wait=True)  # the host writes it
                state["master"] = self.storage.wrap(copy)
            fill(local_of(state["master"]), self.storage, share)

    def take_state(self, part: Part, share: Share | None) -> None:
        """Write a part of the state that was read for it; None: as before the first step."""
        held = self.state.get(part.key)
        if share is None and held is None:
            return
        if held is None or local_of(held).dtype != part.dtype or tuple(local_of(held).shape) != part.local:
            held = part.layout.fresh(part.local, part.dtype, local_of(self.tensor).device, self.precision)
            self.states[self.tensor][part.key] = held
        local = local_of(held)
        if share is None:
            for box in boxes_of(part.view(local), part.layout.storage.layout, part.layout.storage.shape).values():
                box.zero_()
        else:
            fill(part.view(local), part.layout.storage, share)


def _written(local: Tensor, storage: Storage) -> Share:
    layout = storage.layout
    # On a mesh all copies are cut alike, and torch writes each box once, on the rank that has least to write. Others
    # may be cut at other places, and then would overlap: the first of them is written.
    own = not isinstance(layout, FlatShards) or layout.replica(this_rank()) == layout.replicas[0]
    return Share(storage.shape, local.dtype, boxes_of(local.contiguous(), layout, storage.shape) if own else {})


def wanted(storage: Storage, dtype: torch.dtype, device: torch.device) -> Share:
    """Return fresh memory for what this rank stores of a whole tensor: nothing is loaded into what is in use."""
    span = storage.shape if storage.layout is None else (math.prod(local_shape(storage)),)
    where = boxes_of(torch.empty(span, dtype=dtype, device="meta"), storage.layout, storage.shape)
    boxes = {at: torch.empty(box.shape, dtype=dtype, device=device) for at, box in where.items()}
    return Share(storage.shape, dtype, boxes)


def fill(local: Tensor, storage: Storage, share: Share) -> None:
    """Copy what was read into what this rank stores, rounding to its dtype."""
    memory = local.contiguous()
    for at, box in boxes_of(memory, storage.layout, storage.shape).items():
        box.copy_(share.boxes[at])
    if memory is not local:
        local.copy_(memory)


@runtime_checkable
class Recorded(Protocol):
    """An optimizer that can be saved, or an object that holds one. No method communicates, except `whole`."""

    def refuse_if_interrupted(self) -> None:
        """Raise StateError if a step or a load was interrupted while it wrote, and no state has been loaded since."""

    def checkpoint_records(self) -> list[Record]:
        """Return all parameters that this rank updates, with their optimizer state.

        Raises:
            StateError: the state has an entry that no rule reads.
        """

    def checkpoint_changing(self) -> None:
        """Record that weights, state and settings are being written: incomplete until `checkpoint_restored`."""

    def checkpoint_restored(self) -> None:
        """Record that weights, state and settings were replaced."""

    def renamed(self, model: nn.Module) -> dict[str, str]:
        """Return the names in a checkpoint that differ from the model's canonical names, by the latter.

        They differ if ranks give one name to different tensors, as DeepSpeed does with experts.
        """

    def whole(self, model: nn.Module, *, write: bool) -> AbstractContextManager[Any]:
        """Return a context in which untrained parameters of the model are whole; all ranks enter it.

        With ``write``, values that are written into them in the context stay.
        """


def records_of(planned: Planned, optimizer: torch.optim.Optimizer, precision: Precision) -> list[Record]:
    """Return the parameters of a plan, with their state in the optimizer that the plan was made for.

    Raises:
        StateError: their state has an entry that no rule reads.
    """
    state = optimizer.state
    first: dict[int, int] = {}  # for each tensor how many matrices its parameters before this one have
    records = []
    for member in planned.members:
        group = optimizer.param_groups[member.group]
        local = local_of(member.tensor)
        shape = tuple(member.storage.shape)
        every = count = positions = None
        if is_matrix_rule(group["algorithm"]):
            every = len(planned.matrices_of[member.tensor])
            count = len(split_matrices(member.name, shape, member.spec))
            begin = first.setdefault(id(member.tensor), 0)
            first[id(member.tensor)] += count
            positions = None if count == every else slice(begin, begin + count)
        kept, beside = member.state_layouts.items(), beside_rule(count).items()
        parts = [Part.of(key, layout, member.storage, local, precision) for key, layout in (*kept, *beside)]
        for number, norms in enumerate(beside_rule(every).values(), len(kept)):
            parts[number] = replace(parts[number], local=norms.storage.shape, positions=positions)
        known = {*(part.key for part in parts), "master"}
        if strangers := [key for key in state.get(member.tensor, ()) if key not in known]:
            found = f"{strangers[0]!r} in its state"
            needed = f"only {', '.join(sorted(known))}, which this optimizer reads"
            raise StateError(explain_error(member.name, found, needed, "Remove it from the state"))
        records.append(
            Record(member.name, member.tensor, member.storage, state, tuple(parts), group, member.spec, precision)
        )
    return records
