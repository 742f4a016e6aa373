"""Generated layouts on real ranks: parameters and state are bit for bit those of one process.

`make fuzz N=20000` runs more of them, from a new seed; `tests.claims.test_fuzz` plans many more without ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor.placement_types import _StridedShard

import muonmesh as mm
from muonmesh.comm.storage import local_of
from muonmesh.errors import LayoutError, PlanError
from muonmesh.layout import (
    FlatParameter,
    FlatShards,
    Interval,
    Layout,
    MeshLayout,
    Placement,
    Replicate,
    Shard,
)
from tests.support import fuzzing, meshes
from tests.support.fuzzing import COUNT, Placed, contents, stored, torch_placements
from tests.support.reference import split
from tests.support.tensors import same_bits

pytestmark = pytest.mark.slow

STEPS = 2
PADDING = 9.0
"""What lies in a flat buffer where no parameter is."""


@dataclass(frozen=True)
class Model:
    """Parameters that one optimizer steps.

    Attributes:
        held: Where they live; the first on every rank, others perhaps on some.
        declared: For each of ``held`` whether it is a plain local shard with ``layouts=``, where it is not flat.
        gradients: For each parameter and step: given, none, or zero for the first of its matrices.
        drops_zeros: Whether a rank whose part of a gradient is zero, or empty, has none.
        settings: Of the optimizer.
        seed: Of the values.
    """

    held: tuple[Placed, ...]
    declared: tuple[bool, ...]
    gradients: tuple[tuple[str, ...], ...]
    drops_zeros: bool
    settings: dict[str, Any]
    seed: int

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [shape for held in self.held for shape in held.shapes]

    @property
    def specs(self) -> list[Any]:
        return [spec for held in self.held for spec in held.specs]

    def values(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        return [torch.randn(shape, generator=generator) for shape in self.shapes]

    def gradient(self, step: int) -> list[Tensor | None]:
        """Of every parameter, whole, of many magnitudes."""
        generator = torch.Generator().manual_seed(self.seed + 1 + step)
        found: list[Tensor | None] = []
        for number, (shape, spec) in enumerate(zip(self.shapes, self.specs, strict=True)):
            gradient = torch.randn(shape, generator=generator) * 10.0 ** (number % 5 - 2)
            if self.gradients[number][step] == "zero":
                gradient.view(-1)[split(torch.arange(gradient.numel()).reshape(shape), spec)[0]] = 0
            found.append(None if self.gradients[number][step] == "none" else gradient)
        return found


def in_few_orders(held: Placed) -> Placed:
    """With the ranks of a mesh rising or falling: real meshes cost threads, and plans are tried in every order."""
    (target, *others) = held.targets
    if others or not isinstance(target, MeshLayout):
        return held
    ranks = tuple(sorted(target.ranks, reverse=target.ranks[0] > target.ranks[-1]))
    layout = replace(target, ranks=ranks)
    return replace(held, targets=(layout,), sources=(layout,))


@st.composite
def models(draw: st.DrawFn, world: int) -> Model:
    held = []
    for number in range(draw(st.integers(1, 3))):
        holding = fuzzing.in_flat_buffers if draw(st.integers(0, 2)) == 2 else fuzzing.on_mesh
        everywhere = number == 0 or draw(st.integers(0, 3)) < 3
        held.append(draw(holding(range(world), 40, every=everywhere).map(in_few_orders)))
    kinds = st.tuples(*[st.sampled_from(["given", "given", "given", "zero", "none"])] * STEPS)
    settings = {
        "shard_state": draw(st.booleans()),
        "memory_budget_mb": draw(st.sampled_from([None, 0.0, 0.0016, 0.032, 1e6])),
        "nesterov": draw(st.booleans()),
        "state_dtype": draw(st.sampled_from([torch.float32, "int8"])),
    }
    return Model(
        tuple(held),
        tuple(draw(st.booleans()) for _ in held),
        tuple(draw(kinds) for some in held for _ in some.shapes),
        draw(st.booleans()),
        settings,
        draw(st.integers(0, 10**6)),
    )


# ---------------------------------------------------------------- in one process


def optimizer_of(groups: Any, settings: dict[str, Any], **more: Any) -> mm.Muon:
    return mm.Muon(groups, lr=0.02, momentum=0.9, compute_dtype=torch.float32, **settings, **more)


def alone(model: Model) -> tuple[list[Tensor], list[Tensor]]:
    """Weights and momenta, whole, after all steps; a momentum that was never created is zero."""
    parameters = [nn.Parameter(value) for value in model.values()]
    settings = {key: value for key, value in model.settings.items() if key != "shard_state"}
    group = {"params": parameters, "matrices": model.specs}
    optimizer = optimizer_of([group], settings, process_group="local")
    for step in range(STEPS):
        for parameter, gradient in zip(parameters, model.gradient(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    weights = [parameter.detach() for parameter in parameters]
    momenta = [optimizer.state[p].get("momentum_buffer", torch.zeros_like(p)).detach() for p in parameters]
    return weights, momenta


# ---------------------------------------------------------------- on a rank


class Stored(NamedTuple):
    """What a rank stores of one `Placed`, as vectors; the momentum's layouts; no momentum was ever created: None."""

    weights: Tensor
    momentum: Tensor | None
    layouts: tuple[Layout, ...]


