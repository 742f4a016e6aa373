"""Models with their optimizers in every kind of layout there is, for what saves in one and goes on in another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Placement

import muonmesh as mm
from muonmesh.comm.storage import local_of
from muonmesh.integrations import fsdp1
from muonmesh.step.connection import placed_members
from tests.support import gathered, layouts, problem
from tests.support.in_copies import work_in_copies
from tests.support.layouts import R, S, strided
from tests.support.meshes import machines, mesh_of

Values = dict[str, Tensor]
Gradients = dict[str, Tensor | None]


@dataclass(frozen=True)
class Source:
    """What is trained.

    Attributes:
        parameters: Shape and matrices of each parameter, "adamw" in place of matrices.
        values: Initial values by a seed.
        groups: Settings of each group with its ``param_names``; None: one group for Muon and one for AdamW.
    """

    parameters: dict[str, tuple[tuple[int, ...], Any]]
    values: Callable[[int], Values]
    groups: Sequence[dict[str, Any]] | None = None

    def groups_of(self, tensors: Values) -> list[dict[str, Any]]:
        groups = layouts._groups(tensors, self.parameters) if self.groups is None else self.groups
        return [{**group, "params": [tensors[name] for name in group["param_names"]]} for group in groups]


@dataclass
class Case:
    """A model and its optimizer on this rank.

    Attributes:
        give: Sets all gradients from whole ones.
        whole: Returns parameters and state, whole, by name.
    """

    model: nn.Module
    optimizer: mm.Muon
    give: Callable[[Gradients], None]
    whole: Callable[[], Values]


Make = Callable[..., Case]
"""A function of a `Source`, a seed, the dtype of the weights and what else the optimizer is told."""


def optimizer_of(
    groups: list[dict[str, Any]], *, muon: dict[str, Any] | None = None, in_copies: bool = False, **settings: Any
) -> mm.Muon:
    """An optimizer whose Muon groups have these settings; ``in_copies`` works on its state as on that of the host."""
    for group in groups:
        if group["algorithm"] == "muon":
            group.update(muon or {})
    optimizer = mm.Muon(groups, **settings)
    if in_copies:
        work_in_copies(optimizer)
    return optimizer


def values_in(source: Source, seed: int, dtype: torch.dtype) -> Values:
    return {name: value.to(dtype) for name, value in source.values(seed).items()}


def held_by(source: Source, placed: layouts.Held, **settings: Any) -> Case:
    optimizer = optimizer_of(placed.groups, **placed.settings, **settings)
    model = problem.Bag({})
    for name, tensor in placed.tensors.items():
        model.put(name, tensor)
    return Case(model, optimizer, placed.give, lambda: placed.whole(optimizer))


def given_to(model: nn.Module) -> Callable[[Gradients], None]:
    """What sets a model's gradients, each placed as its parameter is."""

    def give(gradients: Gradients) -> None:
        for name, gradient in gradients.items():
            parameter = model.get_parameter(name)
            parameter.grad = None if gradient is None else problem.placed_like(parameter, gradient)

    return give


def in_module(layout: str, values: Values) -> layouts.Held:
    """The problem's parameters in a layout of `problem.hold`."""
    model, group = problem.hold(layout, values)
    settings, tensors = {"process_group": group}, dict(model.named_parameters())
    return layouts.Held(
        problem.groups(model), settings, given_to(model), lambda o: problem.result(model, o), dict(tensors)
    )


def model_in(layout: str, machine: int = 0, **always: Any) -> Make:
    """A model in a layout of `problem.hold`, perhaps on machines of so many ranks."""

    def make(source: Source, seed: int, dtype: torch.dtype = torch.float32, **settings: Any) -> Case:
        model, group = problem.hold(layout, values_in(source, seed, dtype))
        groups = source.groups_of(dict(model.named_parameters()))
        with machines(machine) if machine else nullcontext():
            optimizer = optimizer_of(groups, process_group=group, **always, **settings)
        return Case(model, optimizer, given_to(model), lambda: problem.result(model, optimizer))

    return make


def on_mesh(hold: Any, sizes: tuple[int, ...], placements_at: Callable[[int, int], Sequence[Placement]]) -> Make:
    """Tensors placed by number and dims of their parameter."""

    def make(source: Source, seed: int, dtype: torch.dtype = torch.float32, **settings: Any) -> Case:
        numbers = {name: number for number, name in enumerate(source.parameters)}

        def placements(name: str, shape: tuple[int, ...]) -> Sequence[Placement]:
            return placements_at(numbers[name], len(shape))

        placed = hold(source.parameters, values_in(source, seed, dtype), mesh_of(sizes), placements)
        placed.groups = source.groups_of(placed.tensors)
        return held_by(source, placed, **settings)

    return make


def alternating(number: int, dims: int) -> Sequence[Placement]:
    """As tensor parallelism cuts: one weight by rows, the next by columns."""
    return [S(number % 2 % dims)]


