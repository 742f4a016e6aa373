"""Generated layouts, mesh and flat: planning simulated against plain slicing, and steps on real ranks.

`make fuzz N=20000` runs more of it, from a new seed.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
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
    Piece,
    Placement,
    Plan,
    Replicate,
    Shard,
    make_plan,
    split_matrices,
)
from tests.support import fuzzing, meshes
from tests.support.fuzzing import COUNT, Case, Placed, canonical, contents, generated, stored, torch_placements
from tests.support.reference import split
from tests.support.tensors import same_bits

pytestmark = pytest.mark.slow


def planned(case: Case) -> Plan:
    fields = [zip(p.shapes, p.specs, p.targets, p.sources, strict=True) for p in case.buffers]
    parameters = [fuzzing.parameter(f"p{n}", *field) for n, field in enumerate(itertools.chain(*fields))]
    return make_plan(parameters, bucket_elements=case.bucket_elements)


def stand_in(matrix: Tensor, rows: int, cols: int) -> Tensor:
    """For the orthogonalization, exact in int64: everything in it depends on every element and on where it is."""
    down, along = torch.arange(1, matrix.shape[0] + 1)[:, None], torch.arange(1, matrix.shape[1] + 1)
    by_row, by_col = (matrix * along).sum(1, keepdim=True), (matrix * down * down).sum(0)
    return 7 * matrix + by_row * along + 3 * by_col * down + (by_row * down).sum() + 1000003 * rows + cols


def updates_of(whole: Tensor, spec: Any) -> Tensor:
    """The stand-in of each matrix, where its elements are in the parameter: gather, compute and scatter, whole."""
    result = torch.zeros(whole.numel(), dtype=torch.int64)
    for at in split(torch.arange(whole.numel()).reshape(whole.shape), spec):
        rows, cols = at.shape
        update = stand_in(canonical(whole.flatten()[at]), rows, cols)
        result[at] = update if rows <= cols else update.mT
    return result.reshape(whole.shape)


class Memory:
    """What every rank stores of the parameters of a case, as source or as target, in one vector a rank and holding."""

    def __init__(self, layouts: Sequence[Sequence[Layout]], wholes: Sequence[Tensor]) -> None:
        self._of: dict[tuple[int, int], Tensor] = {}  # by parameter number and rank; those of a buffer share one
        number = 0
        for group in layouts:
            values = wholes[number : number + len(group)]
            for rank in group[0].ranks:
                memory = contents(group, rank, values, padding=-1 - rank)
                self._of.update({(number + i, rank): memory for i in range(len(group))})
            number += len(group)

    def at(self, parameter: int, rank: int, piece: Piece) -> Tensor:
        return self._of[parameter, rank].as_strided(piece.shape, piece.storage_strides, piece.storage_start)

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Memory)
        return self._of.keys() == other._of.keys() and all(torch.equal(self._of[k], other._of[k]) for k in self._of)


def move(plan: Plan, bucket: int, *, gather: bool, memory: Memory, matrices: dict[int, Tensor]) -> None:
    """Move a bucket as ranks do: each packs and unpacks by its own routes. What arrives is added to what is there."""

    def part_of(leg: Any, rank: int, *, stored: bool) -> Tensor:
        piece = leg.piece
        if stored:
            return memory.at(leg.parameter, rank, piece)
        assert plan.assignments[leg.assignment].owner == rank
        return matrices[leg.assignment].as_strided(piece.shape, piece.matrix_strides, piece.matrix_start)

    routes = {rank: plan.routes(bucket, rank, gather=gather) for rank in plan.ranks}
    moved = {number for number in plan.buckets[bucket] if plan.moves(number)}
    sent: dict[tuple[int, int], Tensor] = {}
    for rank, routes_of_rank in routes.items():
        for peer, legs in (routes_of_rank.stored if gather else routes_of_rank.assembled).items():
            sent[rank, peer] = torch.cat([part_of(leg, rank, stored=gather).flatten() for leg in legs])
            if rank != peer:
                assert plan.gathers(bucket) if gather else plan.scatters(bucket)
                assert all(leg.assignment in moved for leg in legs)
    for rank, routes_of_rank in routes.items():
        for peer, legs in (routes_of_rank.assembled if gather else routes_of_rank.stored).items():
            message = sent.pop((peer, rank))
            parts = message.split([leg.piece.numel for leg in legs])  # without gaps
            for leg, part in zip(legs, parts, strict=True):
                part_of(leg, rank, stored=not gather).add_(part.view(leg.piece.shape))
    assert not sent, "messages that nobody expects"


def check_plan(case: Case) -> None:
    """Gather, compute and scatter by the plan, and compare what every rank then stores with plain slicing."""
    plan = planned(case)
    shapes = [shape for placed in case.buffers for shape in placed.shapes]
    specs = [spec for placed in case.buffers for spec in placed.specs]
    momenta, first = [], 1
    for shape in shapes:  # no two elements alike, none zero
        momenta.append(torch.arange(first, first + torch.Size(shape).numel()).reshape(shape))
        first += momenta[-1].numel()
    updates = [updates_of(whole, spec) for whole, spec in zip(momenta, specs, strict=True)]
    weights = [whole * whole for whole in momenta]

    expected = [m for whole, spec in zip(momenta, specs, strict=True) for m in split(whole, spec)]
    assert [(a.matrix.rows, a.matrix.cols) for a in plan.assignments] == [tuple(m.shape) for m in expected]
    assert sorted(number for bucket in plan.buckets for number in bucket) == list(range(len(expected)))
    loads = dict.fromkeys(plan.ranks, 0)
    for assignment in plan.assignments:
        assert assignment.owner in plan.parameters[assignment.parameter].target.ranks
        loads[assignment.owner] += assignment.flops
    assert plan.loads == loads

    targets = [placed.targets for placed in case.buffers]
    source, target = Memory([placed.sources for placed in case.buffers], momenta), Memory(targets, weights)
    for bucket, numbers in enumerate(plan.buckets):
        matrices = {n: torch.zeros(plan.assignments[n].matrix.shape, dtype=torch.int64) for n in numbers}
        move(plan, bucket, gather=True, memory=source, matrices=matrices)
        for number, matrix in matrices.items():
            assert torch.equal(matrix, canonical(expected[number]))
            matrices[number] = stand_in(matrix, *expected[number].shape)
        move(plan, bucket, gather=False, memory=target, matrices=matrices)
    assert source == Memory([placed.sources for placed in case.buffers], momenta)
    assert target == Memory(targets, [w + u for w, u in zip(weights, updates, strict=True)])


def kinds(case: Case) -> Iterator[str]:
    yield "all"
    for placed in case.buffers:
        for shape, spec, target, source in zip(
            placed.shapes, placed.specs, placed.targets, placed.sources, strict=True
        ):
            yield from (form for form in FORMS if form in str(spec))
            if "interleaved', (" in str(spec):
                yield "unequal runs"
            if str(spec).count("(") > 1:
                yield "nested"
            if max(shape) > 100:
                yield "large"
            if target is not source:
                yield f"momentum elsewhere, {type(source).__name__}"
            if isinstance(target, FlatShards):
                yield "flat" if all(isinstance(p, Replicate) for p in placements_of(target.within)) else "flat shards"
                yield from flat_kinds(target)
                if len(placed.targets) > 1:
                    yield "several in a buffer"
            elif isinstance(target, MeshLayout):
                yield f"{len(target.mesh)} axes"
                yield from {str(placement).partition("(")[0] for placement in target.placements}
                yield from mesh_kinds(target)


def mesh_kinds(layout: MeshLayout) -> Iterator[str]:
    pieces = [stored(layout, rank, torch.empty(layout.shape, dtype=torch.bool)) for rank in layout.ranks]
    if len({piece.shape for piece in pieces}) > 1:
        yield "uneven"
    if not all(piece.numel() for piece in pieces):
        yield "empty"
    if sum(piece.numel() for piece in pieces) > torch.Size(layout.shape).numel():
        yield "replicas"


def flat_kinds(layout: FlatShards) -> Iterator[str]:
    lengths = [[interval.length for interval in intervals if interval.length] for intervals in layout.intervals]
    if not all(lengths):
        yield "a rank with nothing"
    if max(map(len, lengths)) > 1:
        yield "several intervals"
    if len(layout.replicas) > 1:
        yield "flat replicas"
    if layout.replicas[0] != layout.ranks and len(layout.replicas) == 1:
        yield "flat, cut up among all"


def placements_of(layout: Layout) -> tuple[Any, ...]:
    assert isinstance(layout, MeshLayout)
    return layout.placements


FORMS = ("whole", "rows", "cols", "heads", "interleaved", "transposed", "stack", "flatten")
SPLITS = (*FORMS, "unequal runs", "nested", "large")
ON_MESH = ("1 axes", "2 axes", "3 axes", "4 axes", "Replicate", "Shard", "StridedShard", "uneven", "empty", "replicas")
ELSEWHERE = ("momentum elsewhere, MeshLayout", "momentum elsewhere, FlatShards")
FLAT = ("flat", "flat shards", "a rank with nothing", "several intervals", "flat replicas", "several in a buffer")


@pytest.mark.parametrize(
    ("holding", "share", "expected"),
    [
        (fuzzing.on_mesh, 0.4, (*SPLITS, *ON_MESH)),
        (fuzzing.with_momentum_elsewhere, 0.3, (*SPLITS, *ON_MESH, *ELSEWHERE)),
        (fuzzing.in_flat_buffers, 0.3, (*SPLITS, *FLAT)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_planning_is_plain_slicing(holding: Any, share: float, expected: Sequence[str]) -> None:
    """At least ``COUNT`` different layouts in all, with enough of each kind."""
    hashes: dict[str, set[int]] = defaultdict(set)

    count = share * COUNT

    def check_once(case: Case) -> None:
        if hash(case) in hashes["all"] or len(hashes["all"]) >= count:
            return
        check_plan(case)
        for kind in kinds(case):
            hashes[kind].add(hash(case))

    generated(fuzzing.cases(holding), int(1.25 * count) + 1)(check_once)()  # a few are drawn twice
    assert len(hashes["all"]) >= int(count)
    if count >= 500:
        assert [kind for kind in expected if len(hashes[kind]) < count / 20] == []


@generated(st.one_of(fuzzing.on_mesh(), fuzzing.in_flat_buffers()), COUNT // 8)
def test_what_layouts_say_of_themselves(placed: Placed) -> None:
    for shape, spec, layout in zip(placed.shapes, placed.specs, placed.targets, strict=True):
        whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
        memory = {rank: contents([layout], rank, [whole], padding=-1) for rank in layout.ranks}
        for rank in layout.ranks:
            flat = isinstance(layout, FlatShards)
            local = memory[rank] if flat else stored(layout, rank, whole)
            assert layout.local_shape(rank) == tuple(local.shape)
            replica = layout.replica(rank)
            assert rank in replica
            parts = torch.cat([memory[other] for other in replica])
            assert torch.equal(parts[parts >= 0].sort().values, whole.flatten())
        assert sum(int((m >= 0).sum()) for m in memory.values()) == layout.copies() * whole.numel()
        strided = isinstance(layout, MeshLayout) and any(getattr(p, "split_factor", 1) > 1 for p in layout.placements)
        matrices = split_matrices("w", shape, spec)
        for block in matrices[len(matrices) // 2].blocks[:5]:
            triples = zip(block.region.offset, block.region.shape, block.region.step, strict=True)
            elements = whole[tuple(slice(o, o + (n - 1) * s + 1, s) for o, n, s in triples)].flatten()
            holders = {rank for rank in layout.ranks if bool(torch.isin(elements, memory[rank]).all())}
            ranks = set(layout.holders(block.region))
            # a region in two runs of an interleaved shard need not count as held
            assert ranks <= holders if strided else ranks == holders


@generated(st.tuples(fuzzing.in_flat_buffers(), st.randoms(use_true_random=False)), COUNT // 8)
def test_flat_shards_that_do_not_cover_are_refused(drawn: tuple[Placed, random.Random]) -> None:
    placed, choice = drawn
    layout = choice.choice(placed.targets)
    assert isinstance(layout, FlatShards)
    layout.prove_cover()
    rank = choice.choice([rank for rank, pieces in enumerate(layout.intervals) if any(i.length for i in pieces)])
    pieces = list(layout.intervals[rank])
    broken = pieces.pop(choice.choice([number for number, interval in enumerate(pieces) if interval.length]))
    wrong = choice.choice(["missing", "twice", "short"])
    if wrong == "twice":
        pieces += [broken, broken]
    elif wrong == "short":
        pieces.append(broken._replace(length=broken.length - 1))
    intervals = (*layout.intervals[:rank], tuple(pieces), *layout.intervals[rank + 1 :])
    with pytest.raises(LayoutError, match="held"):
        replace(layout, intervals=intervals).prove_cover()


# ---------------------------------------------------------------- on ranks: the bits of one process


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


def fuzzed_optimizer(groups: Any, settings: dict[str, Any], **more: Any) -> mm.Muon:
    return mm.Muon(groups, lr=0.02, momentum=0.9, compute_dtype=torch.float32, **settings, **more)


def fuzzed_in_one_process(model: Model) -> tuple[list[Tensor], list[Tensor]]:
    """Weights and momenta, whole, after all steps; a momentum that was never created is zero."""
    parameters = [nn.Parameter(value) for value in model.values()]
    settings = {key: value for key, value in model.settings.items() if key != "shard_state"}
    group = {"params": parameters, "matrices": model.specs}
    optimizer = fuzzed_optimizer([group], settings, process_group="local")
    for step in range(STEPS):
        for parameter, gradient in zip(parameters, model.gradient(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    weights = [parameter.detach() for parameter in parameters]
    dtype = torch.int8 if settings.get("state_dtype") == "int8" else None
    momenta = [optimizer.state[p].get("momentum_buffer", torch.zeros_like(p, dtype=dtype)) for p in parameters]
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
        tensors.append(nn.Parameter(held_on_rank(placed_tensors, values[number], rank, mesh, declared, PADDING)))
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
    optimizer = fuzzed_optimizer([group], model.settings, layouts=layouts)
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
                local = held_on_rank(model.placed[number], wholes, rank, mesh_like(tensor), False, 0.0)
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


def held_on_rank(
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


def differing_by_rank(model: Model, outcomes: list[Outcome]) -> list[str]:
    """What differs on which rank from one process; outcomes are by rank."""
    errors = [outcome for outcome in outcomes if isinstance(outcome, str)]
    if errors:
        return sorted(set(errors))
    weights, momenta = (in_turn(model, values) for values in fuzzed_in_one_process(model))
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
    wrong = [
        (differing_by_rank(model, [rank[number] for rank in outcomes]), model) for number, model in enumerate(examples)
    ]
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
    assert differing_by_rank(model, [rank[0] for rank in outcomes]) == []
