"""A problem to step through: parameters of awkward shapes with given gradients, held in any layout."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import muonmesh as mm
from muonmesh.numerics.coefficients import coefficient_schedule
from tests.support import gathered, layouts
from tests.support.meshes import mesh_of
from tests.support.reference import reference_step, split

# name: (shape, matrices); "adamw" instead of matrices puts the parameter into the AdamW group. Dims smaller than
# the ranks, dims that no number of ranks divides, tall, wide and square, and every way to split a parameter.
PARAMETERS: dict[str, tuple[tuple[int, ...], Any]] = {
    "one": ((1, 1), "whole"),
    "row": ((1, 9), "whole"),
    "column": ((7, 1), "whole"),
    "few": ((3, 20), "whole"),
    "tall": ((66, 32), "whole"),
    "wide": ((33, 70), "whole"),
    "square": ((48, 48), "whole"),
    "even": ((64, 96), "whole"),
    "qkv": ((40, 24), ("rows", 24, 8, 8)),
    "columns": ((10, 26), ("cols", 7, 19)),
    "heads": ((24, 30), ("heads", 4, 0)),
    "gate_up": ((22, 12), ("interleaved", 2, 0)),
    "neox": ((36, 12), ("interleaved", 3, 0, 4)),
    "conv1d": ((18, 54), ("transposed", ("rows", 18, 18, 18))),
    "experts": ((5, 6, 14), "stack"),
    "expert_gate_up": ((3, 8, 10), ("stack", ("rows", 4, 4))),
    "conv": ((9, 4, 3, 3), "flatten"),
    "embedding": ((29, 8), "adamw"),
    "norm": ((13,), "adamw"),
    "bias": ((2,), "adamw"),
}
LAYOUTS = ["ddp", "fsdp", "fsdp-keep", "shard0", "shard1", "shard-last", "replicate"]
# Placements on a mesh of 2 × half of the ranks.
TWO_DIMS: dict[str, tuple[Any, Any]] = {"hsdp": (Replicate(), Shard(0)), "rows-cols": (Shard(0), Shard(1))}
SETTINGS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}


def initial(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, (shape, _) in PARAMETERS.items()}


def gradients(step: int) -> dict[str, Tensor]:
    """Magnitudes differ from step to step by a lot; Muon must not care, and AdamW's moments see it."""
    values = initial(1000 + step)
    return {name: value * 10.0 ** (step - 2) for name, value in values.items()}


def zeroed(step: int) -> dict[str, Tensor | None]:
    """From the third step on, some matrices have zero gradients: one expert, k of qkv, a whole parameter, a half."""
    values: dict[str, Tensor | None] = dict(gradients(step))
    if step >= 2:
        values["experts"][1] = 0.0
        values["qkv"][24:32] = 0.0
        values["gate_up"][1::2] = 0.0
        values["even"].zero_()
        values["wide"] = None
    return values


class Bag(nn.Module):
    """Parameters by name; dots make modules inside."""

    def __init__(self, values: dict[str, Tensor]) -> None:
        super().__init__()
        for name, value in values.items():
            self.put(name, nn.Parameter(value.clone()))

    def put(self, name: str, parameter: Tensor) -> None:
        module: nn.Module = self
        *path, key = name.split(".")
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(key, parameter)  # type: ignore[arg-type]

    def forward(self) -> Tensor:
        return sum((p.sum() for p in self.parameters()), torch.zeros(()))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    return layouts._groups(dict(model.named_parameters()), PARAMETERS)


def matrices() -> list[Tensor]:
    """Return the matrices of all parameters."""
    muon = [(name, spec) for name, (_, spec) in PARAMETERS.items() if spec != "adamw"]
    return [matrix for name, spec in muon for matrix in split(initial()[name], spec)]


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def placed_like(parameter: Tensor, value: Tensor) -> Tensor:
    value = value.to(parameter.dtype)
    if isinstance(parameter, DTensor):
        return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return value.clone()


