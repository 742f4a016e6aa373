"""Placing: finds which rank stores which part of a tensor. Only this module translates torch's placements."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Placement as TorchPlacement
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard

from muonmesh.comm.layout_readers import DECLARE, read_layout
from muonmesh.comm.storage import Storage, copied, local_of, this_rank, world_size
from muonmesh.errors import LayoutError, about, explain_error
from muonmesh.layout import Declared, FlatShards, Layout, MeshLayout, Placement, Replicate, Shard

OF_TORCH = (TorchReplicate, TorchShard, _StridedShard)


def spec_of(tensor: Tensor) -> DTensorSpec | None:
    """Return the mesh, placements and global shape of a DTensor, or of one that a wrapper holds by its local part.

    `DistributedDataParallel` with ``device_mesh=`` replaces the DTensors of tensor parallelism by plain parameters,
    which keep the spec in ``_st_info``, and makes DTensors of them in the forward. None for all other tensors.
    """
    spec: DTensorSpec | None = tensor._spec if isinstance(tensor, DTensor) else getattr(tensor, "_st_info", None)
    return spec


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
            problem, needed = f"placement {placement!r} in {tuple(placements)}", "Replicate, Shard or _StridedShard"
            if not isinstance(placement, TorchPartial):  # not is_partial(), which ends the process in some classes
                problem = f"{problem}, a {type(placement).__qualname__} of {type(placement).__module__}"
                raise LayoutError(explain_error(name, problem, f"{needed}, or a layout reader that knows it", DECLARE))
            write = "Write parameter.redistribute(placements=[Replicate()]) before you make the optimizer"
            raise LayoutError(explain_error(name, problem, f"{needed}: a partial value is not a parameter", write))
    return tuple(translated)


def storage_of(name: str, tensor: Tensor, replicas: Sequence[int] | None, declared: Declared | None = None) -> Storage:
    """Return the storage of a parameter; without a layout for a plain tensor with unknown ranks. No communication.

    Args:
        name: The parameter's name, for messages.
        tensor: The parameter. A DTensor has its own layout.
        replicas: Global ranks that each hold a plain tensor whole, or the same shard of a DTensor; None if unknown.
        declared: The parameter's entry in ``layouts=``; None if there is none.

    Raises:
        LayoutError: the tensor is partial, or does not fit its declared layout.
    """
    shape = tuple(tensor.shape)
    entry = read_layout(name, tensor) if declared is None else declared
    if isinstance(entry, (FlatShards, MeshLayout)):
        _check_local(name, tensor, entry, read=declared is None)
        if not isinstance(tensor, DTensor) or not all(
            isinstance(placement, OF_TORCH) for placement in tensor.placements
        ):
            return Storage(entry, entry.shape)  # state is plain: torch cannot copy DTensors of other placements
        return Storage(entry, entry.shape, tensor.device_mesh, tuple(tensor.placements))
    if entry is not None:
        if isinstance(tensor, DTensor):
            problem, write = "a DTensor with an entry in layouts=", "Remove the entry: a DTensor says where it lives"
            if declared is None:
                problem, write = (
                    "a DTensor with a mesh from its layout reader",
                    "Let the reader return None or a FlatShards",
                )
            raise LayoutError(explain_error(name, problem, "a plain local shard", write))
        return _declared(name, tensor, entry, "layouts entry" if declared is not None else "layout reader's answer")
    if (spec := spec_of(tensor)) is not None:
        mesh: DeviceMesh = spec.mesh
        layout = mesh_layout(mesh, tuple(spec.shape), placements_of(name, spec.placements))
        _check_local(name, tensor, layout)
        if replicas is not None and not set(replicas) <= set(layout.ranks):
            layout = _replicated_outside(name, layout, mesh, replicas)
        return Storage(layout, layout.shape, mesh, tuple(spec.placements))
    if replicas is not None:
        if len(replicas) > 1 and getattr(tensor, "tensor_model_parallel", False):
            text = "The attribute tensor_model_parallel=True says that this tensor is a shard, but process_group= "
            text += "says that every rank holds all of it. Write "
            text += "Muon(..., layouts=muonmesh.integrations.megatron.declared_layouts(...))"
            raise LayoutError(about(name, text))
        return Storage(MeshLayout.replicated(shape, tuple(replicas)), shape)
    return Storage(None if world_size() > 1 else MeshLayout.replicated(shape, (0,)), shape)


def nobody_said(name: str) -> LayoutError:
    """Return the error for a plain tensor whose ranks are unknown."""
    text = f"This parameter is a plain tensor while {world_size()} ranks run, and nothing says which ranks hold the "
    text += "same parameter. If the model was sharded after this optimizer was made, make the optimizer after it. "
    text += 'Under DDP, pass the wrapped model to from_model, or write process_group="world", as you do if your loop '
    text += "averages the gradients of all ranks. If every rank trains its own copy, write "
    text += (
        'process_group="local". If some ranks share it, pass their ProcessGroup. If it is a shard, make it a DTensor '
    )
    text += f"(fully_shard), or declare it: layouts={{{name!r}: (mesh, placements)}}. Leave out "
    text += "ZeroRedundancyOptimizer: ranks share the work, and "
    text += "with shard_state=True the state"
    return LayoutError(about(name, text))


def refuse_flattened(name: str, tensor: Tensor) -> None:
    """Refuse a parameter without a declared layout that FSDP1's wrapper has moved into a flat parameter.

    Raises:
        LayoutError: FSDP1 has flattened the parameter, and several ranks run.
    """
    if world_size() > 1 and getattr(tensor, "_fsdp_flattened", False):  # as torch.distributed.fsdp marks them
        text = "FSDP1 (FullyShardedDataParallel) has flattened this parameter, and nothing says which elements each "
        text += "rank holds. Shard with fully_shard instead. Or call groups = split_params(model), then wrap the model "
        text += "with use_orig_params=True, then write "
        text += "Muon(groups, layouts=muonmesh.integrations.fsdp1.declared_layouts(model))"
        raise LayoutError(about(name, text))


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
    spec = spec_of(tensor)
    return tuple(replicas or ()) if spec is None else _ranks(spec.mesh)


def shape_if_known(name: str, tensor: Tensor) -> tuple[int, ...] | None:
    """Return the global shape of a tensor without an entry in ``layouts=``; None if only the first step knows it.

    Raises:
        LayoutError: a layout reader raises an error.
    """
    entry = None if isinstance(tensor, DTensor) else read_layout(name, tensor)
    if entry is None:
        return tuple((spec_of(tensor) or tensor).shape)
    if isinstance(entry, (FlatShards, MeshLayout)):
        return entry.shape
    return tuple(entry[2]) if isinstance(entry, tuple) and len(entry) == 3 else None


def mesh_layout(mesh: DeviceMesh, shape: tuple[int, ...], placements: tuple[Placement, ...]) -> MeshLayout:
    """Return the layout of a tensor of global ``shape`` on the ranks of a mesh."""
    return MeshLayout(shape, tuple(mesh.mesh.shape), _ranks(mesh), placements)


def _ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(int(rank) for rank in mesh.mesh.flatten().tolist())


def _declared(name: str, tensor: Tensor, declared: Any, source: str) -> Storage:
    """Return the storage of a plain local shard declared as (mesh, placements) or (mesh, placements, shape)."""
    fits = isinstance(declared, (tuple, list)) and len(declared) in (2, 3) and isinstance(declared[0], DeviceMesh)
    placements = declared[1] if fits and isinstance(declared[1], (tuple, list)) else None
    if placements is None or not all(isinstance(placement, TorchPlacement) for placement in placements):
        problem = f"{source} {declared!r}"
        needed = "(mesh, placements), (mesh, placements, global shape), a FlatShards, or a list of FlatParameter"
        write = "Write (init_device_mesh('cuda', (8,)), [Shard(0)])"
        raise LayoutError(explain_error(name, problem, needed, write))
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
        raise LayoutError(about(f"{name}: {source}", error)) from None
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
    problem = f"a local tensor of shape {tuple(local.shape)} on rank {rank}"
    needed = f"{expected} by its placements or its entry in layouts= ({layout.describe()} of {layout.shape})"
    raise LayoutError(explain_error(name, problem, needed, write))


def _replicated_outside(name: str, layout: MeshLayout, mesh: DeviceMesh, replicas: Sequence[int]) -> MeshLayout:
    """Return a DTensor's layout with a replicate axis in front, for replicas outside its mesh (``process_group=``).

    With "world", the other copies are on the other slices of the mesh from which this mesh was sliced. A ProcessGroup
    has the peers of this rank; the peers of each other rank have the same distances from it, as in every grid of ranks.
    """
    me, ranks = this_rank(), layout.ranks
    copies: list[tuple[int, ...]] = []
    if len(replicas) == world_size():
        root = root_of(mesh)
        names, mesh_names = root.mesh_dim_names or (), mesh.mesh_dim_names or ()
        if mesh_names and set(mesh_names) <= set(names) and root.mesh.numel() == world_size():
            inside = [names.index(axis) for axis in mesh_names]
            outside = [axis for axis in range(root.ndim) if axis not in inside]
            grid = root.mesh.permute(*outside, *inside).reshape(-1, len(ranks))
            copies = [tuple(row) for row in grid.tolist()]
    elif me in ranks and me in replicas:
        copies = [tuple(rank + peer - me for rank in ranks) for peer in replicas]
    everyone = [rank for copy in copies for rank in copy]
    if ranks not in copies or len(set(everyone)) < len(everyone) or not set(everyone) <= set(range(world_size())):
        text = f"This DTensor lives on the ranks {ranks}, and process_group= has the ranks {tuple(replicas)}. These "
        text += "form no regular grid, so nothing says which ranks hold the same shards. Slice the DTensor's mesh from "
        text += "one mesh of all ranks with named dims, put the replicate axis into the mesh (HSDP), or pass the "
        text += "ProcessGroup of this rank's replicas"
        raise LayoutError(about(name, text))
    return copied(layout, copies)


def root_of(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh from which a mesh was sliced, or the mesh itself if it is no slice."""
    root: DeviceMesh = getattr(mesh, "_get_root_mesh", lambda: mesh)()  # newer than torch 2.11
    return root
