"""Schedules: the memory that they take, and how few copies and messages. Ranks that exchange are in other tests."""

from __future__ import annotations

import math
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from muonmesh.comm.schedule import Batch, Gather, Scatter, Schedule, Stage
from muonmesh.comm.step_callbacks import Batching
from muonmesh.comm.views import Elements
from muonmesh.layout import (
    Budget,
    FlatShards,
    MeshLayout,
    Parameter,
    Placement,
    Plan,
    Replicate,
    Shard,
    make_plan,
)
from muonmesh.layout import split_matrices as split
from muonmesh.numerics.kernels import threads

COVERS = (
    "comm.schedule.Schedule",
    "comm.views.Elements",
    "comm.step_callbacks.Batching",
    "comm.schedule.stages_of",
)

CPU = torch.device("cpu")

# name: (mesh, placements, shape, matrices)
CASES: dict[str, tuple[tuple[int, ...], tuple[Placement, ...], tuple[int, ...], object]] = {
    "rows": ((4,), (Shard(0),), (16, 6), None),
    "rows, tall": ((4,), (Shard(0),), (24, 6), None),
    "uneven rows": ((4,), (Shard(0),), (10, 12), None),
    "columns": ((4,), (Shard(1),), (6, 16), None),
    "replicas": ((4,), (Replicate(),), (5, 7), None),
    "replicas of rows": ((2, 2), (Replicate(), Shard(0)), (8, 10), None),
    "rows of columns": ((2, 2), (Shard(0), Shard(1)), (7, 9), None),
    "strided": ((2, 2), (Shard(0, 2), Shard(0)), (16, 5), None),
    "fused": ((4,), (Shard(0),), (24, 8), ("rows", 8, 12, 4)),
    "stack": ((4,), (Shard(0),), (6, 8, 5), "stack"),
    "interleaved": ((4,), (Shard(0),), (16, 8), ("interleaved", 2, 0)),
    "replicas inside": ((2, 2), (Shard(0), Replicate()), (8, 10), None),
}
LARGER: dict[str, tuple[tuple[int, ...], tuple[Placement, ...], tuple[int, ...], object]] = {
    "eight replicas": ((8,), (Replicate(),), (5, 7), None),
    "replicas of pairs": ((4, 2), (Replicate(), Shard(0)), (8, 10), None),
    "pairs of replicas": ((2, 4), (Replicate(), Shard(1)), (8, 10), ("rows", 3, 5)),
    "replicas of an uneven cut": ((2, 2, 2), (Replicate(), Shard(0), Replicate()), (1, 10), None),
}


def plan_of(name: str, *, bucket_elements: int, count: int = 5, budget: Budget | None = None) -> Plan:
    mesh, placements, shape, spec = (CASES | LARGER)[name]
    layout = MeshLayout(shape, mesh, tuple(range(math.prod(mesh))), placements)
    parameters = []
    for number in range(count):
        matrices = split(f"{name} {number}", shape, spec)
        parameters.append(Parameter(f"{name} {number}", layout, layout, matrices, (1,) * len(matrices), ""))
    # Cut like nothing else, so that segments of the wire that have equal pieces of a matrix are not at equal distances.
    borders = [0, 5, 30, 31, *[63] * (len(layout.ranks) - 3)]
    flat = FlatShards.cut((7, 9), layout.ranks, borders)
    parameters.append(Parameter("flat", flat, flat, split("flat", (7, 9), None), (1,), ""))
    return make_plan(parameters, bucket_elements=bucket_elements, budget=budget or Budget())


class Own(Schedule):
    """With memory of its own, although all ranks are in one thread."""

    def _memory(self, role: str, number: int, numel: int) -> Tensor:
        return super()._memory(f"{role} of {id(self)}", number, numel)


def schedules(plan: Plan, batching: Batching | None = None) -> list[Schedule]:
    return [Own(plan, rank, plan.ranks, torch.float64, CPU, batching) for rank in plan.ranks]


class Computed(NamedTuple):
    """A stage up to its results."""

    stage: Stage
    gather: Gather
    batches: tuple[Batch, ...]

    @property
    def results(self) -> list[Tensor]:
        return [out for _, out, *_ in self.batches]