Outcome = list[Stored | None] | str
"""What a rank stores of each holding, None where it has no part; or the error, which every rank has to raise."""


def step_all(some: list[Model]) -> list[Outcome]:
    """Step all models on this rank."""
    found: list[Outcome] = []
    for model in some:
        try:
            found.append(step_one(model))
        except (LayoutError, PlanError) as error:
            found.append(str(error))
        except Exception as error:
            error.add_note(f"in {model}")
            raise
    return found


def step_one(model: Model) -> list[Stored | None]:
    rank = dist.get_rank()
    values = in_turn(model, model.values())
    tensors: list[Tensor | None] = []
    layouts: dict[str, Any] = {}
    for number, (held, declared) in enumerate(zip(model.held, model.declared, strict=True)):
        mesh = mesh_of(held.targets[0])  # made by all ranks
        if rank not in held.targets[0].ranks:
            tensors.append(None)
            continue
        tensors.append(nn.Parameter(placed(held, values[number], rank, mesh, declared, PADDING)))
        if isinstance(held.targets[0], FlatShards):
            triples = zip(held.targets, held.specs, strict=True)
            layouts[f"p{number}"] = [
                FlatParameter(f"p{number}.{i}", layout, spec) for i, (layout, spec) in enumerate(triples)
            ]
        elif declared:
            layouts[f"p{number}"] = (mesh, torch_placements(held.targets[0]), held.shapes[0])
    mine = [(number, tensor) for number, tensor in enumerate(tensors) if tensor is not None]
    group = {
        "params": [tensor for _, tensor in mine],
        "param_names": [f"p{number}" for number, _ in mine],
        "matrices": [None if len(model.held[n].specs) > 1 else model.held[n].specs[0] for n, _ in mine],
    }
    optimizer = optimizer_of([group], model.settings, layouts=layouts)
    for step in range(STEPS):
        gradients = in_turn(model, model.gradient(step))
        for number, tensor in mine:
            some = gradients[number]
            tensor.grad = None
            if any(gradient is not None for gradient in some):
                wholes = [
                    torch.zeros(s) if g is None else g for g, s in zip(some, model.held[number].shapes, strict=True)
                ]
                local = placed(model.held[number], wholes, rank, mesh_like(tensor), False, 0.0)
                if not (model.drops_zeros and may_drop(model.held[number], rank, local_of(local))):
                    tensor.grad = local
        optimizer.step()
    found: list[Stored | None] = [None] * len(tensors)
    for number, tensor in mine:
        momentum = optimizer.state[tensor].get("momentum_buffer")
        where = model.held[number].targets
        if isinstance(momentum, DTensor):
            where = (layout_of(momentum),)
        vector = None if momentum is None else local_of(momentum).flatten()
        found[number] = Stored(local_of(tensor).detach().flatten(), vector, where)
    return found


def may_drop(held: Placed, rank: int, local: Tensor) -> bool:
    """Whether a rank may have no gradient in place of this one: it is zero, on the other replicas too."""
    if local.any():
        return False
    flat = [layout for layout in held.targets if isinstance(layout, FlatShards)]
    nothing = not any(length for layout in flat for _, length, _ in layout.intervals[layout.within.ranks.index(rank)])
    return nothing or all(len(layout.replicas) == 1 for layout in flat)


