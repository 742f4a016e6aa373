"""Ragged shards: reads the placements of torchtitan's FlexShard, and veScale's RaggedShard.

| framework | a parameter is | placements |
|---|---|---|
| veScale | a DTensor | RaggedShard: ``dims`` and ``local_units`` |
| FlexShard | a plain tensor with ``_mesh``, ``_placements``, ``_global_shape`` | the same, ``owner_rank``, ``dim`` |

A ragged shard is some units of the flattened tensor, as many for each rank as ``local_units`` says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from muonmesh.comm.layout_readers import DECLARE
from muonmesh.comm.placing import mesh_layout, placements_of
from muonmesh.errors import LayoutError, explain_error
from muonmesh.layout import FlatShards, Interval, Layout


def read_layout(name: str, tensor: Tensor) -> tuple[Any, ...] | Layout | None:
    """Return the layout of a parameter of FlexShard, or of a DTensor with a ragged placement; None for other tensors.

    Raises:
        LayoutError: two placements cut the flattened tensor or one dim, or the units do not fit mesh and shape.
    """
    sharded: Any = tensor
    if isinstance(tensor, DTensor):
        mesh, placements, shape = tensor.device_mesh, tensor.placements, tensor.shape
    elif hasattr(sharded, "_placements") and hasattr(sharded, "_global_shape"):
        mesh, placements, shape = sharded._mesh, sharded._placements, sharded._global_shape
    else:
        return None
    ragged = [axis for axis, p in enumerate(placements) if hasattr(p, "local_units") or hasattr(p, "owner_rank")]
    if not ragged:  # the core refuses the placements that it does not know
        return None if isinstance(tensor, DTensor) else (mesh, [*map(_of_torch, placements)], tuple(shape))
    ragged_placement = placements[ragged[0]]
    cut = set(getattr(ragged_placement, "dims", range(len(shape))))
    translated = [Replicate() if axis in ragged else _of_torch(p) for axis, p in enumerate(placements)]
    if len(ragged) > 1 or any(getattr(p, "dim", None) in cut or hasattr(p, "split_factor") for p in translated):
        needed = "one that cuts the flattened tensor, and others that cut whole dims that it leaves"
        raise LayoutError(explain_error(name, f"placements {tuple(placements)}", needed, DECLARE))
    within = mesh_layout(mesh, tuple(shape), placements_of(name, translated))
    size = within.mesh[ragged[0]]

    def intervals_of(rank: int, at: Sequence[int]) -> list[Interval]:
        return [_of_units(name, ragged_placement, within.local_shape(rank), size, at[ragged[0]])]

    return FlatShards.on_axes(within, ragged, intervals_of)


def _of_torch(placement: Any) -> Any:
    """Return torch's Shard for FlexShard's, which only has a ``dim``; any other placement unchanged."""
    plain = not hasattr(placement, "split_factor") and isinstance(getattr(placement, "dim", None), int)
    return Shard(placement.dim) if plain else placement


def _of_units(name: str, placement: Any, local: tuple[int, ...], size: int, at: int) -> Interval:
    """Return the interval of a flattened local tensor that coordinate ``at`` of a mesh axis holds.

    The placement gives each coordinate a number of units (``local_units``), or gives everything to ``owner_rank``.
    """
    owner = getattr(placement, "owner_rank", None)
    units = tuple(placement.local_units) if owner is None else tuple(int(index == owner) for index in range(size))
    inner = math.prod(local[len(placement.dims) :]) if owner is None else 1
    unit_size, rest = divmod(math.prod(local), sum(units) or 1)
    if len(units) != size or sum(units) < 1 or rest or any(unit * unit_size % (inner or 1) for unit in units):
        problem = f"placement {placement!r} on an axis of {size} ranks with {local} to cut"
        raise LayoutError(explain_error(name, problem, "a unit for each rank, each a whole part of the dims", DECLARE))
    return Interval(sum(units[:at]) * unit_size, units[at] * unit_size, 0)
