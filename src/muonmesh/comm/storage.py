"""Storage: what a tensor says about where it lives. The only reader of DTensor placements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor import Placement as TorchPlacement
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from muonmesh.errors import LayoutError, explain_error
from muonmesh.layout import Layout, MeshLayout, Placement, Replicate, Shard, StridedShard


def local_of(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank stores, without communication; shares memory."""
    if isinstance(tensor, DTensor):
        local: Tensor = tensor._local_tensor
        return local
    return tensor


def placements_of(name: str, placements: Sequence[TorchPlacement]) -> tuple[Placement, ...]:
    """Translate torch's placements.

    Raises:
        LayoutError: a placement is partial or unknown.
    """
    translated: list[Placement] = []
    for placement in placements:
        # `_StridedShard` is no `Shard`, and its `is_shard()` is False: ask for its split factor first.
        split_factor = getattr(placement, "split_factor", None)
        if split_factor is not None:
            translated.append(StridedShard(placement.dim, int(split_factor)))  # type: ignore[attr-defined]
        elif isinstance(placement, TorchReplicate):
            translated.append(Replicate())
        elif isinstance(placement, TorchShard):
            translated.append(Shard(placement.dim))
        else:
            raise LayoutError(
                explain_error(
                    name,
                    f"placement {placement!r} in {tuple(placements)}",
                    "Replicate, Shard or _StridedShard: a partial value is not a parameter",
                    "Write parameter.redistribute(placements=[Replicate()]) before the optimizer sees it",
                )
            )
    return tuple(translated)


def layout_of(name: str, tensor: Tensor, replicas: Sequence[int] | None) -> Layout:
    """Return where a parameter lives; no communication.

    Args:
        name: The parameter's name, for messages.
        tensor: The parameter. A DTensor says itself where it lives.
        replicas: Global ranks that each hold a plain tensor whole; None if nobody said.

    Raises:
        LayoutError: the tensor is partial, or plain while several ranks run and nobody said who holds it.
    """
    shape = tuple(tensor.shape)
    if isinstance(tensor, DTensor):
        mesh: DeviceMesh = tensor.device_mesh
        ranks = tuple(int(rank) for rank in mesh.mesh.flatten().tolist())
        placements = placements_of(name, tensor.placements)
        layout = MeshLayout(shape, tuple(mesh.mesh.shape), ranks, placements)
        if replicas is not None and not set(ranks) >= set(replicas) and len(replicas) > 1:
            raise LayoutError(
                explain_error(
                    name,
                    f"a DTensor on ranks {ranks} and process_group= with ranks {tuple(replicas)}",
                    "replicas outside a DTensor's mesh, which this version does not support yet",
                    "Put the replicate axis into the mesh (HSDP), or leave process_group out",
                )
            )
        return layout
    if replicas is not None:
        return MeshLayout.replicated(shape, tuple(replicas))
    if world_size() > 1:
        raise LayoutError(
            explain_error(
                name,
                f"a plain tensor while {world_size()} ranks run",
                "to know which ranks hold the same parameter; guessing wrong would train silently wrong",
                'Write Muon(..., process_group="world") under DDP, process_group="local" if every rank trains a '
                "copy of its own, or a ProcessGroup; a sharded parameter must be a DTensor (fully_shard)",
            )
        )
    return MeshLayout.replicated(shape, (0,))


def world_size() -> int:
    """Return the number of ranks, 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def this_rank() -> int:
    """Return this process's global rank, 0 without torch.distributed."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


@dataclass(frozen=True)
class Signature:
    """What must stay the same for a plan to stay valid: cheap to read every step."""

    tensor: int
    mesh: int
    placements: tuple[TorchPlacement, ...]

    @staticmethod
    def of(tensor: Tensor) -> Signature:
        """Read it off a parameter."""
        if isinstance(tensor, DTensor):
            return Signature(id(tensor), id(tensor.device_mesh), tuple(tensor.placements))
        return Signature(id(tensor), 0, ())


