"""Tensors whole, from what the ranks hold of them: one exchange for all of them, since each costs milliseconds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of tensors by name, DTensors whole; all ranks call it where one has a DTensor.

    Which elements of a DTensor a rank holds is read off torch's own `distribute_tensor`, and not off our layouts.
    """
    shapes = {name: tensor.shape for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    parts = {}
    for name in shapes:
        tensor = tensors[name]
        assert isinstance(tensor, DTensor)
        parts[name] = _numbers(tensor), tensor.to_local().detach().flatten().cpu()
    joined = join(parts, shapes)
    return {name: joined[name] if name in joined else tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def join(parts: Mapping[str, tuple[Tensor, Tensor]], shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Put tensors together from the numbers (int64) of the elements that each rank holds, and those elements.

    All ranks call it with the same names. Fails where elements are held by nobody, or differ where they are held twice.
    """
    if not parts:
        return {}
    everyone: list[Any] = [None] * dist.get_world_size()
    # As numpy's arrays, and elements as bytes: a tensor takes a hundred times as long to be pickled and read back.
    raw = {name: (numbers.numpy(), elements.view(torch.uint8).numpy()) for name, (numbers, elements) in parts.items()}
    dist.all_gather_object(everyone, raw)
    joined = {}
    for name, shape in shapes.items():
        dtype = parts[name][1].dtype
        result = torch.zeros(math.prod(shape), dtype=dtype)
        filled = torch.zeros(math.prod(shape), dtype=torch.bool)
        for part in everyone:
            numbers, elements = (torch.from_numpy(array) for array in part[name])
            elements, again = elements.view(dtype), filled[numbers]
            if again.any():
                same = torch.equal(result[numbers][again].nan_to_num(), elements[again].nan_to_num())
                assert same, f"{name}: replicas differ"
            result[numbers] = elements
            filled[numbers] = True
        assert bool(filled.all()), f"{name}: elements that nobody holds"
        joined[name] = result.view(tuple(shape))
    return joined


def _numbers(tensor: DTensor) -> Tensor:
    """The numbers, in the whole tensor, of the elements that this rank holds."""
    every = torch.arange(tensor.numel()).view(tensor.shape)
    placed = distribute_tensor(every, tensor.device_mesh, tensor.placements, src_data_rank=None)
    return placed.to_local().flatten().cpu()
