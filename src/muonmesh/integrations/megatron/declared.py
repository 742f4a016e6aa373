"""Declared layouts: turns the parameter attributes of Megatron-Core and Transformer Engine into DTensor placements.

The parameters of these libraries are plain local shards. `declared_layouts` returns their layouts for
``Muon(..., layouts=...)``. It imports neither library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from muonmesh.errors import LayoutError, explain_error
from muonmesh.names import canonical_name


def declared_layouts(
    named_parameters: Iterable[tuple[str, Tensor]],
    *,
    tensor_parallel: dist.ProcessGroup | None,
    data_parallel: dist.ProcessGroup | None,
    expert_tensor_parallel: dist.ProcessGroup | None = None,
    expert_data_parallel: dist.ProcessGroup | None = None,
) -> dict[str, tuple[DeviceMesh, tuple[Placement, ...]]]:
    """Return the layouts of Megatron-Core's and Transformer Engine's parameters, for ``Muon(..., layouts=...)``.

    The function reads these attributes of a parameter: ``tensor_model_parallel`` (whether it is a shard),
    ``partition_dim`` (the sharded dim; -1 is none), ``partition_stride`` (the number of pieces, such as gate and up, in
    each shard) or ``partition_sizes`` (the sizes of the pieces), and ``allreduce`` (False on experts, which have other
    groups). Attributes may be wrong: Transformer Engine marks every linear weight as a shard, and fused gate and up as
    one piece. Correct their entries in the result. No communication.

    Args:
        named_parameters: Names, canonical or not, and local tensors, as from ``model.named_parameters()``. DTensors
            are left out, since they have their own placements.
        tensor_parallel: The ranks that share a weight. If the attributes mark a shard, each of them holds a shard.
        data_parallel: The ranks that hold copies: the group over which gradients are averaged. With context
            parallelism, pass the group of data and context parallelism together.
        expert_tensor_parallel: As ``tensor_parallel``, for experts. Required if the model has experts; if only one
            rank has them, pass a group of one rank.
        expert_data_parallel: As ``data_parallel``, for experts. Required likewise.

    Returns:
        For each canonical name: the mesh, with the dims (data, tensor) or only one of them if one group was given, and
        a placement for each of its dims. Empty without torch.distributed, or if both groups are None.

    Raises:
        LayoutError: the attributes do not fit the shape or the groups; two parameters have the same name; this rank is
            not in a group; or the two groups do not determine the mesh.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    named = _by_canonical_name(named_parameters)
    mesh_for = mesh_finder((data_parallel, tensor_parallel), (expert_data_parallel, expert_tensor_parallel))
    layouts: dict[str, tuple[DeviceMesh, tuple[Placement, ...]]] = {}
    for name, parameter in named.items():
        if isinstance(parameter, DTensor) or (mesh := mesh_for(name, parameter)) is None:
            continue
        if getattr(parameter, "is_gtp_weight_remat", False):
            problem, needed = "is_gtp_weight_remat=True", "shards over tensor_parallel alone, which placements can say"
            raise LayoutError(explain_error(name, problem, needed, "Set gtp_weight_remat_size=1"))
        placements: list[Placement] = [Replicate()] * mesh.ndim
        if mesh.mesh_dim_names != ("data",) and mesh.size(-1) > 1:
            placements[-1] = _stamped_placement(name, parameter)
        layouts[name] = mesh, tuple(placements)
    return layouts


def _by_canonical_name(named_parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    for name, parameter in named_parameters:
        if named.setdefault(canonical_name(name), parameter) is not parameter:
            problem, needed = "two parameters of this name", "one; the chunks of a virtual pipeline repeat their names"
            write = "Write (f'{i}.{name}', parameter) for chunk i, here and in the param groups"
            raise LayoutError(explain_error(canonical_name(name), problem, needed, write))
    return named


def _stamped_placement(name: str, parameter: Tensor) -> Placement:
    """Return the placement over the tensor-parallel ranks, from the attributes of a parameter.

    Raises:
        LayoutError: the attributes do not fit the shape, or the pieces of a shard have different sizes, for which
            DTensor has no placement.
    """
    dim, shape = int(getattr(parameter, "partition_dim", -1)), tuple(parameter.shape)
    # Replicated weights may have a partition_dim too (Megatron-LM #7395), so tensor_model_parallel decides.
    if not getattr(parameter, "tensor_model_parallel", False) or dim == -1:
        return Replicate()
    stride, sizes = int(getattr(parameter, "partition_stride", 1)), getattr(parameter, "partition_sizes", None)
    pieces = stride if sizes is None else len(sizes)
    if not 0 <= dim < len(shape) or pieces < 1 or shape[dim] % pieces or len(set(sizes or ())) > 1:
        problem = f"partition_dim={dim}, partition_stride={stride}, partition_sizes={sizes} of a shard of shape {shape}"
        needed, write = "one of its dims, in pieces of one size", "Correct them, or declare its layout yourself"
        raise LayoutError(explain_error(name, problem, needed, write))
    return Shard(dim) if pieces == 1 else _StridedShard(dim, split_factor=pieces)


Groups = tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]
"""The data-parallel and the tensor-parallel ranks of a weight, see `declared_layouts`."""


