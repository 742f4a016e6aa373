"""Dry run: one step of any optimizer on pretended devices and any number of pretended ranks."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, empty

from muonmesh.comm.storage import local_of
from muonmesh.errors import explain_error
from muonmesh.optimizer import Muon
from muonmesh.step.connection import connect
from muonmesh.tools.forecasts.device_rates import DeviceRates, Timed
from tests.device.launches import Launches
from tests.device.pretended import pretended_cuda

Placer = Callable[[str, nn.Parameter], Sequence[Placement]]
"""A function from a parameter's name and the parameter to its placements on the mesh."""


@dataclass(frozen=True)
class DryRun(Timed):
    """Launches, traffic and memory of one step on one rank.

    Attributes:
        launches: Number of kernel launches. A multi-tensor operation launches as many kernels as its tensors need.
        operations: Number of torch calls that launch kernels.
        kernels: Number of launches of muonmesh's own kernels.
        views: Number of torch calls that launch nothing.
        matrices: Number of parameters for which the step runs Python code; 0 for other optimizers than Muon.
        collectives: Number of collectives on the device.
        messages: Number of ranks that all-to-alls reach, summed over the all-to-alls.
        bytes_sent: Bytes sent to other ranks; 0 for other optimizers than Muon.
        elementwise_bytes: Bytes read and written by everything except matrix products.
        flops: FLOPs of the matrix products.
        slow_flops: FLOPs weighted by the lower speed of small products (`DeviceRates.weight_of`).
        elements: Number of parameter elements that this rank stores.
        peak_bytes: Peak memory of the step, without parameters, gradients and state.
        kept_bytes: Memory that a step has taken and not given back.
        state_bytes: State on the device between steps.
        bytes_to_device: Bytes copied from CPU memory to the device: state that is kept there, and a few numbers.
        bytes_to_host: Bytes copied from the device to CPU memory.
        rates: The rates of the model of time.
    """

    launches: int
    operations: int
    kernels: int
    views: int
    matrices: int
    collectives: int
    messages: int
    bytes_sent: int
    elementwise_bytes: int
    flops: int
    slow_flops: float
    elements: int
    peak_bytes: int
    kept_bytes: int
    state_bytes: int
    bytes_to_device: int
    bytes_to_host: int
    rates: DeviceRates

    @property
    def bytes_per_element(self) -> float:
        """Elementwise bytes for each element that this rank stores."""
        return self.elementwise_bytes / max(1, self.elements)


def dry_run(
    model: nn.Module,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    *,
    world: int = 1,
    mesh: Mapping[str, int] | None = None,
    placements: Placer | None = None,
    rank: int = 0,
    step: Callable[[Any], object] | None = None,
    steps: int = 2,
    rates: DeviceRates | None = None,
) -> DryRun:
    """Count what a step would launch, send and store on a CUDA device, without such a device and without other ranks.

    The real step runs, on fake tensors (no elements, so a model of any size takes no memory) and torch's ``fake``
    process group. It raises an error if the CPU would wait for the device.

    Args:
        model: The model, on any device; on the meta device it takes no memory. It is not changed.
        optimizer: A function that makes the optimizer from a copy of the model on the device.
        world: Number of ranks.
        mesh: Sizes of a device mesh by the names of its dims; their product is ``world``. None: no mesh, so parameters
            are plain tensors.
        placements: A function that returns the placements of a parameter on ``mesh`` from its name and the parameter.
        rank: The rank whose step is counted.
        step: Called with the optimizer instead of its ``step``, for example to clip first.
        steps: Number of steps before the counted step. They create state, and the CPU must not wait in them either.
        rates: The rates of the device, for the model of time.

    Returns:
        The figures of one step.

    Raises:
        HostSync: the CPU would wait for the device; the traceback says where.
        RuntimeError: torch.distributed is initialized already.
        ValueError: ``mesh`` has another number of ranks than ``world``.
    """
    run = step or (lambda optimizer_of_step: optimizer_of_step.step())
    dims = dict(mesh or {})
    size = math.prod(dims.values())
    if mesh is not None and size != world:
        raise ValueError(explain_error("mesh", f"{dims}, {size} ranks", f"world={world} ranks", f"Write world={size}"))
    with pretended_cuda(), _ranks(world, rank), warnings.catch_warnings():
        # The step checks whether memory is aligned. Fake tensors have no memory, so the result does not matter.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        device_mesh = init_device_mesh("cuda", tuple(dims.values()), mesh_dim_names=tuple(dims)) if dims else None
        fake = FakeTensorMode()
        copied = _on_device(model, fake, device_mesh, placements)
        with fake:
            optimizer_of_copy = optimizer(copied)
        if isinstance(optimizer_of_copy, Muon):
            planned = connect(
                optimizer_of_copy.param_groups, optimizer_of_copy._runtime
            )  # compares plans: real tensors on the CPU
            planned.group_names(
                [group["name"] for group in optimizer_of_copy.param_groups], planned.exchange.group
            )  # likewise, once
        parameters = [p for group in optimizer_of_copy.param_groups for p in group["params"]]
        with fake:
            for _ in range(steps):
                with Launches():
                    run(optimizer_of_copy)
            count = Launches()
            beside = [*parameters, *(p.grad for p in parameters), *_tensors(optimizer_of_copy.state)]
            before = [local_of(t) for t in beside if isinstance(t, Tensor)]
            count.knows(before)
            with count:
                run(optimizer_of_copy)
            live_bytes = count.live_bytes
        state = [local_of(tensor) for tensor in _tensors(optimizer_of_copy.state)]
    counted = {field.name: getattr(count, field.name) for field in fields(DryRun) if hasattr(count, field.name)}
    return DryRun(
        **counted,
        matrices=len(parameters) if isinstance(optimizer_of_copy, Muon) else 0,
        bytes_sent=optimizer_of_copy.counts.bytes_sent if isinstance(optimizer_of_copy, Muon) else 0,
        elements=sum(local_of(p).numel() for p in parameters),
        kept_bytes=live_bytes,
        state_bytes=sum(local.numel() * local.element_size() for local in state if local.is_cuda),
        rates=rates or DeviceRates(),
    )


def _tensors(state: Mapping[Tensor, Mapping[str, Any]]) -> Iterator[Tensor]:
    for entry in state.values():
        yield from (value for value in entry.values() if isinstance(value, Tensor))


@contextmanager
def _ranks(world: int, rank: int) -> Iterator[None]:
    """Initialize torch.distributed as one rank of many, with torch's fake backend for the others."""
    if dist.is_available() and dist.is_initialized():
        raise RuntimeError("dry_run: found torch.distributed initialized; needed a process without it. Call it before")
    if world == 1:
        yield
        return
    from torch._C._distributed_c10d import HashStore
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

    dist.init_process_group("fake", rank=rank, world_size=world, store=HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _on_device(model: nn.Module, fake: FakeTensorMode, mesh: DeviceMesh | None, placements: Placer | None) -> nn.Module:
    """Return a copy of a model whose parameters are fake tensors on the device, each with a gradient."""
    copies: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        make: Callable[..., Tensor] = partial(torch.empty, device="cuda:0")
        if mesh is not None and placements is not None:
            make = partial(empty, device_mesh=mesh, placements=tuple(placements(name, parameter)))
        with fake:
            weight, gradient = (make(parameter.shape, dtype=parameter.dtype) for _ in range(2))
            copies[id(parameter)] = nn.Parameter(weight, requires_grad=parameter.requires_grad)
            copies[id(parameter)].grad = gradient if parameter.requires_grad else None
    return copy.deepcopy(model, copies)  # it uses these parameters as if it had copied them
