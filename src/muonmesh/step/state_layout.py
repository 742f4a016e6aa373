"""StateLayout: the layout and dtype of each tensor in a parameter's state; StateForm: its form here, and the one check.

`Precision` has the dtypes of one optimizer, and where it keeps state.

A step, `Muon.load_state_dict`, a save and a conversion check the same facts: is the key known, is it there, is it a
dense tensor, has it the shape and the place on this rank, the device, and numbers that a step leaves. What each of them
needs is a table of the kinds of faults that it refuses, with the line to write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from muonmesh.comm.storage import Storage, is_freed, local_of, local_shape
from muonmesh.errors import StateError, explain_error
from muonmesh.layout.factored_state import FactoredState
from muonmesh.numerics.dtypes import COMPLEX_DTYPES, HELD_DTYPES, master_for, real_of
from muonmesh.numerics.kernels import KernelName
from muonmesh.numerics.rules import KeptAs, never_negative

COUNT = "step"
"""State of elementwise rules: how many steps have been taken, fp32, 0-d."""


@dataclass(frozen=True)
class Precision:
    """The dtypes of one optimizer, its kernels, and the place of its state.

    Attributes:
        compute: The dtype of orthogonalization.
        state: The dtype of per-element state; fp32 if momentum is kept in int8.
        master: The dtype of master weights; None: there are none.
        kernels: The kernels that multiply matrices.
        int8: Whether momentum is kept in int8, with a scale for each block (`muonmesh.step.int8_momentum`).
        on_host: Whether per-element state is kept in CPU memory (`muonmesh.step.offload`).
    """

    compute: torch.dtype
    state: torch.dtype
    master: torch.dtype | None
    kernels: KernelName = "auto"
    int8: bool = False
    on_host: bool = False

    @staticmethod
    def of(shared: Mapping[str, Any]) -> Precision:
        """Return the `Precision` that the settings of all groups describe."""
        int8, on_host = shared["state_dtype"] == "int8", shared["state_device"] is not None
        state = torch.float32 if int8 else shared["state_dtype"]
        return Precision(shared["compute_dtype"], state, shared["master_dtype"], shared["kernels"], int8, on_host)

    def leaves(self, device: torch.device) -> bool:
        """Whether the per-element state of a parameter on ``device`` is kept on another device."""
        return self.on_host and device.type != "cpu"

    @property
    def wire(self) -> torch.dtype:
        """The dtype of the matrices that ranks send: ``compute``, but bf16 for fp16, whose range is too small."""
        return torch.bfloat16 if self.compute == torch.float16 else self.compute

    @property
    def carried(self) -> torch.dtype:
        """The dtype of state by row, column or matrix: fp32, or fp64 if ``compute`` or ``state`` is fp64."""
        return torch.promote_types(torch.promote_types(self.compute, self.state), torch.float32)


class StateLayout(NamedTuple):
    """The layout of one tensor in the state of a parameter.

    Attributes:
        kept_as: The kind of its shape, see `KeptAs`; or "count", one number for the tensor, see `COUNTED`.
        storage: The storage (layout and shapes) of this tensor.
        factored: How this tensor travels to the owners of the matrices, or which owner keeps which part. None for
            per-element state, which is read and written where it is stored.
        dtype: The dtype of the parameter, if the state is kept in the dtype of the weights; None: in ``state_dtype``.
    """

    kept_as: KeptAs
    storage: Storage
    factored: FactoredState | None = None
    dtype: torch.dtype | None = None

    def form(self, key: str, parameter: Storage, local: Tensor, precision: Precision) -> StateForm:
        """Return the form of this state on this rank, under a key.

        Momentum has ``state_dtype``, and other state that is not per element fp32 or wider. AdamW's moments have the
        dtype of the master weights or, without master weights, of the parameter. The count is on a CUDA device with its
        parameter, because torch's fused kernels need it there.

        Args:
            key: The key.
            parameter: The storage of the parameter.
            local: The local part of the parameter.
            precision: The dtypes and the place of state.
        """
        device = local.device
        if self.kept_as == "count":
            return StateForm(key, self, (), torch.float32, device if device.type == "cuda" else torch.device("cpu"))
        shape = tuple(local.shape) if self.storage is parameter else local_shape(self.storage)
        dtype = precision.state if self.factored is None else precision.carried
        if self.dtype is not None:
            dtype = master_for(self.dtype, precision.master) or self.dtype
        elif precision.int8 and self.kept_as == "momentum":
            dtype = torch.int8
        if self.factored is None and precision.leaves(device):
            return StateForm(key, self, shape, dtype, torch.device("cpu"), pinned=torch.cuda.is_available())
        return StateForm(key, self, shape, dtype, device)

    @property
    def at_owner(self) -> bool:
        """Whether only the owner of a matrix keeps this state."""
        return self.factored is not None and self.factored.at_owner

    @property
    def side(self) -> str:
        """The unit with one number each, as checkpoints name it: "element", "rows", "cols", "matrix" or "parameter"."""
        if self.kept_as == "count":
            return "parameter"
        return "element" if self.factored is None else self.factored.side

    def local_of(self, name: str, value: object, *others: torch.dtype) -> Tensor:
        """Return the local part of a value that this state may have.

        Args:
            name: What it is, for messages.
            value: A tensor in any dtype for weights; whole numbers too if it is a count.
            others: Other dtypes that it may have.

        Raises:
            StateError: the value is of another kind, or its memory was freed.
        """
        dtypes = (*HELD_DTYPES, *others, *(_WHOLE if self.kept_as == "count" else ()))
        dtypes += COMPLEX_DTYPES if self.dtype is not None and self.dtype.is_complex else ()
        if isinstance(value, Tensor) and value.layout is torch.strided and value.dtype in dtypes:
            local = local_of(value)  # detaching a DTensor first would take torch longer than all else
            if not is_freed(local):
                return local.detach() if local.requires_grad else local
        problem = type(value).__name__
        if isinstance(value, Tensor):  # whose elements there may not be
            problem = f"a tensor of {value.dtype} and {value.layout}, perhaps freed"
        write = "Write del optimizer.state[parameter] to begin with fresh state, or load the state again"
        raise StateError(explain_error(name, problem, "a dense tensor of floating-point numbers", write))


_WHOLE = torch.int32, torch.int64

COUNTED = {COUNT: StateLayout("count", Storage(None, ()))}
"""The layout of the count that a parameter of an elementwise rule has besides the state of its rule."""


# ---------------------------------------------------------------- the form of state here, and its check

Kind: TypeAlias = Literal["missing", "stranger", "shape", "owned", "place", "rank", "device", "numbers"]
"""The kinds of faults of a state, apart from values that are no dense tensors, which nothing takes. State has another
shape in general ("shape"), or as what the owners of other matrices keep ("owned"). It has another place if its mesh or
its placements differ, and is of another rank if that stores another shard ("rank")."""

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
        pinned: Whether it is in pinned memory.
    """

    key: str
    layout: StateLayout
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    pinned: bool = False

    @property
    def saved(self) -> StateForm:
        """The form in a checkpoint: fp32 for int8."""
        return self._replace(dtype=torch.float32) if self.dtype == torch.int8 else self

    def fresh(self) -> Tensor:
        """Return new state of zeros, as a DTensor if the storage is a DTensor's."""
        zeros = torch.zeros(self.shape, dtype=self.dtype, device=self.device, pin_memory=self.pinned)
        return self.layout.storage.wrap(zeros)


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
    for kind, problem, needed in _faults(name, {form.key: form for form in forms}, state, refused):
        if kind in refused:
            raise StateError(explain_error(name, problem, needed, refused[kind]))


