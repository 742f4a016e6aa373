"""Ways to hold the parameters of `tests.support.problem` on several ranks, for every kind of layout there is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from muonmesh.comm.placing import placements_of
from muonmesh.layout import FlatParameter, FlatShards, Interval, MeshLayout
from muonmesh.step.connection import placed_members
from tests.support import gathered

# name: (mesh, placements of a matrix by its number of dims); a dim that is not there is dim 0
S, R = Shard, Replicate()


def strided(dim: int, factor: int) -> Placement:
    return _StridedShard(dim, split_factor=factor)


MESHES: dict[str, tuple[tuple[int, ...], Any]] = {
    "hsdp": ((2, 2), lambda n: [R, S(0)]),
    "hsdp, shard 1": ((2, 2), lambda n: [R, S(1 % n)]),
    "replicate inside": ((2, 2), lambda n: [S(0), R]),
    "rows by cols": ((2, 2), lambda n: [S(0), S(1 % n)]),
    "cols by rows": ((2, 2), lambda n: [S(1 % n), S(0)]),
    "rows twice": ((2, 2), lambda n: [S(0), S(0)]),
    "fsdp over colwise": ((2, 2), lambda n: [strided(0, 2), S(0)]),
    "fsdp over rowwise": ((2, 2), lambda n: [S(0), S(n - 1)]),
    "strided alone": ((4,), lambda n: [strided(0, 3)]),
    "all replicated": ((2, 2), lambda n: [R, R]),
    "one axis of one": ((4, 1), lambda n: [S(0), S(n - 1)]),
    "three axes": ((2, 1, 2), lambda n: [R, S(0), S(n - 1)]),
    "four axes": ((1, 2, 1, 2), lambda n: [R, S(0), S(1 % n), strided(0, 2)]),
    "experts": ((2, 2), lambda n: [S(0), S(1 % n)] if n == 3 else [R, R]),
}
EIGHT: dict[str, tuple[tuple[int, ...], Any]] = {
    "eight replicas": ((8,), lambda n: [R]),
    "four replicas of pairs": ((4, 2), lambda n: [R, S(0)]),
    "two replicas of four": ((2, 4), lambda n: [R, S(0)]),
    "pairs of four replicas": ((2, 4), lambda n: [S(0), R]),
    "hsdp over tp": ((2, 2, 2), lambda n: [R, strided(0, 2), S(0)]),
    "hsdp over rowwise": ((2, 2, 2), lambda n: [R, S(0), S(n - 1)]),
    "rows, cols, rows": ((2, 2, 2), lambda n: [S(0), S(n - 1), S(0)]),
}


@dataclass
class Held:
    """Parameters on this rank.

    Attributes:
        groups: Param groups for the optimizer.
        settings: What the optimizer must be told: process_group, layouts.
        give: Sets all gradients from whole ones by name; None for none.
        whole: Returns parameters and state, whole, by name: ``name`` and ``name.key``.
    """

    groups: list[dict[str, Any]]
    settings: dict[str, Any]
    give: Callable[[dict[str, Tensor | None]], None]
    whole: Callable[[Any], dict[str, Tensor]]
    tensors: dict[str, Tensor] = field(default_factory=dict)


def layout_on(mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> MeshLayout:
    ranks = tuple(int(rank) for rank in mesh.mesh.flatten())
    return MeshLayout(tuple(shape), tuple(mesh.mesh.shape), ranks, placements_of("w", placements))


def cut(value: Tensor, layout: Any, rank: int) -> Tensor:
    """What a rank stores of a whole value, cut by the layout's own blocks (checked against torch's elsewhere)."""
    local = torch.zeros(layout.local_shape(rank), dtype=value.dtype)
    for block in layout.blocks(rank):
        region = block.region
        box = tuple(slice(o, o + n) for o, n in zip(region.offset, region.shape, strict=True))
        local.as_strided(region.shape, block.strides, block.start).copy_(value[box])
    return local


def elements(local: Tensor, layout: Any) -> tuple[Tensor, Tensor]:
    """What this rank stores of a whole value: the numbers of the elements, and the elements."""
    rank, local = dist.get_rank(), local.detach()
    every = torch.arange(math.prod(layout.shape)).view(layout.shape)
    numbers, stored = [every[:0].flatten()], [local.new_empty(0)]
    for block in layout.blocks(rank) if rank in layout.ranks else ():
        region = block.region
        box = tuple(slice(o, o + n) for o, n in zip(region.offset, region.shape, strict=True))
        numbers.append(every[box].flatten())
        stored.append(local.as_strided(region.shape, block.strides, block.start).flatten())
    return torch.cat(numbers), torch.cat(stored)


def _groups(tensors: dict[str, Tensor], parameters: dict[str, tuple[tuple[int, ...], Any]]) -> list[dict[str, Any]]:
    muon: dict[str, Any] = {"name": "muon", "algorithm": "muon", "params": [], "param_names": [], "matrices": []}
    adamw: dict[str, Any] = {"name": "adamw", "algorithm": "adamw", "params": [], "param_names": []}
    adamw["weight_decay"] = 0.05
    for name, tensor in tensors.items():
        spec = parameters[name][1]
        group = adamw if spec == "adamw" else muon
        group["params"].append(tensor)
        group["param_names"].append(name)
        if spec != "adamw":
            group["matrices"].append(spec)
    return [group for group in (muon, adamw) if group["params"]]


def dtensors(
    parameters: dict[str, tuple[tuple[int, ...], Any]],
    values: dict[str, Tensor],
    mesh: DeviceMesh,
    placements: Callable[[str, tuple[int, ...]], Sequence[Placement]],
) -> Held:
    """DTensors made by torch's own `distribute_tensor`."""
    tensors = {}
    for name, value in values.items():
        placed = distribute_tensor(value.clone(), mesh, placements(name, tuple(value.shape)), src_data_rank=None)
        tensors[name] = nn.Parameter(placed)

    def give(gradients: dict[str, Tensor | None]) -> None:
        for name, gradient in gradients.items():
            parameter = tensors[name]
            parameter.grad = None
            if gradient is not None:
                parameter.grad = distribute_tensor(
                    gradient.to(parameter.dtype), mesh, parameter.placements, src_data_rank=None
                )

    def whole(optimizer: Any) -> dict[str, Tensor]:
        tensors_and_state = dict(tensors)
        for name, parameter in tensors.items():
            tensors_and_state.update({f"{name}.{key}": value for key, value in optimizer.state[parameter].items()})
        return gathered.whole(tensors_and_state)

    return Held(_groups(tensors, parameters), {}, give, whole, dict(tensors))


