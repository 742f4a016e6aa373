"""Storage: finds which rank stores which part of a tensor. Only this module translates torch's placements."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Placement as TorchPlacement
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from muonmesh.comm.layout_readers import DECLARE, read_layout
from muonmesh.errors import LayoutError, about, explain_error
from muonmesh.layout import Declared, FlatShards, Layout, MeshLayout, Placement, Replicate, Shard
from muonmesh.layout.region import row_major

OF_TORCH = (TorchReplicate, TorchShard, _StridedShard)
PLAIN = (Tensor, nn.Parameter)
"""Types of tensors that are no DTensors; comparing types is quicker than `isinstance`."""


def local_of(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank stores, without communication; shares memory."""
    if type(tensor) in PLAIN or not isinstance(tensor, DTensor):
        return tensor
    local: Tensor = tensor._local_tensor
    return local


def is_freed(local: Tensor) -> bool:
    """Return whether the memory of a dense local tensor is smaller than its elements need, so that it was freed."""
    if local.is_meta or not local.numel():
        return False
    if local.is_contiguous():
        last = local.numel() - 1
    else:
        last = sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
    return local.untyped_storage().nbytes() < (local.storage_offset() + last + 1) * local.itemsize


def placements_of(name: str, placements: Sequence[TorchPlacement]) -> tuple[Placement, ...]:
    """Translate torch's placements.

    Raises:
        LayoutError: a placement is partial or unknown. A subclass of torch's is unknown: it may cut otherwise.
    """
    translated: list[Placement] = []
    for placement in placements:
        if type(placement) is TorchReplicate:
            translated.append(Replicate())
        elif type(placement) is TorchShard or type(placement) is _StridedShard:
            translated.append(Shard(placement.dim, getattr(placement, "split_factor", 1)))
        else:
            found, needed = f"placement {placement!r} in {tuple(placements)}", "Replicate, Shard or _StridedShard"
            if not isinstance(placement, TorchPartial):  # not is_partial(), which ends the process in some classes
                found = f"{found}, a {type(placement).__qualname__} of {type(placement).__module__}"
                raise LayoutError(explain_error(name, found, f"{needed}, or a layout reader that knows it", DECLARE))
            write = "Write parameter.redistribute(placements=[Replicate()]) before you make the optimizer"
            raise LayoutError(explain_error(name, found, f"{needed}: a partial value is not a parameter", write))
    return tuple(translated)


@dataclass(frozen=True)
class Storage:
    """The layout, global shape, mesh and placements of a parameter or of a tensor of its state.

    Attributes:
        layout: The part that each rank stores; None for a plain tensor of AdamW whose ranks are unknown.
        shape: Global shape.
        mesh: Mesh of a DTensor or of a declared shard; None for a plain or a flat tensor.
        placements: Torch's placements on this mesh.
    """

    layout: Layout | None
    shape: tuple[int, ...]
    mesh: DeviceMesh | None = None
    placements: tuple[TorchPlacement, ...] = ()

    def wrap(self, local: Tensor) -> Tensor:
        """Return a local tensor as a DTensor with this layout if there is a mesh, else unchanged."""
        if self.mesh is None:
            return local
        # Not by from_local, which would move state in CPU memory to the device.
        meta = TensorMeta(torch.Size(self.shape), row_major(self.shape), local.dtype)
        spec = DTensorSpec(self.mesh, self.placements, tensor_meta=meta)
        return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]

    def copied(self, copies: Sequence[tuple[int, ...]]) -> Storage:
        """Return this storage with several copies of the parameter, each on its own ranks and with this layout."""
        inner = self.layout
        if not isinstance(inner, MeshLayout) or len(copies[0]) == 1:
            inner = MeshLayout(self.shape, (), copies[0], ())
        return replace(self, layout=_copied(inner, copies))

    def companion(self, layout: Layout) -> Storage:
        """Return the Storage of a companion (`muonmesh.layout.companion`) of the parameter with this storage."""
        return Storage(layout, layout.shape, self.mesh, self.placements)

    @property
    def copies(self) -> int:
        """The number of ranks that hold each element, as far as muonmesh knows."""
        return 1 if self.layout is None else self.layout.copies()

    @property
    def replicated(self) -> bool:
        """Whether several ranks are known to hold the tensor, and each of them all of it."""
        return self.layout is not None and self.layout.copies() == len(self.layout.ranks) > 1

    def parts(self, local: Tensor) -> Sequence[Tensor]:
        """Return the stored elements that belong to the parameter, without a flat buffer's neighbors and padding."""
        if not isinstance(self.layout, FlatShards):
            return (local,)
        flat = local.reshape(-1)
        return [flat[start : start + length] for _, length, start in self.layout.held(this_rank())]