def stages_of(schedule: Schedule) -> list[Computed]:
    gathers = [schedule.gather(stage) for stage in schedule.stages]
    pairs = zip(schedule.stages, gathers, strict=True)
    return [Computed(stage, gather, schedule.batches(stage, gather.matrices)) for stage, gather in pairs]


def exchanges_of(schedule: Schedule, back: Computed) -> list[Scatter]:
    """The exchanges that bring the results of a stage back; results are freed as soon as a step frees them."""
    scatters, results, received, sent = list[Scatter](), back.results, None, None
    for index in range(len(back.stage.back)):
        scatters.append(scatter := schedule.scatter(back.stage, index, results, received, sent))
        received, sent = scatter.all_to_all.receive, scatter.all_to_all.send if scatter.again else None
        results = [] if scatter.last else results
    return scatters


def kept_by(schedule: Schedule) -> dict[str, Tensor]:
    """The memory that a thread keeps when it has taken a step, by role."""

    def replay() -> dict[str, Tensor]:
        for back in stages_of(schedule):
            exchanges_of(schedule, back)
        return {role: views[None] for (role, _), views in vars(threads._thread_local).get("scratch", {}).items()}

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(replay).result()


def test_matrices_of_one_rank_are_local_and_sorted_by_shape() -> None:
    layouts = [MeshLayout.replicated(shape, (0,)) for shape in ((4, 6), (5, 5), (6, 4), (4, 6))]
    parameters = [
        Parameter(str(i), layout, layout, split(str(i), layout.shape, None), (1,), "")
        for i, layout in enumerate(layouts)
    ]
    schedule = Schedule(make_plan(parameters, bucket_elements=1), 0, (0,), torch.float32, CPU)
    assert schedule.stages == []
    shapes = [{parameters[number].matrices[0].shape for number in alike.assignments} for alike in schedule.trailing]
    assert sorted(len(alike.assignments) for alike in schedule.trailing) == [1, 3]  # a tall matrix is assembled wide
    assert sorted(shapes, key=str) == [{(4, 6)}, {(5, 5)}]


@pytest.mark.parametrize("name", CASES)
def test_memory_is_taken_for_two_buckets_however_many_there_are(name: str) -> None:
    few, many = (
        sum(tensor.numel() for tensor in kept_by(schedules(plan_of(name, bucket_elements=1, count=count))[0]).values())
        for count in (12, 48)
    )
    assert few == many


@pytest.mark.parametrize("name", [*CASES, *LARGER])
@pytest.mark.parametrize("bucket", [70, 200, 1000])
def test_what_a_cpu_keeps_is_within_the_budget(name: str, bucket: int) -> None:
    """Where the largest matrix, of 63 elements or 80, fits a bucket; float64 buffers are counted as they are taken."""
    first = plan_of(name, bucket_elements=1)
    gathers = Budget.of(first.parameters, 0, itemsize=8, host=True).gathers
    budget = Budget(bucket * 8 * (16 if gathers else 12), 8, gathers, host=True)
    assert budget.bucket_elements == bucket
    plan = plan_of(name, bucket_elements=bucket, budget=budget)
    if max(a.matrix.numel for a in plan.assignments) <= bucket:
        for schedule in schedules(plan):
            memory = sum(tensor.nbytes for tensor in kept_by(schedule).values())
            assert memory <= budget.bytes - 4 * 8 * bucket  # which are left to what threads compute in


def test_equal_shards_arrive_and_leave_in_one_copy() -> None:
    """A step's Python does not grow with the number of ranks that hold a matrix."""
    layout = MeshLayout((128, 64), (64,), tuple(range(64)), (Shard(0),))
    matrices = [split(str(number), (128, 64), None) for number in range(128)]
    parameters = [Parameter(str(number), layout, layout, m, (1,), "") for number, m in enumerate(matrices)]
    plan = make_plan(parameters, bucket_elements=10**6)
    (computed,) = stages_of(schedule := Schedule(plan, 9, plan.ranks, torch.float32, CPU))
    (once,) = exchanges_of(schedule, computed)
    assert sum(map(len, computed.stage.batches)) == 2
    reads, *writes = (
        len(table.rows) for table in (computed.gather.reads.table, computed.stage.staying, once.arrived.table)
    )
    assert reads == sum(writes) == 128
    assert len(computed.gather.arriving) == len(once.leaving) == 2 * 2  # the ranks before this one, and those behind it