def declared(
    parameters: dict[str, tuple[tuple[int, ...], Any]],
    values: dict[str, Tensor],
    mesh: DeviceMesh,
    placements: Callable[[str, tuple[int, ...]], Sequence[Placement]],
) -> Held:
    """Plain local shards with ``layouts=``."""
    rank = dist.get_rank()
    tensors, layouts, declared_layouts = {}, {}, {}
    for name, value in values.items():
        placed = list(placements(name, tuple(value.shape)))
        layouts[name] = layout_on(mesh, placed, value.shape)
        tensors[name] = nn.Parameter(cut(value, layouts[name], rank))
        declared_layouts[name] = (mesh, placed, tuple(value.shape))

    def give(gradients: dict[str, Tensor | None]) -> None:
        for name, gradient in gradients.items():
            local = None if gradient is None else cut(gradient, layouts[name], rank)
            tensors[name].grad = None if local is None else local.to(tensors[name].dtype)

    def whole(optimizer: Any) -> dict[str, Tensor]:
        parts = {name: elements(parameter, layouts[name]) for name, parameter in tensors.items()}
        state = {}
        for name, parameter in tensors.items():
            state.update({f"{name}.{key}": value for key, value in optimizer.state[parameter].items()})
        return {**gathered.join(parts, {name: layouts[name].shape for name in parts}), **gathered.whole(state)}

    return Held(_groups(tensors, parameters), {"layouts": declared_layouts}, give, whole, dict(tensors))