def hold(layout: str, values: dict[str, Tensor]) -> tuple[nn.Module, str | None]:
    """Return a module that holds the values in a layout, and the process_group that the optimizer needs."""
    model = Bag(values)
    if layout == "local":
        return model, "local"
    if layout == "ddp":
        return model, "world"
    kind = next(iter(values.values())).device.type
    if layout in TWO_DIMS:
        mesh = mesh_of((2, dist.get_world_size() // 2), kind=kind)
        for name, value in values.items():
            placed = [p if not p.is_shard() or p.dim < value.ndim else Shard(0) for p in TWO_DIMS[layout]]
            distributed = distribute_tensor(value.clone(), mesh, placed, src_data_rank=None)
            model.put(name, nn.Parameter(distributed))
        return model, None
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    if layout == "fsdp":
        return fully_shard(model, mesh=mesh), None
    if layout == "fsdp-keep":
        return fully_shard(model, mesh=mesh, reshard_after_forward=False), None
    placements = {
        "shard0": lambda value: Shard(0),
        "shard1": lambda value: Shard(min(1, value.ndim - 1)),  # uneven and empty too, which FSDP2 refuses
        "shard-last": lambda value: Shard(value.ndim - 1),
        "replicate": lambda value: Replicate(),
    }[layout]
    for name, value in values.items():
        distributed = distribute_tensor(value.clone(), mesh, [placements(value)], src_data_rank=None)
        model.put(name, nn.Parameter(distributed))
    return model, None


def holding(layout: str, seed: int = 0) -> layouts.Held:
    """Hold the parameters in a layout of any kind, by its name.

    A name of `hold`, of `layouts.MESHES` or `layouts.EIGHT` (DTensors, or with "declared" in front plain shards that
    are declared), "flat", or "flat of tensor parallel", which are cut by a seed.
    """
    if layout.startswith("flat"):
        return layouts.flat(PARAMETERS, initial(), tensor_parallel=2 if "tensor" in layout else 1, seed=seed)
    meshes, name = layouts.MESHES | layouts.EIGHT, layout.removeprefix("declared ")
    if name in meshes:
        sizes, placements = meshes[name]
        kind = layouts.dtensors if layout == name else layouts.declared
        return kind(PARAMETERS, initial(), mesh_of(sizes), lambda _, shape: placements(len(shape)))
    model, group = hold(layout, initial())

    def give(gradients: dict[str, Tensor | None]) -> None:
        for name, gradient in gradients.items():
            parameter = model.get_parameter(name)
            parameter.grad = None if gradient is None else placed_like(parameter, gradient)

    settings = {"process_group": group}
    return layouts.Held(groups(model), settings, give, functools.partial(result, model), dict(model.named_parameters()))


def optimizer_of(parameters: layouts.Held, **settings: Any) -> mm.Muon:
    """Return an optimizer of parameters held in any layout, with the problem's settings where no others are given."""
    return mm.Muon(parameters.groups, **{**SETTINGS, **parameters.settings, **settings})


def steps(
    layout: str,
    count: int,
    values: dict[str, Tensor],
    gradients_of: Callable[[int], dict[str, Tensor | None]] = gradients,
    prepare: Callable[[mm.Muon], None] | None = None,
    **settings: Any,
) -> Iterator[tuple[nn.Module, mm.Muon]]:
    """Yield model and optimizer after each of ``count`` steps with given gradients."""
    model, group = hold(layout, values)
    optimizer = mm.Muon(groups(model), process_group=group, **{**SETTINGS, **settings})
    if prepare is not None:
        prepare(optimizer)
    for step in range(count):
        for name, gradient in gradients_of(step).items():
            parameter = model.get_parameter(name)
            parameter.grad = None if gradient is None else placed_like(parameter, gradient)
        optimizer.step()
        yield model, optimizer


def result(model: nn.Module, optimizer: mm.Muon) -> dict[str, Tensor]:
    """Return parameters and every state tensor, whole, by name."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[name] = parameter
        tensors.update({f"{name}.{key}": value for key, value in optimizer.state[parameter].items()})
    return gathered.whole(tensors)


@functools.cache
def alone(
    count: int,
    gradients_of: Callable[[int], dict[str, Tensor | None]] = gradients,
    prepare: Callable[[mm.Muon], None] | None = None,
    param_dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> dict[str, Tensor]:
    """Parameters and state after ``count`` steps in one process, on this very rank: once for all layouts."""
    values = {name: value.to(param_dtype) for name, value in initial().items()}
    *_, (model, optimizer) = steps("local", count, values, gradients_of, prepare, **settings)
    return result(model, optimizer)


def promised_and_counted(optimizer: mm.Muon) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return what `explain` promises of a step, and what the last step did."""
    promise, did = optimizer.explain(), optimizer.counts
    promised = (promise.orthogonalizations, promise.collectives, promise.bytes_sent, promise.bytes_received)
    return promised, (did.orthogonalized, did.collectives, did.bytes_sent, did.bytes_received)


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Return the names of tensors that are not the same bit for bit."""
    assert a.keys() == b.keys(), sorted(a.keys() ^ b.keys())
    return [name for name in a if a[name].dtype != b[name].dtype or not torch.equal(a[name], b[name])]


def advance(model: nn.Module, optimizer: mm.Muon, first: int, last: int) -> None:
    """Take the steps from first up to last with the problem's gradients, each placed as its parameter is."""
    for step in range(first, last):
        for name, gradient in gradients(step).items():
            parameter = model.get_parameter(name)
            parameter.grad = placed_like(parameter, gradient)
        optimizer.step()
    optimizer.zero_grad()


def by_the_oracle(
    count: int, gradients_of: Callable[[int], dict[str, Any]] = gradients, **settings: Any
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Return parameters and state after steps of the independent fp64 reference; ``settings`` are the Muon half's."""
    options = {**SETTINGS, **settings}
    name, steps = options.pop("ns_coefficients", "polar_express"), options.pop("ns_steps", 5)
    coefficients = coefficient_schedule(name, steps)
    adamw = {"algorithm": "adamw", "lr": options["lr"], "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.05}
    per_parameter = {
        key: adamw
        if spec == "adamw"
        else {"algorithm": "muon", "matrices": spec, "coefficients": coefficients, **options}
        for key, (_, spec) in PARAMETERS.items()
    }
    params, state = {k: v.double() for k, v in initial().items()}, {}
    for step in range(count):
        params, state = reference_step(params, gradients_of(step), state, per_parameter)
    return params, state
