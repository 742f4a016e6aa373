"""Published: reads layouts that other packages describe by attributes of their own. None of the packages is imported.

| package | a parameter is | attributes that describe the layout |
|---|---|---|
| veScale's RaggedShard | a DTensor | ``dims`` and ``local_units`` of the placement |
| FlexShard (torchtitan) | a plain tensor with ``_mesh`` and ``_placements`` | RaggedShard's, ``owner_rank`` or ``dim``
|
| Megatron-FSDP v1 | a DTensor with ``orig_param`` | ``orig_param._gbuf``: the start in a flat buffer |
| Megatron-FSDP v2 | a DTensor with ``_mfsdp_parameter_group`` | the group's ``main_weight.layout``: the same start |

Megatron-FSDP cuts whole buffers, so a rank seldom holds the rows of a parameter that its ``Shard(0)`` describes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate

from muonmesh.errors import LayoutError, explain_error
from muonmesh.layout import FlatShards, Interval, Layout, MeshLayout, Placement, Replicate, Shard

DECLARE = "Write Muon(..., layouts={name: muonmesh.FlatShards(...)}), which can say any cut of the flattened parameter"


def global_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of the whole parameter if the tensor knows it, else the tensor's own shape."""
    return tuple(getattr(tensor, "_global_shape", tensor.shape))


def published_mesh(tensor: Tensor) -> DeviceMesh | None:
    """Return the mesh of a DTensor, or of a plain tensor that FlexShard has marked."""
    if isinstance(tensor, DTensor):
        return tensor.device_mesh
    marked = hasattr(tensor, "_placements") and hasattr(tensor, "_global_shape")
    return getattr(tensor, "_mesh", None) if marked else None


def published(name: str, tensor: Tensor) -> Layout | None:
    """Return the layout of a tensor with placements that are not torch's; None for other tensors. No communication.

    Raises:
        LayoutError: a placement is unknown, cannot be combined with the tensor's other placements, or does not fit the
            mesh and the shape.
    """
    mesh = published_mesh(tensor)
    if mesh is None:
        return None
    placements: tuple[Any, ...] = getattr(tensor, "placements" if isinstance(tensor, DTensor) else "_placements")
    buffer = _buffer_of(tensor, mesh)
    if buffer is None and isinstance(tensor, DTensor) and not any(hasattr(each, "local_units") for each in placements):
        return None
    sizes, ranks = tuple(mesh.mesh.shape), tuple(int(rank) for rank in mesh.mesh.flatten().tolist())
    others = [_other(name, each, placements) for each in placements]
    cut = tuple(axis for axis, each in enumerate(others) if each is None)
    if buffer is not None:
        cut = tuple(axis for axis in buffer.axes if not isinstance(others[axis], Replicate))
    left = tuple(Replicate() if each is None or axis in cut else each for axis, each in enumerate(others))
    within = MeshLayout(global_shape(tensor), sizes, ranks, left)
    if not cut:
        return within
    held, sets = list[Interval](), dict[tuple[int, ...], list[int]]()
    for place, rank in enumerate(ranks):
        at = [place // math.prod(sizes[axis + 1 :]) % size for axis, size in enumerate(sizes)]
        kept = (at[axis] for axis, each in enumerate(others) if axis not in cut and isinstance(each, Replicate))
        sets.setdefault(tuple(kept), []).append(rank)
        if buffer is not None:
            held.append(buffer.part([(sizes[axis], at[axis]) for axis in reversed(cut)]))
        else:
            held.append(_of_units(name, placements[cut[0]], within.local_shape(rank), sizes[cut[0]], at[cut[0]]))
    return FlatShards(within, tuple((each,) for each in held), replicas=tuple(map(tuple, sets.values())))


def _other(name: str, placement: Any, placements: Sequence[Any]) -> Placement | None:
    """Translate a placement of a plain kind; return None for a placement that cuts the flattened tensor.

    Raises:
        LayoutError: the placement is unknown, or cuts a dim that a ragged placement cuts too.
    """
    dims = {dim for each in placements for dim in getattr(each, "dims", ())}
    split, dim = hasattr(placement, "split_factor"), getattr(placement, "dim", None)
    if not split and (hasattr(placement, "local_units") or hasattr(placement, "owner_rank")):
        return None
    if not split and isinstance(dim, int) and dim not in dims:
        return Shard(dim)
    if isinstance(placement, TorchReplicate):  # not is_replicate(), which ends the process in some other classes
        return Replicate()
    kind = type(placement)
    found = f"placement {placement!r} of {kind.__module__}.{kind.__qualname__} in {placements}"
    raise LayoutError(explain_error(name, found, "one that muonmesh knows, each of which cuts its own dims", DECLARE))


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


@dataclass(frozen=True)
class _Buffer:
    """The place of a parameter in a flat buffer that mesh axes cut evenly, the last axis first."""

    axes: tuple[int, ...]
    size: int
    whole: Interval

    def part(self, cuts: Sequence[tuple[int, int]]) -> Interval:
        """Return the interval of the parameter that a rank holds; ``cuts`` has (size, place) for each cutting axis."""
        low, size = 0, self.size
        for parts, place in cuts:
            size //= parts
            low += place * size
        return self.whole.part(low, low + size)._replace(start=0)


def _buffer_of(tensor: Any, mesh: DeviceMesh) -> _Buffer | None:
    group = getattr(tensor, "_mfsdp_parameter_group", lambda: None)()
    if group is not None:  # Megatron-FSDP v2
        layout = group.main_weight.layout
        index = next(i for i, each in enumerate(group.fsdp_parameters) if each.sharded is tensor)
        whole = Interval(0, math.prod(layout.tensor_shapes[index]), layout.tensor_to_offset[index])
        return _Buffer(tuple(range(mesh.ndim)), layout.size, whole)
    one: Any = getattr(tensor, "orig_param", None)
    if not hasattr(one, "_gbuf") or not hasattr(tensor, "megatron_fsdp_dist_index"):
        return None
    item, index = one._gbuf.item_index_map[one._item_id], tensor.megatron_fsdp_dist_index
    cutting = (index.dp_outer_dim, index.dp_shard_dim)
    axes = tuple(number for number, name in enumerate(mesh.mesh_dim_names or ()) if name in cutting)
    return _Buffer(axes, one._gbuf.bucket_index.size, Interval(0, item.size, item.global_data_index))