def gradient_of(name: str, parameter: Tensor) -> Tensor | None:
    """Return the local part of a parameter's gradient, laid out as the parameter, or None.

    A partial gradient (pure tensor parallelism with ``SequenceParallel`` leaves norm weights so) is reduced
    to its parameter's placements; all ranks of the mesh take part in that.

    Raises:
        LayoutError: the gradient lives elsewhere than its parameter.
        TypeError: the gradient is sparse or complex.
    """
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.is_complex() or parameter.is_complex():
        found = f"a gradient of dtype {gradient.dtype}"
        raise TypeError(explain_error(name, found, "a real gradient", "Muon and AdamW here take real tensors only"))
    if gradient.layout is not torch.strided:
        found = f"a gradient with layout {gradient.layout}"
        raise TypeError(explain_error(name, found, "a dense gradient", "Write Embedding(..., sparse=False)"))
    if isinstance(parameter, DTensor) != isinstance(gradient, DTensor):
        kinds = {True: "a DTensor", False: "a plain tensor"}
        raise LayoutError(
            explain_error(
                name,
                f"{kinds[isinstance(gradient, DTensor)]} as gradient of {kinds[isinstance(parameter, DTensor)]}",
                "the layout of the parameter",
                "Let autograd set the gradient, or write grad = DTensor.from_local(grad, mesh, placements)",
            )
        )
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        if gradient.placements != parameter.placements:
            partial = any(isinstance(placement, Partial) for placement in gradient.placements)
            kept = all(
                isinstance(mine, Partial) or mine == theirs
                for mine, theirs in zip(gradient.placements, parameter.placements, strict=False)
            )
            if not (partial and kept) or gradient.device_mesh != parameter.device_mesh:
                raise LayoutError(
                    explain_error(
                        name,
                        f"a gradient placed {tuple(gradient.placements)}",
                        f"the parameter's placements {tuple(parameter.placements)}",
                        "Write parameter.grad = parameter.grad.redistribute(placements=parameter.placements)",
                    )
                )
            gradient = gradient.redistribute(placements=parameter.placements)
        gradient = local_of(gradient)
    if gradient.shape != local_of(parameter).shape:
        raise LayoutError(
            explain_error(
                name,
                f"a gradient of local shape {tuple(gradient.shape)}",
                f"the parameter's local shape {tuple(local_of(parameter).shape)}",
                "Assign a gradient of the parameter's shape",
            )
        )
    return gradient


def like(parameter: Tensor, local: Tensor) -> Tensor:
    """Wrap a local tensor as the parameter is: a DTensor of the same mesh and placements, or as it is."""
    if isinstance(parameter, DTensor):
        return DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    return local


def connected_ranks(tensors: Sequence[Tensor], replicas: Sequence[int] | None) -> tuple[int, ...]:
    """Return the ranks that this rank's step involves: all meshes of its tensors, and ``replicas`` of plain ones."""
    ranks = {this_rank()}
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            ranks.update(int(rank) for rank in tensor.device_mesh.mesh.flatten().tolist())
        elif replicas is not None:
            ranks.update(replicas)
    return tuple(sorted(ranks))


def mesh_groups(tensors: Sequence[Tensor]) -> list[dist.ProcessGroup]:
    """Return the process groups of the one-dimensional meshes that hold any of the tensors."""
    meshes = {id(t.device_mesh): t.device_mesh for t in tensors if isinstance(t, DTensor) and t.device_mesh.ndim == 1}
    return [mesh.get_group() for mesh in meshes.values()]


def copies_of(tensor: Tensor, replicas: Sequence[int] | None) -> int:
    """Return how many ranks hold each element of a tensor."""
    if isinstance(tensor, DTensor):
        sizes = zip(tensor.device_mesh.mesh.shape, tensor.placements, strict=True)
        return math.prod(size for size, placement in sizes if isinstance(placement, TorchReplicate))
    return len(replicas) if replicas is not None else 1
