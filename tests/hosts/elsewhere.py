"""The model of `tests.hosts.deepspeed_engine` without DeepSpeed, in every kind of layout there is."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement

import muonmesh as mm
from tests.hosts import deepspeed_engine as ds
from tests.support import layouts
from tests.support.layouts import R, S, strided
from tests.support.meshes import mesh_of

Parameters = dict[str, tuple[tuple[int, ...], Any]]
Groups = list[dict[str, Any]]
Hold = Callable[[Parameters, dict[str, Tensor], Groups], layouts.Held]


def with_tensors(groups: Groups, tensors: dict[str, Tensor]) -> Groups:
    return [{**group, "params": [tensors[name] for name in group["param_names"]]} for group in groups]


def replicas(process_group: str, parameters: Parameters, values: dict[str, Tensor], groups: Groups) -> layouts.Held:
    """Plain tensors that every rank has whole."""
    tensors: dict[str, Tensor] = {name: nn.Parameter(value.clone()) for name, value in values.items()}

    def give(gradients: dict[str, Tensor | None]) -> None:
        for name, tensor in tensors.items():
            tensor.grad = gradients[name]

    def whole(optimizer: Any) -> dict[str, Tensor]:
        state = {f"{n}.{key}": value for n, p in tensors.items() for key, value in optimizer.state[p].items()}
        return layouts.gathered.whole({**tensors, **state})

    return layouts.Held(with_tensors(groups, tensors), {"process_group": process_group}, give, whole, tensors)


def on_mesh(
    hold: Any,
    sizes: tuple[int, ...],
    placements_at: Callable[[int, int], Sequence[Placement]],
    parameters: Parameters,
    values: dict[str, Tensor],
    groups: Groups,
) -> layouts.Held:
    """Placed by number and dims of a parameter."""
    numbers = {name: number for number, name in enumerate(parameters)}

    def placements(name: str, shape: tuple[int, ...]) -> Sequence[Placement]:
        return placements_at(numbers[name], len(shape))

    layout: layouts.Held = hold(parameters, values, mesh_of(sizes), placements)
    layout.groups = with_tensors(groups, layout.tensors)
    return layout


def by_turns(number: int, dims: int) -> Sequence[Placement]:
    return [S(number % 2 % dims)]


def over_tensor_parallel(number: int, dims: int) -> Sequence[Placement]:
    return [strided(0, 2), S(0)] if number % 2 else [S(0), S(dims - 1)]


def flat(tensor_parallel: int, parameters: Parameters, values: dict[str, Tensor], split_groups: Groups) -> layouts.Held:
    """A buffer for each group."""
    parts: list[layouts.Held] = []
    groups, declared, tensors = list[dict[str, Any]](), dict[str, Any](), dict[str, Tensor]()
    for group in split_groups:
        names, name = group["param_names"], group["name"]
        members = {n: parameters[n] for n in names}, {n: values[n] for n in names}
        part = layouts.flat(*members, tensor_parallel=tensor_parallel, seed=tensor_parallel)
        parts.append(part)
        (tensors[name],), (declared[name],) = part.tensors.values(), part.settings["layouts"].values()
        settings = {key: value for key, value in group.items() if key not in ("matrices", "reasons")}
        groups.append({**settings, "params": [tensors[name]], "param_names": [name]})

    def give(gradients: dict[str, Tensor | None]) -> None:
        for part in parts:
            part.give(gradients)

    def whole(optimizer: Any) -> dict[str, Tensor]:
        return {name: value for part in parts for name, value in part.whole(optimizer).items()}

    return layouts.Held(groups, {"layouts": declared}, give, whole, tensors)


def held_on(hold: Any, sizes: tuple[int, ...], placements_at: Callable[[int, int], Sequence[Placement]]) -> Hold:
    return functools.partial(on_mesh, hold, sizes, placements_at)


# name: (ranks, how it is held, what else the optimizer is told)
LAYOUTS: dict[str, tuple[int, Hold, dict[str, Any]]] = {
    "one process": (1, functools.partial(replicas, "local"), {}),
    "ddp 2": (2, functools.partial(replicas, "world"), {}),
    "ddp 4": (4, functools.partial(replicas, "world"), {}),
    "ddp, shared state": (4, functools.partial(replicas, "world"), {"shard_state": True}),
    "shard 1 on 2": (2, held_on(layouts.dtensors, (2,), lambda number, dims: [S(dims - 1)]), {}),
    "hsdp": (4, held_on(layouts.dtensors, (2, 2), lambda number, dims: [R, S(0)]), {}),
    "hsdp, shared state": (4, held_on(layouts.dtensors, (2, 2), lambda number, dims: [R, S(0)]), {"shard_state": True}),
    "tp 2": (2, held_on(layouts.dtensors, (2,), by_turns), {}),
    "fsdp over tp": (4, held_on(layouts.dtensors, (2, 2), over_tensor_parallel), {}),
    "declared 2": (2, held_on(layouts.declared, (2,), by_turns), {}),
    "declared over tp": (4, held_on(layouts.declared, (2, 2), over_tensor_parallel), {}),
    "flat 2": (2, functools.partial(flat, 1), {}),
    "flat over tp": (4, functools.partial(flat, 2), {}),
}


class Elsewhere:
    """What `ds.OneProcess` does, in a layout; a module with the same names, but that flat buffers have their own."""

    def __init__(self, layout: str) -> None:
        _, hold, settings = LAYOUTS[layout]
        self.model = ds.build()
        split = {key: ds.OPTIMIZER[key] for key in ("overrides", "adamw")}
        groups = mm.split_params(self.model, **split)
        parameters: Parameters = {}
        for group in groups:
            specs = group.get("matrices") or ["adamw"] * len(group["params"])
            for name, spec in zip(group["param_names"], specs, strict=True):
                parameters[name] = ds.SHAPES[name], spec or "whole"
        values = ds.values()
        self._placed = hold(parameters, {name: values[name] for name in parameters}, groups)
        shared = {key: ds.OPTIMIZER[key] for key in ("lr", "momentum")}
        self.optimizer = mm.Muon(
            self._placed.groups, compute_dtype=torch.float32, **shared, **self._placed.settings, **settings
        )
        self._names = list(parameters)
        for name in self._names:
            module, _, leaf = name.rpartition(".")
            if name in self._placed.tensors:
                setattr(self.model.get_submodule(module), leaf, self._placed.tensors[name])
            else:
                delattr(self.model.get_submodule(module), leaf)
        for name, tensor in self._placed.tensors.items():
            if name not in self._names:  # a flat buffer
                self.model.register_parameter(name.replace(".", "_"), tensor)  # type: ignore[arg-type]

    def train(self, steps: range) -> None:
        for step in steps:
            gradients = ds.reduced(step, 1, sources=2)
            self._placed.give({name: gradients[name] for name in self._names})
            self.optimizer.step()

    def tensors(self) -> dict[str, Tensor]:
        whole = self._placed.whole(self.optimizer)
        tensors = {name: whole[name].detach() for name in self._names}
        for name in self._names:
            tensors |= {f"{name}.{key}": whole[f"{name}.{key}"] for key in ds.STATE if f"{name}.{key}" in whole}
        return tensors


def save(layout: str, folder: str) -> None:
    """Train half of the steps and save with `muonmesh.checkpoint`."""
    case = Elsewhere(layout)
    case.train(range(ds.STEPS // 2))
    mm.checkpoint.save(folder, case.model, case.optimizer)


def load(layout: str, folder: str) -> dict[str, Tensor]:
    """Load that into what has trained on something else, train the other half and return weights and state."""
    case = Elsewhere(layout)
    case.train(range(1, 2))
    mm.checkpoint.load(folder, case.model, case.optimizer)
    case.train(range(ds.STEPS // 2, ds.STEPS))
    return case.tensors()
