"""StateForm: the form that each tensor in a parameter's state must have, and the one check of it.

A step, `Muon.load_state_dict`, a save and a conversion check the same facts: is the key known, is it there, is it a
dense tensor, has it the shape and the place on this rank, the device, and numbers that a step leaves. What each of them
needs is a table of the kinds of faults that it refuses, with the line to write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from muonmesh.comm.storage import Storage, local_of
from muonmesh.errors import StateError, explain_error
from muonmesh.numerics.dtypes import master_for, real_of
from muonmesh.numerics.rules import never_negative
from muonmesh.step.members import OptimizedParameter
from muonmesh.step.precision import Precision
from muonmesh.step.state_layout import COUNT, COUNTED, StateLayout

Kind: TypeAlias = Literal["missing", "stranger", "shape", "owned", "place", "device", "numbers"]
"""The kinds of faults of a state, apart from values that are no dense tensors, which nothing takes. State has another
shape in general ("shape"), or as what the owners of other matrices keep ("owned"). It has another place if its mesh or
its placements differ."""

Refused: TypeAlias = Mapping[Kind, str]
"""The kinds of faults that are errors, each with what to write."""


class StateForm(NamedTuple):
    """The form in which a step uses one tensor of a parameter's state, worked out once for a plan.

    Attributes:
        key: Its key in the state of the parameter.
        layout: Its layout.
        shape: Its shape on this rank.
        dtype: Its dtype in the optimizer's state.
        device: Its device.
    """

    key: str
    layout: StateLayout
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def forms_of(member: OptimizedParameter, precision: Precision, *, master: bool = False) -> tuple[StateForm, ...]:
    """Return the forms of all state that a step uses of a parameter.

    Args:
        member: The parameter in the plan.
        precision: The dtypes of state.
        master: Whether there is a master weight, although the precision asks for none.
    """
    local = local_of(member.tensor)
    layouts = {**member.state_layouts, **({} if member.is_matrix else COUNTED)}
    if master or master_for(local.dtype, precision.master) is not None:
        layouts["master"] = StateLayout("weights", member.storage, dtype=local.dtype)
    return tuple(
        StateForm(
            key,
            layout,
            layout.shape_here(member.storage, local),
            layout.kept_dtype(precision),
            layout.device_beside(local.device, precision),
        )
        for key, layout in layouts.items()
    )


def check_state(name: str, forms: Iterable[StateForm], state: Mapping[str, Any], refused: Refused) -> None:
    """Check the state of one parameter.

    Args:
        name: The parameter's name.
        forms: The forms of its state.
        state: Its state.
        refused: The kinds of faults that are errors.

    Raises:
        StateError: the state has such a fault, or an entry that is no dense tensor of numbers.
    """
    for kind, found, needed in _faults(name, {form.key: form for form in forms}, state, refused):
        if kind in refused:
            raise StateError(explain_error(name, found, needed, refused[kind]))


def _faults(
    name: str, forms: Mapping[str, StateForm], state: Mapping[str, Any], refused: Refused
) -> Iterator[tuple[Kind, str, str]]:
    """Yield the kind of each fault, what was found and what is needed."""
    known = f"only {', '.join(forms)}, which this optimizer reads"
    for key in forms:
        if state.get(key) is None and (key in state or key != "master"):  # which begins anew
            yield "missing", f"state {sorted(map(str, state))}", f"{key!r} too, which this optimizer reads"
    for key, value in state.items():
        if key not in forms:
            yield "stranger", f"{key!r} in its state", known
        if key not in forms or value is None:
            continue
        _, layout, shape, dtype, device = forms[key]
        local = layout.local_of(f"{name}: {key}", value, dtype)
        found, needed = _told(local.shape, value), _told(shape, layout.storage)
        if tuple(local.shape) != shape:
            kind: Kind = "owned" if layout.at_owner else "shape"
            yield kind, f"{key} {found}", f"{needed}, as this rank stores it"
        elif found != needed and not layout.at_owner:
            yield "place", f"{key} {found}", needed
        if local.device != device:
            yield "device", f"{key} on {local.device}", f"it on {device}, as its parameter and state_device say"
        if "numbers" in refused and (wrong := wrong_state(key, local)):
            yield "numbers", f"{wrong} in {key}", NUMBERS


NUMBERS = "finite floating-point numbers of 16 bits or more, of at least 0 where a step makes no others"
"""What state consists of, for messages."""


def wrong_state(key: str, tensor: Tensor) -> str:
    """Return, in words, a dtype or numbers that no step leaves in a state tensor; empty if it has none."""
    floating = (tensor.is_floating_point() or tensor.is_complex()) and tensor.itemsize > 1
    return wrong_numbers(key, tensor) if floating or key == COUNT else f"dtype {tensor.dtype}"


def wrong_numbers(name: str, tensor: Tensor) -> str:
    """Return, in words, which wrong numbers a state tensor has: infinity, NaN, or negative squares; empty if none."""
    if (tensor.is_floating_point() or tensor.is_complex()) and not bool(tensor.isfinite().all()):
        return "infinity or NaN"
    key = name.rpartition(".")[2]
    never = key == COUNT or key in never_negative()
    return "a negative number" if never and bool((real_of(tensor) < 0).any()) else ""


def _told(local: Iterable[int], whole: object) -> str:
    """Return a description of a tensor: as a DTensor if ``whole`` is one or its Storage, else as a plain tensor."""
    if not isinstance(whole, DTensor) and not (isinstance(whole, Storage) and whole.mesh is not None):
        return f"a plain tensor of shape {tuple(local)}"
    return f"a DTensor of shape {tuple(whole.shape)} placed {tuple(whole.placements)}, {tuple(local)} here"
