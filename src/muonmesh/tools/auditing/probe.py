"""Probe: gives weights gradients of known structure, takes one step, and restores weights, state and settings."""

from __future__ import annotations

import contextlib
import inspect
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from muonmesh.checkpoint.record import boxes_of
from muonmesh.comm.gather_objects import gather_objects
from muonmesh.comm.storage import Storage, local_of, world_size
from muonmesh.tools.local_part import local_part

RANK = 64
"""The largest rank of a probing gradient. With a low rank, its polar factor needs only a small SVD."""


def probing_gradient(name: str, shape: Sequence[int], device: torch.device) -> Tensor:
    """Return a gradient that is the same on every rank: fp32, Frobenius norm 1, for matrices of low rank.

    The sizes of its rows and columns differ by orders of magnitude. So its polar factor, the polar factors of its
    blocks, its signs and the gradient itself have clearly different directions, in spite of rounding.

    Args:
        name: The name of the parameter, which seeds the random numbers.
        shape: The shape of the whole parameter. Three dims are a stack of matrices; more dims are a convolution, which
            is flattened to a matrix.
        device: The device of the result.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    drawn = partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")
    if len(shape) < 2:
        gradient = drawn(tuple(shape))
    else:
        *batch, rows, cols = shape if len(shape) < 4 else (shape[0], math.prod(shape[1:]))
        rank = max(1, min(RANK, rows // 2, cols // 2))
        u, v = (drawn((*batch, size, rank)) * torch.exp(1.5 * drawn((*batch, size, 1))) for size in (rows, cols))
        gradient = (u.to(device) @ v.to(device).mT).reshape(tuple(shape))
    unit: Tensor = (gradient / gradient.norm().clamp(min=torch.finfo(torch.float32).tiny)).to(device)
    return unit


def give_gradient(parameter: Tensor, storage: Storage, whole: Tensor) -> None:
    """Set a parameter's gradient to a whole gradient, or to this rank's shard of it; a sparse gradient stays sparse."""
    sparse = parameter.grad is not None and parameter.grad.is_sparse
    local = (whole if storage.layout is None else local_part(whole, storage.layout)).to(parameter.dtype)
    wrapped = storage.wrap(local) if type(parameter.data) is not Tensor else local
    parameter.grad = wrapped.to_sparse(1) if sparse else wrapped


def gathered(local: Tensor | None, storage: Storage | None, shape: Sequence[int], device: torch.device) -> Tensor:
    """Return the largest and the smallest value that any rank has of each element of a whole tensor, (2, *shape).

    All ranks call it. A rank without a part of the tensor passes None. If replicas agree, both values are equal.
    Elements that no rank holds are -inf in the first, inf in the second.
    """
    signs = torch.tensor([1.0, -1.0], dtype=torch.float32, device=device).view(2, *(1 for _ in shape))
    bounds = torch.full((2, *shape), -torch.inf, dtype=torch.float32, device=device)
    if local is not None and storage is not None:
        for offset, box in boxes_of(local.contiguous(), storage.layout, storage.shape).items():
            indices = (slice(low, low + size) for low, size in zip(offset, box.shape, strict=True))
            bounds[:, *indices] = signs * box.float()
    if world_size() > 1:
        dist.all_reduce(bounds, dist.ReduceOp.MAX)
    return signs * bounds


def nested(optimizers: Iterable[Any]) -> list[Optimizer]:
    """Return optimizers, and the optimizers inside them (wrappers and chains), each once."""
    flattened: list[Optimizer] = []
    waiting = list(optimizers)
    while waiting:
        item = waiting.pop(0)
        if isinstance(item, list | tuple):
            waiting += [inner for inner in item if isinstance(inner, Optimizer)]
        elif hasattr(item, "param_groups") and all(item is not other for other in flattened):
            flattened.append(item)
            waiting += [value for value in vars(item).values() if isinstance(value, Optimizer | list | tuple)]
    return flattened


@contextlib.contextmanager
def restored(optimizers: Sequence[Any], parameters: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Return a context in which optimizers have no state and a learning rate of 1; at its end, restore everything.

    It restores, bit for bit: weights, gradients, state, groups, other attributes of the optimizers, and random numbers.
    Only weights are copied. The context yields copies of this rank's local weights, by name.
    """
    weights = {name: local_of(parameter).detach().clone() for name, parameter in parameters.items()}
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    every_optimizer = nested(optimizers)
    states: list[Any] = [optimizer.state for optimizer in every_optimizer if "state" in vars(optimizer)]
    groups = [group for optimizer in every_optimizer for group in optimizer.param_groups]
    every_dict = (*map(vars, every_optimizer), *states, *groups)
    saved_attributes = [(attributes, dict(attributes)) for attributes in every_dict]
    devices = {parameter.device for parameter in parameters.values() if parameter.device.type == "cuda"}
    with torch.random.fork_rng(devices):
        try:
            for state in states:
                state.clear()
            for group in groups:
                lr = group.get("lr")
                if lr is not None:
                    group["lr"] = torch.ones_like(lr) if isinstance(lr, Tensor) else 1.0
            yield weights
        finally:
            for attributes, before in saved_attributes:
                attributes.clear()
                attributes.update(before)
            with torch.no_grad():
                for name, parameter in parameters.items():
                    local_of(parameter).detach().copy_(weights[name])
                    parameter.grad = gradients[name]


def step_all(optimizers: Iterable[Any]) -> str:
    """Step all optimizers; return the first error that any rank raised, as text, or "". All ranks call it.

    An optimizer that requires a closure gets one.
    """
    raised = ""
    try:
        for optimizer in optimizers:
            closure = inspect.signature(optimizer.step).parameters.get("closure")
            if closure is not None and closure.default is inspect.Parameter.empty:
                optimizer.step(lambda: torch.zeros((), dtype=torch.float32, device="cpu"))
            else:
                optimizer.step()
    except Exception as error:  # training would raise the same error
        raised = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return next((message for message in gather_objects(raised) if message), "")
