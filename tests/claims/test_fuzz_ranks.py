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
        placed: Where they live; the first on every rank, others perhaps on some.
        declared: For each of ``placed`` whether it is a plain local shard with ``layouts=``, where it is not flat.
        gradients: For each parameter and step: given, none, or zero for the first of its matrices.
        drops_zeros: Whether a rank whose part of a gradient is zero, or empty, has none.
        settings: Of the optimizer.
        seed: Of the values.
    """

    placed: tuple[Placed, ...]
    declared: tuple[bool, ...]
    gradients: tuple[tuple[str, ...], ...]
    drops_zeros: bool
    settings: dict[str, Any]
    seed: int

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [shape for placed_tensors in self.placed for shape in placed_tensors.shapes]

    @property
    def specs(self) -> list[Any]:
        return [spec for placed_tensors in self.placed for spec in placed_tensors.specs]

    def values(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        return [torch.randn(shape, generator=generator) for shape in self.shapes]

    def gradient(self, step: int) -> list[Tensor | None]:
        """Of every parameter, whole, of many magnitudes."""
        generator = torch.Generator().manual_seed(self.seed + 1 + step)
        gradients: list[Tensor | None] = []
        for number, (shape, spec) in enumerate(zip(self.shapes, self.specs, strict=True)):
            gradient = torch.randn(shape, generator=generator) * 10.0 ** (number % 5 - 2)
            if self.gradients[number][step] == "zero":
                gradient.view(-1)[split(torch.arange(gradient.numel()).reshape(shape), spec)[0]] = 0
            gradients.append(None if self.gradients[number][step] == "none" else gradient)
        return gradients


def in_few_orders(placed_tensors: Placed) -> Placed:
    """With the ranks of a mesh rising or falling: real meshes cost threads, and plans are tried in every order."""
    (target, *others) = placed_tensors.targets
    if others or not isinstance(target, MeshLayout):
        return placed_tensors
    ranks = tuple(sorted(target.ranks, reverse=target.ranks[0] > target.ranks[-1]))
    layout = replace(target, ranks=ranks)
    return replace(placed_tensors, targets=(layout,), sources=(layout,))


@st.composite
def models(draw: st.DrawFn, world: int) -> Model:
    placed_tensors = []
    for number in range(draw(st.integers(1, 3))):
        holding = fuzzing.in_flat_buffers if draw(st.integers(0, 2)) == 2 else fuzzing.on_mesh
        everywhere = number == 0 or draw(st.integers(0, 3)) < 3
        placed_tensors.append(draw(holding(range(world), 40, every=everywhere).map(in_few_orders)))
    kinds = st.tuples(*[st.sampled_from(["given", "given", "given", "zero", "none"])] * STEPS)
    settings = {
        "shard_state": draw(st.booleans()),
        "memory_budget_mb": draw(st.sampled_from([None, 0.0, 0.0016, 0.032, 1e6])),
        "nesterov": draw(st.booleans()),
        "state_dtype": draw(st.sampled_from([torch.float32, "int8"])),
    }
    return Model(
        tuple(placed_tensors),
        tuple(draw(st.booleans()) for _ in placed_tensors),
        tuple(draw(kinds) for member in placed_tensors for _ in member.shapes),
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


def step_all(models: list[Model]) -> list[Outcome]:
    """Step all models on this rank."""
    outcomes: list[Outcome] = []
    for model in models:
        try:
            outcomes.append(step_one(model))
        except (LayoutError, PlanError) as error:
            outcomes.append(str(error))
        except Exception as error:
            error.add_note(f"in {model}")
            raise
    return outcomes


def step_one(model: Model) -> list[Stored | None]:
    rank = dist.get_rank()
    values = in_turn(model, model.values())
    tensors: list[Tensor | None] = []
    layouts: dict[str, Any] = {}
    for number, (placed_tensors, declared) in enumerate(zip(model.placed, model.declared, strict=True)):
        mesh = mesh_of(placed_tensors.targets[0])  # made by all ranks
        if rank not in placed_tensors.targets[0].ranks:
            tensors.append(None)
            continue
        tensors.append(nn.Parameter(placed(placed_tensors, values[number], rank, mesh, declared, PADDING)))
        if isinstance(placed_tensors.targets[0], FlatShards):
            triples = zip(placed_tensors.targets, placed_tensors.specs, strict=True)
            layouts[f"p{number}"] = [
                FlatParameter(f"p{number}.{i}", layout, spec) for i, (layout, spec) in enumerate(triples)
            ]
        elif declared:
            layouts[f"p{number}"] = (mesh, torch_placements(placed_tensors.targets[0]), placed_tensors.shapes[0])
    local_tensors = [(number, tensor) for number, tensor in enumerate(tensors) if tensor is not None]
    group = {
        "params": [tensor for _, tensor in local_tensors],
        "param_names": [f"p{number}" for number, _ in local_tensors],
        "matrices": [None if len(model.placed[n].specs) > 1 else model.placed[n].specs[0] for n, _ in local_tensors],
    }
    optimizer = optimizer_of([group], model.settings, layouts=layouts)
    for step in range(STEPS):
        gradients = in_turn(model, model.gradient(step))
        for number, tensor in local_tensors:
            gradients_of_step = gradients[number]
            tensor.grad = None
            if any(gradient is not None for gradient in gradients_of_step):
                wholes = [
                    torch.zeros(s) if g is None else g
                    for g, s in zip(gradients_of_step, model.placed[number].shapes, strict=True)
                ]
                local = placed(model.placed[number], wholes, rank, mesh_like(tensor), False, 0.0)
                if not (model.drops_zeros and may_drop(model.placed[number], rank, local_of(local))):
                    tensor.grad = local
        optimizer.step()
    outcome: list[Stored | None] = [None] * len(tensors)
    for number, tensor in local_tensors:
        momentum = optimizer.state[tensor].get("momentum_buffer")
        layouts_of_momentum = model.placed[number].targets
        if isinstance(momentum, DTensor):
            layouts_of_momentum = (layout_of(momentum),)
        vector = None if momentum is None else local_of(momentum).flatten()
        outcome[number] = Stored(local_of(tensor).detach().flatten(), vector, layouts_of_momentum)
    return outcome


def may_drop(placed_tensors: Placed, rank: int, local: Tensor) -> bool:
    """Whether a rank may have no gradient in place of this one: it is zero, on the other replicas too."""
    if local.any():
        return False
    flat = [layout for layout in placed_tensors.targets if isinstance(layout, FlatShards)]
    nothing = not any(length for layout in flat for _, length, _ in layout.intervals[layout.within.ranks.index(rank)])
    return nothing or all(len(layout.replicas) == 1 for layout in flat)


def in_turn(model: Model, values: list[Any]) -> list[list[Any]]:
    """Values of all parameters, by holding."""
    rest = iter(values)
    return [[next(rest) for _ in placed_tensors.shapes] for placed_tensors in model.placed]


def mesh_of(layout: Layout) -> DeviceMesh | None:
    if not isinstance(layout, MeshLayout):
        return None
    return meshes.mesh_of(layout.mesh, layout.ranks)


def mesh_like(tensor: Tensor) -> DeviceMesh | None:
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def placed(
    placed_tensors: Placed, wholes: list[Tensor], rank: int, mesh: DeviceMesh | None, declared: bool, padding: float
) -> Tensor:
    """What a rank holds: a DTensor if there is a mesh and it is not declared, a local shard, or a flat buffer."""
    layout = placed_tensors.targets[0]
    if not isinstance(layout, MeshLayout):
        return contents(placed_tensors.targets, rank, wholes, padding)
    local = stored(layout, rank, wholes[0])
    if mesh is None or declared:
        return local
    (whole,) = wholes
    return DTensor.from_local(
        local, mesh, torch_placements(layout), run_check=False, shape=whole.shape, stride=whole.stride()
    )


def layout_of(tensor: DTensor) -> MeshLayout:
    placements: list[Placement] = []
    for placement in tensor.placements:
        if isinstance(placement, TorchReplicate):
            placements.append(Replicate())
        elif isinstance(placement, _StridedShard):
            placements.append(Shard(placement.dim, placement.split_factor))
        else:
            placements.append(Shard(placement.dim))
    mesh = tensor.device_mesh.mesh
    return MeshLayout(tuple(tensor.shape), tuple(mesh.shape), tuple(mesh.flatten().tolist()), tuple(placements))


# ---------------------------------------------------------------- both


def differing(model: Model, outcomes: list[Outcome]) -> list[str]:
    """What differs on which rank from one process; outcomes are by rank."""
    errors = [outcome for outcome in outcomes if isinstance(outcome, str)]
    if errors:
        return sorted(set(errors))
    weights, momenta = (in_turn(model, values) for values in alone(model))
    differences = []
    for number, placed_tensors in enumerate(model.placed):
        for rank, outcome in enumerate(outcomes):
            stored_tensors = outcome[number]
            assert (stored_tensors is not None) == (rank in placed_tensors.targets[0].ranks)
            if stored_tensors is None:
                continue
            if not same_bits(stored_tensors.weights, contents(placed_tensors.targets, rank, weights[number], PADDING)):
                differences.append(f"weights of p{number} on rank {rank}")
            expected = contents(stored_tensors.layouts, rank, momenta[number], 0.0)
            if not (
                same_bits(stored_tensors.momentum, expected)
                if stored_tensors.momentum is not None
                else not expected.any()
            ):
                differences.append(f"momentum of p{number} on rank {rank}")
    return differences


# Ranks: generated models, of one to three holdings each.
MODELS = {2: COUNT // 20, 4: COUNT // 20, 8: COUNT // 80}


@pytest.mark.parametrize("ranks", MODELS)
def test_bit_for_bit_in_generated_layouts(workers, ranks: int) -> None:
    examples = sorted(fuzzing.examples(models(ranks), MODELS[ranks]), key=size)
    outcomes = workers(ranks).run(step_all, examples, timeout=120 + 2 * len(examples))
    wrong = [(differing(model, [rank[number] for rank in outcomes]), model) for number, model in enumerate(examples)]
    failures = [pair for pair in wrong if pair[0]]
    assert not failures, f"{len(failures)} of {len(examples)} models, the smallest: {failures[0]}"


def size(model: Model) -> int:
    return sum(math.prod(shape) for shape in model.shapes)


def test_a_rank_that_holds_nothing_of_a_flat_replica_needs_no_gradient(workers) -> None:
    """Found by the above: replicas cut differently, so ranks at the same place in them hold different elements."""
    intervals = (Interval(0, 2, 0),)
    within = MeshLayout.replicated((1, 2), (0, 1, 2, 3))
    layout = FlatShards(within, ((), intervals, intervals, ()), (0, 2, 2, 0), replicas=((0, 1), (2, 3)))
    placed_tensors = Placed(((1, 2),), ("whole",), (layout,), (layout,))
    model = Model((placed_tensors,), (False,), (("given",) * STEPS,), True, {}, 0)
    outcomes = workers(4).run(step_all, [model])
    assert differing(model, [rank[0] for rank in outcomes]) == []
