"""Placements of other packages, as small classes that publish what theirs publish, and parameters held by them.

The arithmetic is that of the packages and not of `muonmesh`: `torch.narrow` of the flattened tensor by units, whole
matrices on one rank, and buffers in which parameters lie one after another and which are cut evenly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from tests.support import gathered
from tests.support.layouts import Held, _groups
from tests.support.meshes import mesh_of

R = Replicate()


@dataclass(frozen=True)
class RaggedShard(Placement):
    """As veScale's `vescale/dtensor/placement_types.py`: the flattened tensor is cut by units."""

    dims: tuple[int, ...]
    local_units: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__init__()  # what veScale, written for torch 2.7, leaves out; torch 2.13 dies of that in is_replicate()


class Owned:
    """As torchtitan's `experiments/flex_shard/example/owned.py`: one rank has all of the tensor."""

    def __init__(self, owner_rank: int) -> None:
        self.owner_rank = owner_rank


class FlexRagged:
    """As torchtitan's `experiments/flex_shard/example/ragged_shard.py`."""

    def __init__(self, dims: tuple[int, ...], local_units: tuple[int, ...]) -> None:
        self.dims, self.local_units = dims, local_units


class FlexShard:
    """As torchtitan's `experiments/flex_shard/example/shard.py`."""

    def __init__(self, dim: int) -> None:
        self.dim = dim


class Flat(Shard):
    """As Megatron-FSDP's `experimental/placement.py`: rows of a parameter in a flat buffer that is cut evenly."""

    def __init__(self) -> None:
        super().__init__(0)