def test_results_for_many_replicas_are_passed_on() -> None:
    """Nobody sends or receives more at once than it would compute, however many replicas there are."""
    for mesh, placements in (((16,), (Replicate(),)), ((8, 4), (Replicate(), Shard(0)))):
        ranks = tuple(range(math.prod(mesh)))
        layout = MeshLayout((64, 96), mesh, ranks, placements)
        matrices = [split(str(number), (64, 96), None) for number in range(len(ranks))]
        parameters = [Parameter(str(number), layout, layout, m, (1,), "") for number, m in enumerate(matrices)]
        plan = make_plan(parameters, bucket_elements=1000)
        assert len(plan.buckets) == 1
        schedule = Schedule(plan, 3, plan.ranks, torch.float32, CPU)
        (computed,) = stages_of(schedule)
        exchanges = exchanges_of(schedule, computed)
        assert all(
            max(len(exchange.all_to_all.send), len(exchange.all_to_all.receive)) <= 64 * 96 for exchange in exchanges
        )
        assert sum(tensor.numel() for tensor in kept_by(schedule).values()) <= (2 + 2 + 2 + 2) * 64 * 96
        # Nothing that two ranks exchange is cut: what this rank stores of each matrix comes once.
        arrived = [row.assignment for exchange in exchanges for row, _ in exchange.arrived]
        staying = [row.assignment for row, _ in Elements(computed.stage.staying, computed.results)]
        assert sorted([*arrived, *staying]) == list(range(len(ranks)))


def test_a_device_keeps_no_memory_and_a_cpu_does() -> None:
    plan = plan_of("rows", bucket_elements=200)
    on_device = Schedule(plan, 1, plan.ranks, torch.float64, torch.device("meta"))
    on_cpu = Schedule(plan, 1, plan.ranks, torch.float64, CPU)
    assert kept_by(on_device) == {}
    assert kept_by(on_cpu)
    first, again = (on_cpu.gather(on_cpu.stages[0]).all_to_all for _ in range(2))
    assert first is not None
    assert again is not None
    assert (first.send.data_ptr(), first.receive.data_ptr()) == (again.send.data_ptr(), again.receive.data_ptr())
    for cpu_stage, device_stage in zip(stages_of(on_cpu), stages_of(on_device), strict=True):
        views = [[(row, view.shape) for row, view in stage.gather.reads] for stage in (cpu_stage, device_stage)]
        assert views[0] == views[1]
        for cpu_scatter, device_scatter in zip(
            exchanges_of(on_cpu, cpu_stage), exchanges_of(on_device, device_stage), strict=True
        ):
            assert [to.stride() for to, _ in cpu_scatter.leaving] == [to.stride() for to, _ in device_scatter.leaving]


class One(Batching):
    """A task for each matrix."""

    def batch_size(self, number: int, count: int, *, stays: bool = False) -> int:
        return 1


def test_the_matrices_of_a_portion_are_freed_before_the_next_portion_has_memory() -> None:
    layout = MeshLayout.replicated((4, 6), (0, 1))
    parameters = [Parameter(str(n), layout, layout, split(str(n), (4, 6), None), (1,), "") for n in range(6)]
    plan = make_plan(parameters, bucket_elements=10**6)
    schedule = Schedule(plan, 0, plan.ranks, torch.float32, torch.device("meta"), One())
    (stage,) = schedule.stages
    assert len(stage.portions) == 3
    last: weakref.ref[Tensor] | None = None
    for _, elements, batches in schedule.portions(stage):
        assert last is None or last() is None
        last = weakref.ref(batches[0][0])
        del elements, batches
        assert last() is None