def local_shape(storage: Storage) -> tuple[int, ...]:
    """Return the shape of this rank's local tensor, by the layout of its storage."""
    assert storage.layout is not None
    return storage.layout.local_shape(this_rank())


def local_part(whole: Tensor, layout: Layout) -> Tensor:
    """Return this rank's part of a whole tensor in memory of its own, with zeros outside the layout's blocks."""
    local = whole.new_zeros(layout.local_shape(this_rank()))
    for block in layout.blocks(this_rank()):
        region = block.region
        box = tuple(slice(low, low + size) for low, size in zip(region.offset, region.shape, strict=True))
        local.as_strided(region.shape, block.strides, block.start).copy_(whole[box])
    return local


def storage_of(
    name: str, tensor: Tensor, replicas: Sequence[int] | None, declared: Declared | None = None, *, needed: bool = True
) -> Storage:
    """Return the storage of a parameter. No communication.

    Args:
        name: The parameter's name, for messages.
        tensor: The parameter. A DTensor has its own layout.
        replicas: Global ranks that each hold a plain tensor whole, or the same shard of a DTensor; None if unknown.
        declared: The parameter's entry in ``layouts=``; None if there is none.
        needed: Whether a plain tensor with unknown ranks is an error.

    Raises:
        LayoutError: the tensor is partial, does not fit its declared layout, or is a plain tensor with unknown ranks
            while several ranks run.
    """
    shape = tuple(tensor.shape)
    entry = read_layout(name, tensor) if declared is None else declared
    if isinstance(entry, (FlatShards, MeshLayout)):
        _check_local(name, tensor, entry, read=declared is None)
        if not isinstance(tensor, DTensor) or not all(isinstance(each, OF_TORCH) for each in tensor.placements):
            return Storage(entry, entry.shape)  # state is plain: torch cannot copy DTensors of other placements
        return Storage(entry, entry.shape, tensor.device_mesh, tuple(tensor.placements))
    if entry is not None:
        if isinstance(tensor, DTensor):
            found, write = "a DTensor with an entry in layouts=", "Remove the entry: a DTensor says where it lives"
            if declared is None:
                found, write = (
                    "a DTensor with a mesh from its layout reader",
                    "Let the reader return None or a FlatShards",
                )
            raise LayoutError(explain_error(name, found, "a plain local shard", write))
        return _declared(name, tensor, entry, "layouts entry" if declared is not None else "layout reader's answer")
    if isinstance(tensor, DTensor):
        mesh: DeviceMesh = tensor.device_mesh
        layout = mesh_layout(mesh, shape, placements_of(name, tensor.placements))
        _check_local(name, tensor, layout)
        if replicas is not None and not set(replicas) <= set(layout.ranks):
            layout = _replicated_outside(name, layout, mesh, replicas)
        return Storage(layout, shape, mesh, tuple(tensor.placements))
    if replicas is not None:
        if len(replicas) > 1 and getattr(tensor, "tensor_model_parallel", False):
            what = "The attribute tensor_model_parallel=True says that this tensor is a shard, but process_group= "
            what += "says that every rank holds all of it. Write "
            what += "Muon(..., layouts=muonmesh.integrations.megatron.declared_layouts(...))"
            raise LayoutError(about(name, what))
        return Storage(MeshLayout.replicated(shape, tuple(replicas)), shape)
    if world_size() > 1:
        if not needed:
            return Storage(None, shape)
        raise nobody_said(name)
    return Storage(MeshLayout.replicated(shape, (0,)), shape)


def nobody_said(name: str) -> LayoutError:
    """Return the error for a plain tensor whose ranks are unknown."""
    what = f"This parameter is a plain tensor while {world_size()} ranks run, and nothing says which ranks hold the "
    what += "same parameter. If the model was sharded after this optimizer was made, make the optimizer after it. "
    what += "Under DDP, or if your loop averages the gradients of all ranks, write "
    what += 'Muon(..., process_group="world"). If every rank trains its own copy, write process_group="local". If some '
    what += "ranks share it, pass their ProcessGroup. If it is a shard, make it a DTensor (fully_shard), or declare "
    what += (
        f"it: layouts={{{name!r}: (mesh, placements)}}. Leave out ZeroRedundancyOptimizer: ranks share the work, and "
    )
    what += "with shard_state=True the state"
    return LayoutError(about(name, what))