def units_of(name: str, total: int, ranks: int) -> tuple[int, ...]:
    """Units that add up to ``total``, some of them 0, others by the name."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    borders = [0, *sorted(torch.randint(0, total + 1, (ranks - 1,), generator=generator).tolist()), total]
    return tuple(high - low for low, high in itertools.pairwise(borders))


def by_units(value: Tensor, dims: int, units: tuple[int, ...], at: int) -> Tensor:
    """Rows of the first dims, flattened into one, that a coordinate has."""
    rows = value.reshape(math.prod(value.shape[:dims]), *value.shape[dims:])
    unit_rows = len(rows) // sum(units)
    return rows.narrow(0, sum(units[:at]) * unit_rows, units[at] * unit_rows)


def dtensor(local: Tensor, mesh: DeviceMesh, placements: Any, whole: Tensor) -> DTensor:
    meta = TensorMeta(whole.shape, whole.stride(), local.dtype)
    return DTensor(local, DTensorSpec(mesh, tuple(placements), tensor_meta=meta), requires_grad=False)


# What makes of a value that every rank has the parameter, and what cuts a value as it.
Making = Callable[[str, Tensor], tuple[Tensor, Callable[[Tensor], Tensor]]]


def vescale(sizes: tuple[int, ...], placements_for: Callable[[int], list[Any]], kind: Any = None) -> Making:
    """RaggedShard where ``place`` says "ragged", with prefixes of one or two dims; local tensors are flat."""
    mesh, kind = mesh_of(sizes), kind or RaggedShard
    at = mesh.get_coordinate()

    def make(name: str, value: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        dims = 2 if value.ndim > 2 else 1
        placements = placements_for(value.ndim)
        axis = placements.index("ragged")
        units = units_of(name, math.prod(value.shape[:dims]), sizes[axis])
        placements[axis] = kind(tuple(range(dims)), units)

        def cut(whole: Tensor) -> Tensor:
            for number, placement in enumerate(placements):
                if isinstance(placement, Shard):
                    chunks = whole.chunk(sizes[number], placement.dim)
                    empty = whole.narrow(placement.dim, 0, 0)
                    whole = chunks[at[number]] if at[number] < len(chunks) else empty
            return by_units(whole, dims, units, at[axis]).clone().flatten()

        return nn.Parameter(dtensor(cut(value), mesh, placements, value)), cut

    return make


def flex(kinds: Any = (Owned, FlexRagged, FlexShard)) -> Making:
    """FlexShard's parameters, one kind after the other: plain local tensors with attributes."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = mesh_of((ranks,))
    numbers = itertools.count()

    def make(name: str, value: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        number = next(numbers)
        dims = 1 + (value.ndim > 2)
        units = units_of(name, math.prod(value.shape[:dims]), ranks)
        placement = (kinds[0](number % ranks), kinds[1](tuple(range(dims)), units), kinds[2](value.ndim - 1))[
            number % 3
        ]

        def cut(whole: Tensor) -> Tensor:
            if hasattr(placement, "owner_rank"):
                return whole.clone() if rank == placement.owner_rank else whole.new_zeros((0,) * whole.ndim)
            if hasattr(placement, "local_units"):
                return by_units(whole, dims, units, rank).clone()
            chunks = whole.chunk(ranks, placement.dim)
            return (chunks[rank] if rank < len(chunks) else whole.narrow(placement.dim, 0, 0)).contiguous()

        parameter = nn.Parameter(cut(value))
        parameter._placements, parameter._mesh = (placement,), mesh
        parameter._global_shape, parameter._global_stride = value.shape, value.stride()
        return parameter, cut

    return make


def megatron(sizes: tuple[int, ...], placements: list[Any], version: int, offsets: dict[str, int], size: int) -> Making:
    """Megatron-FSDP's parameters: rows of each in one buffer, which the axes that shard cut, the last one first."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "inner")[-len(sizes) :])
    at = mesh.get_coordinate()
    low, length = 0, size
    for axis in reversed(range(len(sizes))):
        if isinstance(placements[axis], Shard):
            length //= sizes[axis]
            low += at[axis] * length

    def make(name: str, value: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        first, count = offsets[name], value.numel()

        def cut(whole: Tensor) -> Tensor:
            begin, end = max(low, first), min(low + length, first + count)
            row = math.prod(whole.shape[1:])
            return whole[(begin - first) // row : (max(begin, end) - first) // row].clone()

        parameter = nn.Parameter(dtensor(cut(value), mesh, placements, value))
        if version == 1:
            item = SimpleNamespace(global_data_index=first, size=count)
            buffer = SimpleNamespace(item_index_map=[item], bucket_index=SimpleNamespace(size=size))
            parameter.orig_param = SimpleNamespace(_gbuf=buffer, _item_id=0)
            parameter.megatron_fsdp_dist_index = SimpleNamespace(dp_shard_dim="inner", dp_outer_dim="outer")
        else:
            layout = SimpleNamespace(tensor_shapes=(value.shape,), tensor_to_offset=(first,), size=size)
            sharded = (SimpleNamespace(sharded=parameter),)
            group = SimpleNamespace(main_weight=SimpleNamespace(layout=layout), fsdp_parameters=sharded)
            parameter._mfsdp_parameter_group = lambda: group
        return parameter, cut

    return make


def held_by(make: Making, parameters: dict[str, tuple[tuple[int, ...], Any]], values: dict[str, Tensor]) -> Held:
    """The values as these parameters, with how to give gradients and to see all whole."""
    pairs = {name: make(name, value.clone()) for name, value in values.items()}
    tensors = {name: parameter for name, (parameter, _) in pairs.items()}

    def give(gradients: dict[str, Tensor | None]) -> None:
        for name, gradient in gradients.items():
            parameter, cut = pairs[name]
            local = None if gradient is None else cut(gradient)
            if local is not None and isinstance(parameter, DTensor):
                local = dtensor(local, parameter.device_mesh, parameter.placements, values[name])
            parameter.grad = local

    def whole(optimizer: Any) -> dict[str, Tensor]:
        parts, shapes, rest = {}, {}, {}
        for name, (parameter, cut) in pairs.items():
            numbers = cut(torch.arange(values[name].numel()).view(values[name].shape)).flatten()
            for key, value in (("", parameter), *optimizer.state[parameter].items()):
                local = getattr(value, "_local_tensor", value).detach()
                called = f"{name}.{key}" if key else name
                if not (local.ndim or key == ""):
                    rest[called] = local.clone()
                else:
                    parts[called], shapes[called] = (numbers, local.flatten()), values[name].shape
        return {**gathered.join(parts, shapes), **rest}

    return Held(_groups(tensors, parameters), {}, give, whole, dict(tensors))