def mesh_finder(dense: Groups, experts: Groups) -> Callable[[str, Tensor], DeviceMesh | None]:
    """Return a function of name and parameter that returns the mesh of the ranks that hold the parameter's elements.

    The function returns None if both groups are None. Parameters with the same ranks get the same mesh.

    Args:
        dense: The groups of dense weights.
        experts: The groups of experts; an entry is None if the group is not known.

    Raises:
        LayoutError: there are experts, and one of their groups is None.
    """
    meshes: dict[tuple[bool, str], DeviceMesh | None] = {}

    def find(name: str, parameter: Tensor) -> DeviceMesh | None:
        expert = not getattr(parameter, "allreduce", True)
        if expert and None in experts:
            problem, needed = "allreduce=False, which marks experts", "the groups of the ranks that hold them"
            write = "Write declared_layouts(..., expert_tensor_parallel=..., expert_data_parallel=...), a group of one "
            write += "rank where nothing is shared, or a pg_collection with expt_tp and expt_dp"
            raise LayoutError(explain_error(name, problem, needed, write))
        key = expert, parameter.device.type
        if key not in meshes:
            meshes[key] = _mesh_of(*(experts if expert else dense), parameter.device.type)
        return meshes[key]

    return find


def _mesh_of(data: dist.ProcessGroup | None, tensor: dist.ProcessGroup | None, device_type: str) -> DeviceMesh | None:
    """Return the mesh (data, tensor), or a mesh of one dim if only one group was given; None if none was given.

    It makes no process group, and there is no communication.

    Raises:
        LayoutError: this rank is in no given group, or the groups form no regular grid.
    """
    groups_by_name = {name: group for name, group in (("data", data), ("tensor", tensor)) if group is not None}
    ranks = {name: _ranks(name, group) for name, group in groups_by_name.items()}
    groups, names = list(groups_by_name.values()), tuple(groups_by_name)
    if len(groups) < 2:
        return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=names) if groups else None
    grid = torch.tensor(_grid(ranks["data"], ranks["tensor"]), dtype=torch.int64, device="cpu")
    return DeviceMesh.from_group(groups, device_type, mesh=grid, mesh_dim_names=names)


def _ranks(name: str, group: dist.ProcessGroup) -> list[int]:
    """Return the global ranks of a group, in its order.

    Raises:
        LayoutError: this rank is not in the group.
    """
    # torch gives a rank that is not in a new group a placeholder instead of the group.
    ranks = dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else []
    if dist.get_rank() not in ranks:
        problem = f"a group of ranks {ranks} on rank {dist.get_rank()}"
        write = f"Pass the {name}-parallel group that this rank is in"
        raise LayoutError(explain_error(f"{name}_parallel", problem, "a group that holds this rank", write))
    return ranks


def _grid(data: list[int], tensor: list[int]) -> list[list[int]]:
    """Return the ranks of the mesh, data × tensor, from this rank's column (``data``) and row (``tensor``).

    Megatron-Core and Transformer Engine number ranks regularly, so every row of the grid is another row plus a
    constant. To ask the other ranks instead would need a collective.

    Raises:
        LayoutError: the grid has a rank twice, or a rank that does not exist.
    """
    rank_here = dist.get_rank()
    grid = [[row + column - rank_here for column in tensor] for row in data]
    ranks = sorted(rank for row in grid for rank in row)
    if len(set(ranks)) < len(ranks) or not 0 <= ranks[0] <= ranks[-1] < dist.get_world_size():
        problem = f"data-parallel ranks {data} and tensor-parallel ranks {tensor} on rank {rank_here}"
        needed = "groups of a regular grid, to know the ranks that are in neither"
        write = "Make a DeviceMesh of all the ranks and write Muon(..., layouts={name: (mesh, placements)})"
        raise LayoutError(explain_error("declared_layouts", problem, needed, write))
    return grid