def refuse_flattened(name: str, tensor: Tensor) -> None:
    """Refuse a parameter without a declared layout that FSDP1's wrapper has moved into a flat parameter.

    Raises:
        LayoutError: FSDP1 has flattened the parameter, and several ranks run.
    """
    if world_size() > 1 and getattr(tensor, "_fsdp_flattened", False):  # as torch.distributed.fsdp marks them
        what = "FSDP1 (FullyShardedDataParallel) has flattened this parameter, and nothing says which elements each "
        what += "rank holds. Shard with fully_shard instead. Or call groups = split_params(model), then wrap the model "
        what += "with use_orig_params=True, then write "
        what += "Muon(groups, layouts=muonmesh.integrations.fsdp1.declared_layouts(model))"
        raise LayoutError(about(name, what))


def ranks_of(
    name: str, tensor: Tensor, replicas: Sequence[int] | None, declared: Declared | None = None
) -> tuple[int, ...]:
    """Return the ranks that share a parameter whose layout has an error, as far as they are known."""
    entry: Any = declared
    if declared is None and not isinstance(tensor, DTensor):
        with suppress(LayoutError):
            entry = read_layout(name, tensor)
    if isinstance(entry, (FlatShards, MeshLayout)):
        return entry.ranks
    if isinstance(entry, (tuple, list)) and entry and isinstance(entry[0], DeviceMesh):
        return _ranks(entry[0])
    return _ranks(tensor.device_mesh) if isinstance(tensor, DTensor) else tuple(replicas or ())


def shape_if_known(name: str, tensor: Tensor) -> tuple[int, ...] | None:
    """Return the global shape of a tensor without an entry in ``layouts=``; None if only the first step knows it.

    Raises:
        LayoutError: a layout reader raises an error.
    """
    entry = None if isinstance(tensor, DTensor) else read_layout(name, tensor)
    if entry is None:
        return tuple(tensor.shape)
    if isinstance(entry, (FlatShards, MeshLayout)):
        return entry.shape
    return tuple(entry[2]) if isinstance(entry, tuple) and len(entry) == 3 else None


def mesh_layout(mesh: DeviceMesh, shape: tuple[int, ...], placements: tuple[Placement, ...]) -> MeshLayout:
    """Return the layout of a tensor of global ``shape`` on the ranks of a mesh."""
    return MeshLayout(shape, tuple(mesh.mesh.shape), _ranks(mesh), placements)


def _ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(int(rank) for rank in mesh.mesh.flatten().tolist())


def _declared(name: str, tensor: Tensor, declared: Any, what: str) -> Storage:
    """Return the storage of a plain local shard declared as (mesh, placements) or (mesh, placements, shape)."""
    fits = isinstance(declared, (tuple, list)) and len(declared) in (2, 3) and isinstance(declared[0], DeviceMesh)
    placements = declared[1] if fits and isinstance(declared[1], (tuple, list)) else None
    if placements is None or not all(isinstance(placement, TorchPlacement) for placement in placements):
        found = f"{what} {declared!r}"
        needed = "(mesh, placements), (mesh, placements, global shape), a FlatShards, or a list of FlatParameter"
        write = "Write (init_device_mesh('cuda', (8,)), [Shard(0)])"
        raise LayoutError(explain_error(name, found, needed, write))
    mesh = declared[0]
    translated = placements_of(name, placements)
    shape = list(tensor.shape)
    if len(declared) == 3:
        shape = [int(size) for size in declared[2]]
    elif len(translated) == mesh.ndim:
        for size, placement in zip(mesh.mesh.shape, translated, strict=True):
            if not isinstance(placement, Replicate) and placement.dim < len(shape):
                shape[placement.dim] *= size
    try:
        layout = mesh_layout(mesh, tuple(shape), translated)
    except LayoutError as error:
        raise LayoutError(about(f"{name}: {what}", error)) from None
    _check_local(name, tensor, layout)
    return Storage(layout, layout.shape, mesh, tuple(placements))


def _check_local(name: str, tensor: Tensor, layout: Layout, *, read: bool = False) -> None:
    rank, local = this_rank(), local_of(tensor)
    expected = layout.local_shape(rank) if rank in layout.ranks else None
    if expected == tuple(local.shape) or (expected is None and isinstance(tensor, DTensor)):
        return
    write = "Correct the entry; where shards are uneven write (mesh, placements, global shape)"
    if read or isinstance(tensor, DTensor):
        # Such local tensors keep their inner dims; a tensor without elements may have any shape.
        if isinstance(layout, FlatShards) and expected == (local.numel(),):
            return
        write = DECLARE
    found = f"a local tensor of shape {tuple(local.shape)} on rank {rank}"
    needed = f"{expected} by its placements or its entry in layouts= ({layout.describe()} of {layout.shape})"
    raise LayoutError(explain_error(name, found, needed, write))


