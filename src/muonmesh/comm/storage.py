"""Storage: which rank stores which part of a tensor, and how a local tensor is wrapped to live there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import add, lt, mul

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Placement as TorchPlacement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from muonmesh.layout import FlatShards, Layout, MeshLayout, Replicate
from muonmesh.layout.region import row_major

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
    return not local.is_meta and any_is_freed([local], [bytes_of(local)])


def bytes_of(local: Tensor) -> int:
    """Return how many bytes a tensor spans, from its first element to its last; far below 0 if it has none."""
    return _reach(local) * local.itemsize if local.numel() else -(1 << 62)  # needs no memory, wherever it begins


def any_is_freed(tensors: Sequence[Tensor], sizes: Sequence[int]) -> bool:
    """Return whether the memory of one of many dense tensors was freed; ``sizes`` are their `bytes_of`."""
    starts = map(mul, map(Tensor.storage_offset, tensors), map(Tensor.element_size, tensors))
    return any(map(lt, map(UntypedStorage.nbytes, map(Tensor.untyped_storage, tensors)), map(add, starts, sizes)))


def _reach(local: Tensor) -> int:
    """Return how many elements the memory of a tensor spans, from its first element to its last; it is not empty."""
    if local.is_contiguous():
        return local.numel()
    return sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True)) + 1


def shares_memory(tensor: Tensor) -> bool:
    """Return whether several elements of a tensor may have the same place in memory."""
    reach = 0  # the largest distance of two elements along the dims so far
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def overlapping(tensors: Sequence[Tensor]) -> list[bool]:
    """Return for each tensor whether its memory, from its first element to its last, overlaps with that of another."""
    overlaps = [False] * len(tensors)
    spans = [(tensor.data_ptr(), number) for number, tensor in enumerate(tensors) if tensor.numel()]
    end, farthest = 0, 0  # of the spans so far
    for start, number in sorted(spans):
        if start < end:
            overlaps[number] = overlaps[farthest] = True
        if (stop := start + _reach(tensors[number]) * tensors[number].itemsize) > end:
            end, farthest = stop, number
    return overlaps


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
        return replace(self, layout=copied(inner, copies))

    def factored(self, layout: Layout) -> Storage:
        """Return the Storage of a factored state (`FactoredState`) of the parameter with this storage."""
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
        return [flat[start : start + length] for _, length, start in self.layout.intervals_of(this_rank())]


def local_shape(storage: Storage) -> tuple[int, ...]:
    """Return the shape of this rank's local tensor, by the layout of its storage."""
    assert storage.layout is not None
    return storage.layout.local_shape(this_rank())


def copied(layout: MeshLayout, copies: Sequence[tuple[int, ...]]) -> MeshLayout:
    """Return a layout with a replicate axis in front: the same on the ranks of each copy."""
    everyone = tuple(rank for copy in copies for rank in copy)
    return MeshLayout(layout.shape, (len(copies), *layout.mesh), everyone, (Replicate(), *layout.placements))


def world_size() -> int:
    """Return the number of ranks, 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def this_rank() -> int:
    """Return this process's global rank, 0 without torch.distributed."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
