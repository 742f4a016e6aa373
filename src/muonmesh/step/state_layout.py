"""StateLayout: the layout and dtype of each tensor that a rule keeps in the state of a parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from muonmesh.comm.storage import Storage, is_freed, local_of, local_shape
from muonmesh.errors import StateError, explain_error
from muonmesh.layout.companion import Companion
from muonmesh.numerics.dtypes import COMPLEX_DTYPES, HELD_DTYPES, master_for
from muonmesh.numerics.rules import KeptAs
from muonmesh.step.offload import fresh_zeros
from muonmesh.step.precision import Precision

COUNT = "step"
"""State of elementwise rules: how many steps have been taken, fp32, 0-d."""


class StateLayout(NamedTuple):
    """The layout of one tensor in the state of a parameter.

    Attributes:
        kept_as: The kind of its shape, see `KeptAs`; or "count", one number for the tensor, see `COUNTED`.
        storage: The storage (layout and shapes) of this tensor.
        companion: How this tensor travels to the owners of the matrices, or which owner keeps which part. None for
            per-element state, which is read and written where it is stored.
        dtype: The dtype of the parameter, if the state is kept in the dtype of the weights; None: in ``state_dtype``.
    """

    kept_as: KeptAs
    storage: Storage
    companion: Companion | None = None
    dtype: torch.dtype | None = None

    def saved_dtype(self, precision: Precision) -> torch.dtype:
        """Return the dtype in a checkpoint: ``state_dtype``, but fp32 or wider for state that is not per element.

        AdamW's moments have the dtype of the master weights or, without master weights, of the parameter.
        """
        if self.kept_as == "count":
            return torch.float32
        if self.dtype is not None:
            return master_for(self.dtype, precision.master) or self.dtype
        return precision.state if self.companion is None else precision.carried

    def kept_dtype(self, precision: Precision) -> torch.dtype:
        """Return the dtype in the optimizer's state: int8 for int8 momentum (saved in fp32), else `saved_dtype`."""
        return torch.int8 if precision.int8 and self.kept_as == "momentum" else self.saved_dtype(precision)

    @property
    def at_owner(self) -> bool:
        """Whether only the owner of a matrix keeps this state."""
        return self.companion is not None and self.companion.at_owner

    @property
    def side(self) -> str:
        """The unit with one number each, as checkpoints name it: "element", "rows", "cols", "matrix" or "parameter"."""
        if self.kept_as == "count":
            return "parameter"
        return "element" if self.companion is None else self.companion.side

    def shape_here(self, storage: Storage, local: Tensor) -> tuple[int, ...]:
        """Return the shape of this state on this rank, for a parameter in ``storage`` whose local part is ``local``."""
        if self.storage is storage:
            return tuple(local.shape)
        return self.storage.shape if self.kept_as == "count" else local_shape(self.storage)

    def device_beside(self, device: torch.device, precision: Precision) -> torch.device:
        """Return the device of this state, for a parameter on ``device``.

        The count is on the same CUDA device, because torch's fused kernels need it there.
        """
        if self.kept_as == "count":
            return device if device.type == "cuda" else torch.device("cpu")
        return precision.kept_on(device) if self.side == "element" else device

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
        found = type(value).__name__
        if isinstance(value, Tensor):  # whose elements there may not be
            found = f"a tensor of {value.dtype} and {value.layout}, perhaps freed"
        write = "Write del optimizer.state[parameter] to begin with fresh state, or load the state again"
        raise StateError(explain_error(name, found, "a dense tensor of floating-point numbers", write))

    def fresh(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, precision: Precision) -> Tensor:
        """Return new state of zeros for a parameter on ``device``, as a DTensor if the storage is a DTensor's."""
        if self.side == "element":
            return self.storage.wrap(fresh_zeros(shape, dtype, device, precision))
        return self.storage.wrap(torch.zeros(shape, dtype=dtype, device=self.device_beside(device, precision)))


_WHOLE = torch.int32, torch.int64

COUNTED = {COUNT: StateLayout("count", Storage(None, ()))}
"""The layout of the count that a parameter of an elementwise rule has besides the state of its rule."""