def _replicated_outside(name: str, layout: MeshLayout, mesh: DeviceMesh, replicas: Sequence[int]) -> MeshLayout:
    """Return a DTensor's layout with a replicate axis in front, for replicas outside its mesh (``process_group=``).

    With "world", the other copies are on the other slices of the mesh from which this mesh was sliced. A ProcessGroup
    has the peers of this rank; the peers of each other rank have the same distances from it, as in every grid of ranks.
    """
    me, ranks = this_rank(), layout.ranks
    copies: list[tuple[int, ...]] = []
    if len(replicas) == world_size():
        root = _root_of(mesh)
        names, wanted = root.mesh_dim_names or (), mesh.mesh_dim_names or ()
        if wanted and set(wanted) <= set(names) and root.mesh.numel() == world_size():
            inside = [names.index(axis) for axis in wanted]
            outside = [axis for axis in range(root.ndim) if axis not in inside]
            grid = root.mesh.permute(*outside, *inside).reshape(-1, len(ranks))
            copies = [tuple(row) for row in grid.tolist()]
    elif me in ranks and me in replicas:
        copies = [tuple(rank + peer - me for rank in ranks) for peer in replicas]
    everyone = [rank for copy in copies for rank in copy]
    if ranks not in copies or len(set(everyone)) < len(everyone) or not set(everyone) <= set(range(world_size())):
        what = f"This DTensor lives on the ranks {ranks}, and process_group= has the ranks {tuple(replicas)}. These "
        what += "form no regular grid, so nothing says which ranks hold the same shards. Slice the DTensor's mesh from "
        what += "one mesh of all ranks with named dims, put the replicate axis into the mesh (HSDP), or pass the "
        what += "ProcessGroup of this rank's replicas"
        raise LayoutError(about(name, what))
    return _copied(layout, copies)


def _copied(layout: MeshLayout, copies: Sequence[tuple[int, ...]]) -> MeshLayout:
    everyone = tuple(rank for copy in copies for rank in copy)
    return MeshLayout(layout.shape, (len(copies), *layout.mesh), everyone, (Replicate(), *layout.placements))


def _root_of(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh from which a mesh was sliced, or the mesh itself if it is no slice."""
    root: DeviceMesh = getattr(mesh, "_get_root_mesh", lambda: mesh)()  # newer than torch 2.11
    return root


def world_size() -> int:
    """Return the number of ranks, 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def this_rank() -> int:
    """Return this process's global rank, 0 without torch.distributed."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def ranks_of_a_machine() -> int:
    """Return the number of ranks of each machine according to the launcher; 0 if it is unknown.

    torchrun sets ``LOCAL_WORLD_SIZE`` and ``LOCAL_RANK``. The result is 0 unless ranks are numbered machine by machine.
    """
    size, rank = os.environ.get("LOCAL_WORLD_SIZE", "0"), this_rank()
    count = int(size) if size.isdecimal() else 0
    return count if count and os.environ.get("LOCAL_RANK", str(rank % count)) == str(rank % count) else 0


def device_without_parameters() -> torch.device:
    """Return the device that a rank without parameters uses in collectives.

    The result is its accelerator if the ranks have a backend for it other than gloo, else the CPU.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True) if world_size() > 1 else None
    if accelerator is not None:
        backends = dict(each.split(":", 1) for each in dist.get_backend_config().split(","))
        if backends.get(accelerator.type, "gloo") != "gloo":
            return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return torch.device("cpu")


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
        known = [g for g in (group, *_root_of(mesh).get_all_groups()) if g is not None]
        if (other := next((g for g in known if sorted(dist.get_process_group_ranks(g)) == peers), None)) is not None:
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

    left, right = range(axis), range(axis + 1, len(sizes))
    free = [dim for dim in range(len(shape)) if not cuts(dim, right)]
    if free:
        return TorchShard(max(free, key=lambda dim: shape[dim] // math.prod(cuts(dim, left))))
    strided = any(getattr(placement, "split_factor", None) is not None for placement in placements)
    for dim, size in enumerate(shape):
        later = math.prod(cuts(dim, right))
        if not strided and not cuts(dim, left) and size % (later * sizes[axis]) == 0:
            return _StridedShard(dim, split_factor=later)
    return placements[axis]


def connected_ranks(storages: Sequence[Storage]) -> tuple[int, ...]:
    """Return the ranks that hold any of these parameters, and this rank, in order."""
    ranks = {this_rank()}
    for layout in {id(storage.layout): storage.layout for storage in storages}.values():
        ranks.update(layout.ranks if layout is not None else ())
    return tuple(sorted(ranks))


def mesh_groups(storages: Sequence[Storage]) -> list[dist.ProcessGroup]:
    """Return the process groups of the one-dimensional meshes that hold any of the parameters."""
    meshes = {id(storage.mesh): storage.mesh for storage in storages}
    return [mesh.get_group() for mesh in meshes.values() if mesh is not None and mesh.ndim == 1]