def in_turn(model: Model, values: list[Any]) -> list[list[Any]]:
    """Values of all parameters, by holding."""
    rest = iter(values)
    return [[next(rest) for _ in held.shapes] for held in model.held]


def mesh_of(layout: Layout) -> DeviceMesh | None:
    if not isinstance(layout, MeshLayout):
        return None
    return meshes.mesh_of(layout.mesh, layout.ranks)


def mesh_like(tensor: Tensor) -> DeviceMesh | None:
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def placed(
    held: Placed, wholes: list[Tensor], rank: int, mesh: DeviceMesh | None, declared: bool, padding: float
) -> Tensor:
    """What a rank holds: a DTensor if there is a mesh and it is not declared, a local shard, or a flat buffer."""
    layout = held.targets[0]
    if not isinstance(layout, MeshLayout):
        return contents(held.targets, rank, wholes, padding)
    local = stored(layout, rank, wholes[0])
    if mesh is None or declared:
        return local
    (whole,) = wholes
    return DTensor.from_local(
        local, mesh, torch_placements(layout), run_check=False, shape=whole.shape, stride=whole.stride()
    )


def layout_of(tensor: DTensor) -> MeshLayout:
    found: list[Placement] = []
    for placement in tensor.placements:
        if isinstance(placement, TorchReplicate):
            found.append(Replicate())
        elif isinstance(placement, _StridedShard):
            found.append(Shard(placement.dim, placement.split_factor))
        else:
            found.append(Shard(placement.dim))
    mesh = tensor.device_mesh.mesh
    return MeshLayout(tuple(tensor.shape), tuple(mesh.shape), tuple(mesh.flatten().tolist()), tuple(found))


# ---------------------------------------------------------------- both


def differing(model: Model, outcomes: list[Outcome]) -> list[str]:
    """What differs on which rank from one process; outcomes are by rank."""
    errors = [outcome for outcome in outcomes if isinstance(outcome, str)]
    if errors:
        return sorted(set(errors))
    weights, momenta = (in_turn(model, values) for values in alone(model))
    found = []
    for number, held in enumerate(model.held):
        for rank, outcome in enumerate(outcomes):
            mine = outcome[number]
            assert (mine is not None) == (rank in held.targets[0].ranks)
            if mine is None:
                continue
            if not same_bits(mine.weights, contents(held.targets, rank, weights[number], PADDING)):
                found.append(f"weights of p{number} on rank {rank}")
            expected = contents(mine.layouts, rank, momenta[number], 0.0)
            if not (same_bits(mine.momentum, expected) if mine.momentum is not None else not expected.any()):
                found.append(f"momentum of p{number} on rank {rank}")
    return found


# Ranks: generated models, of one to three holdings each.
MODELS = {2: COUNT // 20, 4: COUNT // 20, 8: COUNT // 80}


@pytest.mark.parametrize("ranks", MODELS)
def test_bit_for_bit_in_generated_layouts(workers, ranks: int) -> None:
    some = sorted(fuzzing.examples(models(ranks), MODELS[ranks]), key=size)
    outcomes = workers(ranks).run(step_all, some, timeout=120 + 2 * len(some))
    wrong = [(differing(model, [rank[number] for rank in outcomes]), model) for number, model in enumerate(some)]
    failures = [pair for pair in wrong if pair[0]]
    assert not failures, f"{len(failures)} of {len(some)} models, the smallest: {failures[0]}"


def size(model: Model) -> int:
    return sum(math.prod(shape) for shape in model.shapes)


def test_a_rank_that_holds_nothing_of_a_flat_replica_needs_no_gradient(workers) -> None:
    """Found by the above: replicas cut differently, so ranks at the same place in them hold different elements."""
    everything = (Interval(0, 2, 0),)
    within = MeshLayout.replicated((1, 2), (0, 1, 2, 3))
    layout = FlatShards(within, ((), everything, everything, ()), (0, 2, 2, 0), replicas=((0, 1), (2, 3)))
    held = Placed(((1, 2),), ("whole",), (layout,), (layout,))
    model = Model((held,), (False,), (("given",) * STEPS,), True, {}, 0)
    outcomes = workers(4).run(step_all, [model])
    assert differing(model, [rank[0] for rank in outcomes]) == []