def _faults(
    name: str, forms: Mapping[str, StateForm], state: Mapping[str, Any], refused: Refused
) -> Iterator[tuple[Kind, str, str]]:
    """Yield the kind of each fault, what was found and what is needed."""
    expected = f"only {', '.join(forms)}, which this optimizer reads"
    for key in forms:
        if state.get(key) is None and (key in state or key != "master"):  # which begins anew
            yield "missing", f"state {sorted(map(str, state))}", f"{key!r} too, which this optimizer reads"
    for key, value in state.items():
        if key not in forms:
            yield "stranger", f"{key!r} in its state", expected
        if key not in forms or value is None:
            continue
        _, layout, shape, dtype, device, _ = forms[key]
        local = layout.local_of(f"{name}: {key}", value, dtype)
        description, needed = _described(local.shape, value), _described(shape, layout.storage)
        if other := _other_shard(value, layout.storage):
            at, own = other
            yield "rank", f"{key} of the rank at {at} in its mesh", f"the shard of this rank, which is at {own}"
        elif tuple(local.shape) != shape:
            kind: Kind = "owned" if layout.at_owner else "shape"
            yield kind, f"{key} {description}", f"{needed}, as this rank stores it"
        elif description != needed and not layout.at_owner:
            yield "place", f"{key} {description}", needed
        if local.device != device:
            yield "device", f"{key} on {local.device}", f"it on {device}, as its parameter and state_device say"
        if "numbers" in refused and (wrong := wrong_state(key, local)):
            yield "numbers", f"{wrong} in {key}", NUMBERS


def _other_shard(value: object, storage: Storage) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the coordinates of the rank whose shard a DTensor is, and of this rank; None if both store the same shard.

    A DTensor from a file has the mesh of the rank that has written the file.
    """
    if not isinstance(value, DTensor) or storage.mesh is None or value.device_mesh.shape != storage.mesh.shape:
        return None
    at, own = value.device_mesh.get_coordinate(), storage.mesh.get_coordinate()
    if at is None or own is None or value.placements != storage.placements:
        return None
    shards = zip(at, own, storage.placements, strict=True)
    return (tuple(at), tuple(own)) if any(i != k and not placed.is_replicate() for i, k, placed in shards) else None


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


def _described(local: Iterable[int], whole: object) -> str:
    """Return a description of a tensor: as a DTensor if ``whole`` is one or its Storage, else as a plain tensor."""
    if not isinstance(whole, DTensor) and not (isinstance(whole, Storage) and whole.mesh is not None):
        return f"a plain tensor of shape {tuple(local)}"
    return f"a DTensor of shape {tuple(whole.shape)} placed {tuple(whole.placements)}, {tuple(local)} here"
