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
        left, right = (drawn((*batch, size, rank)) * torch.exp(1.5 * drawn((*batch, size, 1))) for size in (rows, cols))
        gradient = (left.to(device) @ right.to(device).mT).reshape(tuple(shape))
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
    found = torch.full((2, *shape), -torch.inf, dtype=torch.float32, device=device)
    if local is not None and storage is not None:
        for offset, box in boxes_of(local.contiguous(), storage.layout, storage.shape).items():
            place = (slice(low, low + size) for low, size in zip(offset, box.shape, strict=True))
            found[:, *place] = signs * box.float()
    if world_size() > 1:
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return signs * found


def nested(optimizers: Iterable[Any]) -> list[Optimizer]:
    """Return optimizers, and the optimizers inside them (wrappers and chains), each once."""
    found: list[Optimizer] = []
    waiting = list(optimizers)
    while waiting:
        one = waiting.pop(0)
        if isinstance(one, list | tuple):
            waiting += [inner for inner in one if isinstance(inner, Optimizer)]
        elif hasattr(one, "param_groups") and all(one is not other for other in found):
            found.append(one)
            waiting += [held for held in vars(one).values() if isinstance(held, Optimizer | list | tuple)]
    return found


@contextlib.contextmanager
def restored(optimizers: Sequence[Any], parameters: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Return a context in which optimizers have no state and a learning rate of 1; at its end, restore everything.

    It restores, bit for bit: weights, gradients, state, groups, other attributes of the optimizers, and random numbers.
    Only weights are copied. The context yields copies of this rank's local weights, by name.
    """
    weights = {name: local_of(one).detach().clone() for name, one in parameters.items()}
    gradients = {name: one.grad for name, one in parameters.items()}
    found = nested(optimizers)
    states: list[Any] = [one.state for one in found if "state" in vars(one)]
    groups = [group for one in found for group in one.param_groups]
    kept = [(each, dict(each)) for each in (*map(vars, found), *states, *groups)]
    devices = {one.device for one in parameters.values() if one.device.type == "cuda"}
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
            for each, before in kept:
                each.clear()
                each.update(before)
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
        for one in optimizers:
            closure = inspect.signature(one.step).parameters.get("closure")
            if closure is not None and closure.default is inspect.Parameter.empty:
                one.step(lambda: torch.zeros((), dtype=torch.float32, device="cpu"))
            else:
                one.step()
    except Exception as error:  # training would raise the same error
        raised = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return next((each for each in gather_objects(raised) if each), "")
