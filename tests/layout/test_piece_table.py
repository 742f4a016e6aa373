"""Tables of pieces on generated layouts, against `overlap`; and joined rows, element by element."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import hypothesis
import torch
from hypothesis import strategies as st

from muonmesh.comm.schedule import Schedule
from muonmesh.comm.step_callbacks import Batching
from muonmesh.layout import Layout, Parameter, Plan, make_plan, split_matrices
from muonmesh.layout.piece_table import NOWHERE, Row, evenly, joined
from muonmesh.layout.region import Piece, overlap, row_major
from tests.support.fuzzing import flat_layouts, mesh_layouts, shared_by_replicas, specs

COVERS = (
    "layout.piece_table.PieceTable",
    "layout.piece_table.joined",
)

CPU = torch.device("cpu")


class Two(Batching):
    """Two matrices at once."""

    def batch_size(self, number: int, count: int, *, stays: bool = False) -> int:
        return 2


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """One or two parameters on the same ranks, whose momentum replicas may share, or that lie in flat buffers."""
    parameters, ranks = [], range(draw(st.integers(1, 6)))
    for number in range(draw(st.integers(1, 2))):
        shape, spec = draw(specs(12))
        target: Layout = draw(mesh_layouts(shape, ranks, every=True))
        momentum: Layout = target
        if draw(st.integers(0, 3)) == 3:
            (target,) = draw(flat_layouts([target]))
            momentum = target
        elif draw(st.booleans()):
            momentum = draw(shared_by_replicas(target))
        matrices = split_matrices(f"{number}", shape, spec)
        parameters.append(Parameter(f"{number}", momentum, target, matrices, (1,) * len(matrices), ""))
    machine = draw(st.sampled_from([0, 1, 2]))
    return make_plan(
        parameters, ranks=tuple(ranks), bucket_elements=draw(st.sampled_from([1, 40, 10**6])), machine=machine
    )


def pieces_of(plan: Plan, rank: int, *, momentum: bool) -> Counter[Any]:
    """What a rank stores of each matrix: every block of its storage with every block of the matrix."""
    counts: Counter[Any] = Counter()
    for number, assignment in enumerate(plan.assignments):
        parameter = plan.parameters[assignment.parameter]
        layout = parameter.momentum_storage if momentum else parameter.target
        for stored, block in itertools.product(layout.blocks(rank), assignment.matrix.blocks):
            if (piece := overlap(stored, block)) is not None:
                counts[number, piece] += 1
    return counts


def pairs_of(row: Row) -> list[tuple[int, int]]:
    """Where each element of a row lies in its storage and in its buffer."""
    pairs = []
    for index in itertools.product(*(range(size) for size in row.piece.shape)):
        in_storage, in_buffer = (
            sum(k * step for k, step in zip(index, strides, strict=True))
            for strides in (row.piece.storage_strides, row.strides)
        )
        pairs.append((row.piece.storage_start + in_storage, row.start + in_buffer))
    return pairs


def check_buffers(rows: list[Row], batches: Any, plan: Plan) -> None:
    """Rows in matrices lie where their elements belong; rows on the wire follow each other; no two share a place."""
    occupied: dict[int, set[int]] = {}
    for row in rows:
        if row.buffer == NOWHERE:
            continue
        assert row.parameter == plan.assignments[row.assignment].parameter
        positions = {position for _, position in pairs_of(row)}
        assert len(positions) == row.piece.numel
        assert not positions & occupied.setdefault(row.buffer, set())
        occupied[row.buffer] |= positions
        if row.buffer < len(batches):
            numel = plan.assignments[row.assignment].matrix.numel
            first = batches[row.buffer].index(row.assignment) * numel
            assert (row.start, row.strides) == (first + row.piece.matrix_start, row.piece.matrix_strides)
        else:
            assert row.strides == row_major(row.piece.shape)
    for buffer, filled in occupied.items():
        assert buffer < len(batches) or filled == set(range(len(filled)))


@hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
@hypothesis.given(plans())
def test_tables_hold_each_piece_once_and_where_it_belongs(plan: Plan) -> None:
    for rank in plan.ranks:
        schedule = Schedule(plan, rank, plan.ranks, torch.float32, CPU, Two())
        reads, writes = Counter[Any](), Counter[Any]()
        for local in [*(local for stage in schedule.stages for local in stage.local), *schedule.trailing]:
            reads.update((row.assignment, row.piece) for row in local.reads.rows)
            writes.update((row.assignment, row.piece) for row in local.writes.rows)
            for table in (local.reads, local.writes):
                check_buffers(list(table.rows), [local.assignments], plan)
        for stage in schedule.stages:
            gather = schedule.gather(stage)
            results = [out for _, out, *_ in schedule.batches(stage, gather.matrices)]
            check_buffers(list(gather.reads.table.rows), stage.batches, plan)
            check_buffers(list(stage.staying.rows), stage.batches, plan)
            reads.update((row.assignment, row.piece) for row in stage.reads.rows)
            writes.update((row.assignment, row.piece) for row in stage.staying.rows)
            last = None
            for index in range(len(stage.back)):
                last = schedule.scatter(stage, index, results, None if last is None else last.all_to_all.receive)
                check_buffers(list(last.arrived.table.rows), (), plan)
                writes.update((row.assignment, row.piece) for row in last.arrived.table.rows)
        assert reads == pieces_of(plan, rank, momentum=True)
        assert writes == pieces_of(plan, rank, momentum=False)


@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(0, 6), st.integers(0, 6)), max_size=9)
)
def test_joined_rows_have_the_same_elements(drawn: list[tuple[int, int, int, int]]) -> None:
    """Pairs of places, of the storage and of the buffer, as many times as before."""
    shapes = [(2,), (3,), (2, 2), (1, 3)]
    rows = []
    for assignment, form, storage, start in drawn:
        shape = shapes[form]
        piece = Piece(shape, 4 * storage, row_major(shape), 0, row_major(shape))
        rows.append(Row(assignment, 0, piece, 0, 5 * start, row_major(shape)))

    def count_of(table: Any) -> Counter[tuple[int, ...]]:
        return Counter((row.assignment, *pair) for row in table for pair in pairs_of(row))

    assert count_of(joined(rows)) == count_of(rows)
    assert len(joined(rows)) <= len(rows)


@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4),
    st.booleans(),
)
def test_rows_of_several_matrices_are_one_where_they_lie_evenly(drawn: list[tuple[int, int, int]], even: bool) -> None:
    """Element by element in their order; parameters and distances that differ are left alone."""
    if even:
        drawn = [(0, 2 * number, 3 * number) for number in range(len(drawn))]
    shape, strides = (2, 3), row_major((2, 3))
    rows = [
        Row(number, parameter, Piece(shape, 6 * storage, strides, 0, strides), 0, 6 * start, strides)
        for number, (parameter, storage, start) in enumerate(drawn)
    ]

    merged = evenly(rows)
    assert (merged is not None) >= (even and len(rows) > 1)
    if merged is not None:
        assert pairs_of(merged) == [pair for row in rows for pair in pairs_of(row)]
        assert {row.parameter for row in rows} == {merged.parameter}
