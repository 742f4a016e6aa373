"""StateLayout: where each thing lives that a rule keeps of a parameter, and in which dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from muonmesh.comm.storage import Storage
from muonmesh.layout import Companion, FlatShards, MatrixSpec, MeshLayout, companion_matrices
from muonmesh.layout.companion import companion_on_mesh, companions_in_buffers
from muonmesh.numerics.rules import KeptAs
from muonmesh.settings import Precision


class StateLayout(NamedTuple):
    """Where one thing lives that a rule keeps of a parameter.

    Attributes:
        kept_as: What it has one number for: an element, of momentum or weights; or a row, a column or a matrix.
        storage: Where it lives.
        companion: How it travels to the owners of the matrices. None for what has a number for each element: that is
            read and written where it is stored, and does not travel.
        dtype: That of the parameter, if it is kept in the dtype of the weights; None: in ``state_dtype``.
    """

    kept_as: KeptAs
    storage: Storage
    companion: Companion | None = None
    dtype: torch.dtype | None = None

    def saved_dtype(self, precision: Precision) -> torch.dtype:
        """Return what it is saved in: ``state_dtype``, but fp32 or wider where there are few numbers of it.

        AdamW's moments have the dtype of the weights that they move, which is the master's where there is one.
        """
        if self.dtype is not None:
            return precision.master or self.dtype
        return precision.state if self.companion is None else precision.carried

    def kept_dtype(self, precision: Precision) -> torch.dtype:
        """Return what it is kept in: momentum in int8 if that is asked for, which is saved in fp32."""
        return torch.int8 if precision.int8 and self.kept_as == "momentum" else self.saved_dtype(precision)


@dataclass(frozen=True)
class Stored:
    """A parameter as `state_layouts_of` sees it: how it splits, and where it is stored.

    Attributes:
        name: Canonical name.
        spec: How it splits into matrices.
        storage: Where it lives.
        momentum_storage: Where its momentum lives.
    """

    name: str
    spec: MatrixSpec
    storage: Storage
    momentum_storage: Storage


def state_layouts_of(keeps: Mapping[str, KeptAs], together: Mapping[int, Stored]) -> dict[int, dict[str, StateLayout]]:
    """Return where all lives that a rule keeps of the parameters of one tensor: one of them, or several if it is flat.

    What has a number for each row, column or matrix follows the momentum: it is placed on its mesh, or lies in a flat
    buffer cut between the same ranks.

    Args:
        keeps: See `Rule.keeps`.
        together: The parameters of the tensor, in its order.

    Raises:
        ValueError: a parameter does not split as its group says.
    """
    state_layouts: dict[int, dict[str, StateLayout]] = {number: {} for number in together}
    for key, kept in keeps.items():
        if kept == "momentum" or kept == "weights":
            for number, held in together.items():
                state_layouts[number][key] = StateLayout(
                    kept, held.momentum_storage if kept == "momentum" else held.storage
                )
            continue
        shapes, parts, buffers = {}, {}, dict[str, tuple[FlatShards, tuple[int, ...]]]()
        for number, held in together.items():
            layout = held.momentum_storage.layout
            shapes[number], parts[number] = companion_matrices(held.name, held.storage.shape, held.spec, kept)
            if isinstance(layout, FlatShards):
                buffers[str(number)] = layout, shapes[number]
        flat = companions_in_buffers(buffers)
        for number, held in together.items():
            layout = held.momentum_storage.layout
            if isinstance(layout, MeshLayout):
                place: MeshLayout | FlatShards = companion_on_mesh(layout, shapes[number])
            else:
                place = flat[str(number)]
            companion = Companion(key, kept, place, parts[number])
            state_layouts[number][key] = StateLayout(kept, held.momentum_storage.companion(place), companion)
    return state_layouts
