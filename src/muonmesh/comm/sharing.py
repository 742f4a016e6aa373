"""Sharing: lets the replicas of a parameter share its momentum, so that each keeps a part of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement as TorchPlacement
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard

from muonmesh.comm.placing import placements_of, root_of
from muonmesh.comm.storage import Storage, local_shape, this_rank
from muonmesh.comm.views import view_in_storage
from muonmesh.layout import MeshLayout
from muonmesh.layout.region import overlap


def sharded_over_replicas(storage: Storage, group: dist.ProcessGroup | None, device: str) -> Storage:
    """Return a storage in which each replica holds a part of the tensor instead of all of it.

    A rank holds a part of its elements in ``storage``, and no other elements. Each replicate axis now cuts a dim: the
    largest of the dims that no axis to its right cuts. If axes to its right cut every dim, it cuts one of these dims
    too, provided that all cuts are even. If this is not possible either, the axis stays replicated. An axis outside the
    tensor's mesh also stays replicated if its process group is unknown.

    Args:
        storage: The storage of the parameter.
        group: The process group of the ranks that hold a plain tensor whole.
        device: Device type for the mesh made of ``group``.
    """
    layout = storage.layout
    if not isinstance(layout, MeshLayout) or storage.copies == 1:
        return storage
    mesh, placements = storage.mesh, list(storage.placements)
    if mesh is None:
        if group is None:
            return storage
        mesh, placements = DeviceMesh.from_group(group, device), [TorchReplicate()]
    outside = len(layout.mesh) - mesh.ndim  # axes of copies that the tensor's own mesh does not have
    if outside:
        peers = sorted(layout.ranks[layout.ranks.index(this_rank()) % mesh.size() :: mesh.size()])
        groups = [g for g in (group, *root_of(mesh).get_all_groups()) if g is not None]
        if (other := next((g for g in groups if sorted(dist.get_process_group_ranks(g)) == peers), None)) is not None:
            grid = torch.tensor(layout.ranks, dtype=torch.int64, device="cpu").view(layout.mesh)
            groups, names = [other, *mesh.get_all_groups()], tuple(map(str, range(grid.ndim)))
            mesh = DeviceMesh.from_group(groups, device, mesh=grid, mesh_dim_names=names)
            placements, outside = [TorchReplicate(), *placements], 0
    for axis, placement in enumerate(placements):
        if isinstance(placement, TorchReplicate) and mesh.size(axis) > 1:
            placements[axis] = _shard_for(storage.shape, tuple(mesh.mesh.shape), placements, axis)
    translated = placements_of("", placements)
    layout = MeshLayout(storage.shape, layout.mesh, layout.ranks, (*layout.placements[:outside], *translated))
    return Storage(layout, storage.shape, mesh, tuple(placements))


def _shard_for(
    shape: tuple[int, ...], sizes: tuple[int, ...], placements: Sequence[TorchPlacement], axis: int
) -> TorchPlacement:
    """Return the placement by which a replicate axis cuts shared momentum, by the rule of `sharded_over_replicas`.

    Placements apply from left to right. If the axis cut a dim that an axis to its right cuts too, it would cut first,
    and the pieces of the other axis would differ from its pieces of the parameter. So this function cuts such a dim by
    a strided shard, as if the axis came last, and only if all cuts are even.
    """

    def cuts(dim: int, axes: range) -> list[int]:
        return [sizes[i] for i in axes if getattr(placements[i], "dim", None) == dim]

    before, right = range(axis), range(axis + 1, len(sizes))
    free = [dim for dim in range(len(shape)) if not cuts(dim, right)]
    if free:
        return TorchShard(max(free, key=lambda dim: shape[dim] // math.prod(cuts(dim, before))))
    strided = any(getattr(placement, "split_factor", None) is not None for placement in placements)
    for dim, size in enumerate(shape):
        later = math.prod(cuts(dim, right))
        if not strided and not cuts(dim, before) and size % (later * sizes[axis]) == 0:
            return _StridedShard(dim, split_factor=later)
    return placements[axis]


def restricted(local: Tensor, storage: Storage, momentum: Storage) -> Tensor:
    """Return the elements of a local tensor whose momentum this rank stores, in the order of the momentum.

    If replicas share the momentum (``shard_state``), each replica has the whole gradient of its shard and keeps the
    momentum of a part of this shard.

    Args:
        local: The gradient in the layout of ``storage``, contiguous.
        storage: The storage of the parameter.
        momentum: The storage of its momentum. On this rank its elements are a part of the elements of ``storage``.
    """
    assert storage.layout is not None
    assert momentum.layout is not None  # only AdamW steps parameters without a known layout
    values = torch.zeros(local_shape(momentum), dtype=local.dtype, device=local.device)
    for target in momentum.layout.blocks(this_rank()):
        for block in storage.layout.blocks(this_rank()):
            shared = overlap(block, target)  # ``matrix_*`` of this Piece are places in the momentum
            if shared is not None:
                into = values.as_strided(shared.shape, shared.matrix_strides, shared.matrix_start)
                into.copy_(view_in_storage(local, shared))
    return values