def flat(
    parameters: dict[str, tuple[tuple[int, ...], Any]],
    values: dict[str, Tensor],
    *,
    tensor_parallel: int = 1,
    padding: int = 3,
    seed: int = 0,
    groups: Sequence[dict[str, Any]] | None = None,
) -> Held:
    """One flat buffer for each of the groups, or for the Muon half and for AdamW's, cut anywhere, as ZeRO holds them.

    The parameters (or their tensor-parallel shards) are laid end to end and the whole is cut at random places, one
    interval a rank of each data-parallel group, with padding at the end.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    data = world // tensor_parallel
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    contents: dict[str, list[FlatParameter]] = {}
    flat_groups = []
    for group in _groups(values, parameters) if groups is None else groups:
        buffer = group["name"]
        contents[buffer] = _cut_flat(parameters, group["param_names"], data, tensor_parallel, padding, generator)
        size = contents[buffer][0].layout.sizes[rank]
        local = torch.zeros(size)
        for entry in contents[buffer]:
            _fill(local, values[entry.name], entry.layout, rank)
        tensors[buffer] = nn.Parameter(local)
        settings = {key: value for key, value in group.items() if key not in ("matrices", "reasons")}
        flat_groups.append({**settings, "params": [tensors[buffer]], "param_names": [buffer]})

    def give(gradients: dict[str, Tensor | None]) -> None:
        for buffer, tensor in tensors.items():
            tensor.grad = torch.zeros_like(tensor)
            for entry in contents[buffer]:
                gradient = gradients[entry.name]
                if gradient is not None:
                    _fill(tensor.grad, gradient, entry.layout, rank)

    def whole(optimizer: Any) -> dict[str, Tensor]:
        result, parts, shapes = {}, {}, {}
        state_layouts = {member.name: member.state_layouts for member in placed_members(optimizer)}
        for buffer, tensor in tensors.items():
            for entry in contents[buffer]:
                parts[entry.name], shapes[entry.name] = elements(tensor, entry.layout), entry.layout.shape
                for key, value in optimizer.state[tensor].items():
                    if value.ndim:
                        home = state_layouts[entry.name].get(key)  # rows and columns lie in buffers of their own
                        layout = entry.layout if home is None else home.storage.layout
                        parts[f"{entry.name}.{key}"] = elements(value, layout)
                        shapes[f"{entry.name}.{key}"] = layout.shape
                    else:
                        result[f"{entry.name}.{key}"] = value.clone()
        return {**gathered.join(parts, shapes), **result}

    return Held(flat_groups, {"layouts": contents}, give, whole, dict(tensors))


def _cut_flat(
    parameters: dict[str, tuple[tuple[int, ...], Any]],
    names: Sequence[str],
    data: int,
    tensor_parallel: int,
    padding: int,
    generator: torch.Generator,
) -> list[FlatParameter]:
    ranks = tuple(range(data * tensor_parallel))
    intervals: dict[str, dict[int, tuple[Interval, ...]]] = {name: {} for name in names}
    sizes: dict[int, int] = {}
    within = {}
    for number, name in enumerate(names):
        shape = parameters[name][0]
        kinds: list[Placement] = [Replicate(), Shard(number % len(shape)), _StridedShard(0, split_factor=2)]
        shard = kinds[number % 3] if tensor_parallel > 1 else Replicate()
        placements = placements_of(name, [Replicate(), shard])
        within[name] = MeshLayout(shape, (data, tensor_parallel), ranks, placements)
    # Ranks that would hold the same share it: all of them where the tensor-parallel axis replicates.
    for name in names:
        if within[name].copies() == len(ranks):
            continue
    for part in range(tensor_parallel):
        sharing = [rank for rank in ranks if rank % tensor_parallel == part]
        lengths = {name: math.prod(within[name].local_shape(sharing[0])) for name in names}
        total = sum(lengths.values()) + padding
        borders = [0, *sorted(torch.randint(0, total + 1, (data - 1,), generator=generator).tolist()), total]
        for (low, high), rank in zip(itertools.pairwise(borders), sharing, strict=True):
            sizes[rank] = high - low
            position = 0
            for name in names:
                begin, end = max(low, position), min(high, position + lengths[name])
                if begin < end:
                    intervals[name][rank] = (Interval(begin - position, end - begin, begin - low),)
                position += lengths[name]
    entries = []
    for name in names:
        pieces = tuple(intervals[name].get(rank, ()) for rank in ranks)
        replicas: tuple[tuple[int, ...], ...] = ()
        if within[name].copies() == len(ranks) and tensor_parallel > 1:  # each tensor-parallel column has all of it
            replicas = tuple(tuple(ranks[part::tensor_parallel]) for part in range(tensor_parallel))
        layout = FlatShards(within[name], pieces, tuple(sizes[rank] for rank in ranks), replicas)
        spec = parameters[name][1]
        entries.append(FlatParameter(name, layout, None if spec == "adamw" else spec))
    return entries


def _fill(local: Tensor, value: Tensor, layout: FlatShards, rank: int) -> None:
    for block in layout.blocks(rank):
        region = block.region
        box = tuple(slice(o, o + n) for o, n in zip(region.offset, region.shape, strict=True))
        local.as_strided(region.shape, block.strides, block.start).copy_(value[box])