def strided_rows(number: int, dims: int) -> Sequence[Placement]:
    """FSDP2 over tensor parallelism, by rows and by columns."""
    return [strided(0, 2), S(0)] if number % 2 else [S(0), S(dims - 1)]


def experts(number: int, dims: int) -> Sequence[Placement]:
    return [S(0), S(1)] if dims == 3 else [R, R]


def flat(tensor_parallel: int = 1) -> Make:
    def make(source: Source, seed: int, **settings: Any) -> Case:
        how: dict[str, Any] = {"tensor_parallel": tensor_parallel, "seed": tensor_parallel, "groups": source.groups}
        return held_by(source, layouts.flat(source.parameters, source.values(seed), **how), **settings)

    return make


def whole_of(optimizer: mm.Muon) -> Values:
    """Parameters and state, whole, by name, wherever they live."""
    parts, shapes, counts = {}, {}, {}
    for member in placed_members(optimizer):
        for key, value in {"": member.tensor, **optimizer.state[member.tensor]}.items():
            layout = member.state_layouts.get(key, member).storage.layout
            name = f"{member.name}.{key}" if key else member.name
            if key == "step":
                counts[name] = value.clone()
            else:
                parts[name], shapes[name] = layouts.elements(local_of(value).detach().clone(), layout), layout.shape
    return {**gathered.join(parts, shapes), **counts}


def to_owners(*, sharded: bool = False) -> Make:
    """Replicas that add gradients up at owners, plain or of FSDP2's shards; each gradient is one replica's, times R."""

    def make(source: Source, seed: int, dtype: torch.dtype = torch.float32, **settings: Any) -> Case:
        model, group = problem.Bag(values_in(source, seed, dtype)), dist.group.WORLD
        if sharded:
            mesh = mesh_of((2, dist.get_world_size() // 2), names=("replicate", "shard"))
            fully_shard(model, mesh=mesh["shard"])
            group = mesh["replicate"].get_group()
        settings_of_owners: dict[str, Any] = {
            "process_group": group,
            "gradients": "to_owners",
            "memory_budget_mb": 0.064,
        }
        optimizer = optimizer_of(source.groups_of(dict(model.named_parameters())), **settings_of_owners, **settings)
        replica, copies = dist.get_rank(group), dist.get_world_size(group)

        def give(gradients: Gradients) -> None:
            for number, (name, gradient) in enumerate(gradients.items()):
                parameter = model.get_parameter(name)
                parameter.grad = None
                if gradient is not None and number % copies == replica:
                    parameter.grad = problem.placed_like(parameter, gradient * copies)  # copies are a power of 2

        return Case(model, optimizer, give, lambda: whole_of(optimizer))

    return make


def of_fsdp1(source: Source, seed: int, **settings: Any) -> Case:
    model = problem.Bag(source.values(seed))
    groups = source.groups_of(dict(model.named_parameters()))
    wrapped = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    declared: Any = fsdp1.declared_layouts(wrapped)
    optimizer = optimizer_of(groups, layouts=declared, **settings)
    parameters = dict(zip(declared, (p for p in wrapped.parameters()), strict=True))

    def give(gradients: Gradients) -> None:
        for name, gradient in gradients.items():
            assert gradient is not None
            parameters[name].grad = layouts.cut(gradient, declared[name], dist.get_rank())

    return Case(wrapped, optimizer, give, lambda: whole_of(optimizer))


# name: (ranks, how it is made). The order is that in which `make test` goes round.
LAYOUTS: dict[str, tuple[int, Make]] = {
    "one process": (1, model_in("local")),
    "ddp 2": (2, model_in("ddp")),
    "fsdp 4": (4, model_in("fsdp")),
    "shard 1 on 2": (2, model_in("shard1")),
    "hsdp": (4, model_in("hsdp")),
    "tp 2": (2, on_mesh(layouts.dtensors, (2,), alternating)),
    "fsdp over tp": (4, on_mesh(layouts.dtensors, (2, 2), strided_rows)),
    "flat 2": (2, flat()),
    "experts": (4, on_mesh(layouts.dtensors, (2, 2), experts)),
    "declared 2": (2, on_mesh(layouts.declared, (2,), alternating)),
    "flat over tp": (4, flat(2)),
    "fsdp 2": (2, model_in("fsdp")),
    "hsdp, shared state": (4, model_in("hsdp", shard_state=True)),
    "ddp 4": (4, model_in("ddp")),
    "declared over tp": (4, on_mesh(layouts.declared, (2, 2), strided_rows)),
    "fsdp1": (2, of_fsdp1),
    "ddp, shared state": (4, model_in("ddp", shard_state=True)),
    "shard 0 on 2": (2, model_in("shard0")),
    "ddp 4 to owners": (4, to_owners()),
    "ddp 2 to owners": (2, to_owners()),
    "hsdp to owners": (4, to_owners(sharded=True)),
    "ddp on two machines": (4, model_in("ddp", machine=2)),
}


def build(layout: str, source: Source, seed: int = 0, **settings: Any) -> Case:
    """The model of a source in a layout, with its optimizer."""
    return LAYOUTS[layout][1](source, seed, **settings)
