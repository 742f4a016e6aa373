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
    given: Any = tensor
    if isinstance(tensor, DTensor):
        mesh, placements, shape = tensor.device_mesh, tensor.placements, tensor.shape
    elif hasattr(given, "_placements") and hasattr(given, "_global_shape"):
        mesh, placements, shape = given._mesh, given._placements, given._global_shape
    else:
        return None
    ragged = [
        axis for axis, each in enumerate(placements) if hasattr(each, "local_units") or hasattr(each, "owner_rank")
    ]
    if not ragged:  # the core refuses the placements that it does not know
        return None if isinstance(tensor, DTensor) else (mesh, [*map(_of_torch, placements)], tuple(shape))
    one = placements[ragged[0]]
    cut = set(getattr(one, "dims", range(len(shape))))
    left = [Replicate() if axis in ragged else _of_torch(each) for axis, each in enumerate(placements)]
    if len(ragged) > 1 or any(getattr(each, "dim", None) in cut or hasattr(each, "split_factor") for each in left):
        needed = "one that cuts the flattened tensor, and others that cut whole dims that it leaves"
        raise LayoutError(explain_error(name, f"placements {tuple(placements)}", needed, DECLARE))
    within = mesh_layout(mesh, tuple(shape), placements_of(name, left))
    size = within.mesh[ragged[0]]

    def held(rank: int, at: Sequence[int]) -> list[Interval]:
        return [_of_units(name, one, within.local_shape(rank), size, at[ragged[0]])]

    return FlatShards.on_axes(within, ragged, held)


def _of_torch(placement: Any) -> Any:
    """Return torch's Shard for FlexShard's, which only has a ``dim``; any other placement unchanged."""
    plain = not hasattr(placement, "split_factor") and isinstance(getattr(placement, "dim", None), int)
    return Shard(placement.dim) if plain else placement


def _of_units(name: str, placement: Any, local: tuple[int, ...], size: int, at: int) -> Interval:
    """Return the interval of a flattened local tensor that coordinate ``at`` of a mesh axis holds.

    The placement gives each coordinate a number of units (``local_units``), or gives everything to ``owner_rank``.
    """
    owner = getattr(placement, "owner_rank", None)
    units = tuple(placement.local_units) if owner is None else tuple(int(place == owner) for place in range(size))
    inner = math.prod(local[len(placement.dims) :]) if owner is None else 1
    each, rest = divmod(math.prod(local), sum(units) or 1)
    if len(units) != size or sum(units) < 1 or rest or any(unit * each % (inner or 1) for unit in units):
        found = f"placement {placement!r} on an axis of {size} ranks with {local} to cut"
        raise LayoutError(explain_error(name, found, "a unit for each rank, each a whole part of the dims", DECLARE))
    return Interval(sum(units[:at]) * each, units[at] * each, 0)
