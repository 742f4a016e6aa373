"""Slots: what a rank stores of each parameter in one step, its state included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from muonmesh.comm.storage import Storage, local_of, local_shape
from muonmesh.errors import LayoutError, StateError, explain_error
from muonmesh.layout import Piece, Plan
from muonmesh.layout.plan import pieces

RUNNING = ("running_norm", "running_norm_steps")
"""State of `clip`: for each matrix of a tensor the running norm of its gradients, and how many that has seen."""

_STORED = ("momentum_buffer", "exp_avg", "exp_avg_sq", "master")
"""State that is stored as the parameter is."""

Holdings = tuple[tuple[Piece, ...], ...]
"""For each Matrix of a plan, the pieces of it that this rank stores."""


@dataclass
class Slot:
    """One parameter in one step.

    Attributes:
        name: Canonical name.
        tensor: The parameter as the user holds it, possibly a DTensor.
        state: Its entry in the optimizer's state.
        gradient: Local part of its gradient, contiguous, or None; a partial one as the DTensor that it is.
        group: Number of its group.
        storage: Where it lives.
        place: Where its momentum lives.
        matrices: How many matrices its tensor holds. A flat tensor may hold several parameters; all of theirs count.
    """

    name: str
    tensor: Tensor
    state: dict[str, Any]
    gradient: Tensor | None
    group: int
    storage: Storage
    place: Storage
    matrices: int


@dataclass(frozen=True)
class Precision:
    """The dtypes of one optimizer: of orthogonalisation and wire, of the momentum, of fp32 masters or None."""

    compute: torch.dtype
    state: torch.dtype
    master: torch.dtype | None


def create_state(slot: Slot, precision: Precision) -> None:
    """Create the momentum, the running norms of `clip` and the master of a Muon parameter where missing."""
    local = local_of(slot.tensor)
    if "momentum_buffer" not in slot.state:
        shape = local.shape if slot.place is slot.storage else local_shape(slot.place)
        zeros = torch.zeros(shape, dtype=precision.state, device=local.device)
        slot.state["momentum_buffer"] = slot.place.wrap(zeros)
    for key in RUNNING:  # always, so that a checkpoint has something to be loaded into
        if key not in slot.state:
            slot.state[key] = torch.zeros(running_shape(slot.matrices), dtype=torch.float32, device=local.device)
    create_master(slot, precision)


def running_shape(matrices: int) -> tuple[int, ...]:
    """Return the shape of a tensor's running norms: 0-d for a single matrix, as AdamW's step count."""
    return () if matrices == 1 else (matrices,)


def create_master(slot: Slot, precision: Precision) -> None:
    """Create the master of a parameter where it is missing and asked for."""
    local = local_of(slot.tensor)
    if precision.master is not None and precision.master != local.dtype and "master" not in slot.state:
        slot.state["master"] = slot.storage.wrap(local.detach().to(precision.master).contiguous())


def check_state(slot: Slot, *, muon: bool) -> None:
    """Make sure that the state of a parameter is what a step may read as contiguous memory.

    Whoever wrote it, a checkpoint or the user: momentum and masters with other strides are made contiguous.

    Raises:
        LayoutError: the parameter's memory has been freed.
        StateError: a tensor is no tensor, of another shape than this rank stores, or elsewhere; or the state is of the
            other algorithm.
    """
    held = local_of(slot.tensor)
    if held.untyped_storage().nbytes() < held.numel() * held.element_size() and not held.is_meta:
        found, write = "a parameter without memory, which FSDP or ZeRO has freed", "Reshard it first: module.reshard()"
        raise LayoutError(explain_error(slot.name, found, "its elements to update", write))
    foreign = "exp_avg" if muon else "momentum_buffer"
    if foreign in slot.state:
        algorithm, other = ("muon", "adamw") if muon else ("adamw", "muon")
        raise StateError(
            explain_error(
                slot.name,
                f"{foreign}, state of {other}, in a group of {algorithm}",
                f"state of {algorithm}",
                "Write del optimizer.state[parameter] to begin with fresh state, or set the group back",
            )
        )
    for key in _STORED:
        value: object = slot.state.get(key)
        if value is None:
            continue
        if not isinstance(value, Tensor):
            raise StateError(explain_error(slot.name, f"{key} = {value!r}", "a tensor", "Load the state again"))
        place = slot.place if key == "momentum_buffer" else slot.storage
        local, same = local_of(value), place is slot.storage
        needed = tuple(local_of(slot.tensor).shape) if same else local_shape(place)
        if tuple(local.shape) != needed:
            raise StateError(
                explain_error(
                    slot.name,
                    f"{key} of shape {tuple(local.shape)} on this rank",
                    f"{needed}, as its parameter is stored",
                    "Write del optimizer.state[parameter] after resizing a parameter, which needs fresh state",
                )
            )
        if local.device != local_of(slot.tensor).device:
            found, where = f"{key} on {local.device}", f"it on {local_of(slot.tensor).device}, with its parameter"
            raise StateError(explain_error(slot.name, found, where, "Move it back, or load the state again"))
        if muon and not local.is_contiguous():
            slot.state[key] = place.wrap(local.contiguous())


def holdings_of(plan: Plan, rank: int, *, state: bool) -> Holdings:
    """Return for each Matrix of a plan the pieces of it that ``rank`` stores, or stores the momentum of."""
    found = []
    for assignment in plan.assignments:
        parameter = plan.parameters[assignment.parameter]
        found.append(tuple(pieces(parameter.source if state else parameter.target, rank, assignment.matrix)))
    return tuple(found)


def view_of(storage: Tensor, piece: Piece) -> Tensor:
    """Return the elements of a contiguous local storage that a piece names."""
    if piece.storage_start == 0 and piece.shape == storage.shape:
        return storage  # the common case: the whole of what is stored
    start = storage.storage_offset() + piece.storage_start
    return storage.as_strided(piece.shape, piece.storage_strides, start)
