"""Where state by row, by column and by matrix lives: shapes against plain slicing, cover and routes on every layout."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from muonmesh.errors import LayoutError
from muonmesh.layout import FlatShards, Layout, MeshLayout, split_matrices
from muonmesh.layout.factored_state import Side, factored_in_buffers, factored_matrices
from muonmesh.layout.piece_table import pieces
from tests.support import fuzzing
from tests.support.fuzzing import COUNT, generated
from tests.support.reference import split

COVERS = ("layout.factored_state.factored_matrices",)

SIDES: tuple[Side, ...] = ("rows", "cols", "matrix")


@pytest.mark.parametrize(
    ("shape", "spec", "rows", "cols", "matrix"),
    [
        ((6, 4), "whole", (6, 1), (1, 4), (1, 1)),
        ((6, 4), ("rows", 3, 2, 1), (6, 1), (3, 4), (3, 1)),
        ((6, 4), ("cols", 1, 3), (6, 2), (1, 4), (1, 2)),
        ((6, 4), ("heads", 3, 0), (6, 1), (3, 4), (3, 1)),
        ((6, 4), ("heads", 2, 1), (6, 2), (1, 4), (1, 2)),
        ((6, 4), ("interleaved", 2, 0), (6, 1), (2, 4), (2, 1)),
        ((6, 4), ("interleaved", 2, 1, 2), (6, 2), (1, 4), (1, 2)),
        ((6, 4), ("interleaved", (2, 1), 0), (6, 1), (2, 4), (2, 1)),
        ((6, 4), "transposed", (1, 4), (6, 1), (1, 1)),
        ((6, 4), ("transposed", ("rows", 1, 3)), (1, 4), (6, 2), (1, 2)),
        ((5, 6, 4), "stack", (5, 6, 1), (5, 1, 4), (5, 1, 1)),
        ((5, 6, 4), ("stack", ("rows", 3, 3)), (5, 6, 1), (5, 2, 4), (5, 2, 1)),
        ((6, 4, 3, 3), "flatten", (6, 1, 1, 1), (1, 4, 3, 3), (1, 1, 1, 1)),
        ((6, 4, 3, 3), ("flatten", ("rows", 2, 4)), (6, 1, 1, 1), (2, 4, 3, 3), (2, 1, 1, 1)),
    ],
)
def test_a_factored_state_has_one_number_for_each(
    shape: tuple[int, ...], spec: Any, rows: tuple[int, ...], cols: tuple[int, ...], matrix: tuple[int, ...]
) -> None:
    assert [factored_matrices("w", shape, spec, side)[0] for side in SIDES] == [rows, cols, matrix]


@generated(fuzzing.specs(40), COUNT // 2)
def test_the_numbers_of_a_matrix_are_in_the_order_of_its_rows_and_columns(example: Any) -> None:
    """Told by plain slicing: a factored state splits into as many parts as the parameter, each as long as its side."""
    shape, spec = example
    whole = split(torch.arange(math.prod(shape)).reshape(shape), spec)
    for side in SIDES:
        shrunk, matrices = factored_matrices("w", shape, spec, side)
        parts = split_matrices("w", shape, spec)
        assert [m.index for m in matrices] == [m.index for m in parts]
        for part, factored in zip(parts, matrices, strict=True):
            assert (factored.rows, factored.cols) == (
                part.rows if side == "rows" else 1,
                part.cols if side == "cols" else 1,
            )
        if side == "rows":  # the numbers of each matrix follow each other as its rows do
            numbers = torch.arange(math.prod(shrunk)).reshape(shrunk)
            order = [value for vector in assembled(numbers, matrices) for value in vector.tolist()]
            assert sorted(order) == list(range(math.prod(shrunk)))
            for matrix, vector in zip(whole, assembled(numbers, matrices), strict=True):
                assert len(matrix) == len(vector)
                # Rows that come later in the parameter have their numbers later in the factored state.
                assert torch.equal(matrix[:, 0].argsort(), vector.argsort())


def assembled(factored: Tensor, matrices: Any) -> list[Tensor]:
    """The numbers of each matrix, read by its blocks."""
    vectors = []
    for matrix in matrices:
        numbers = torch.zeros(matrix.numel, dtype=factored.dtype)
        for block in matrix.blocks:
            region = block.region
            box = tuple(
                slice(first, first + step * count, step)
                for first, step, count in zip(region.offset, region.step, region.shape, strict=True)
            )
            numbers.as_strided(region.shape, block.strides, block.start).copy_(factored[box])
        vectors.append(numbers)
    return vectors


def test_rows_of_a_shard_have_their_numbers_beside_them() -> None:
    layout = MeshLayout((10, 4), (4,), (0, 1, 2, 3), (fuzzing.Shard(0),))
    factored = replace(layout, shape=(10, 1))
    assert [factored.local_shape(rank) for rank in range(4)] == [(3, 1), (3, 1), (3, 1), (1, 1)]
    flat = FlatShards.cut((3, 4), (0, 1, 2), (0, 5, 6, 12))  # the second row begins on rank 0, the third on rank 2
    (in_buffer,) = factored_in_buffers({"w": (flat, (3, 1))}).values()
    assert [[i.length for i in in_buffer.intervals_of(rank)] for rank in range(3)] == [[2], [], [1]]


def check_factored(shape: tuple[int, ...], spec: Any, factored: Layout, parameter: Layout, side: Side) -> None:
    """A factored state covers its numbers once in each replica, and each owner reads them from its own replica."""
    factored.prove_cover()
    assert set(factored.ranks) == set(parameter.ranks)
    shrunk, matrices = factored_matrices("w", shape, spec, side)
    assert factored.shape == shrunk
    values = torch.arange(1, math.prod(shrunk) + 1).reshape(shrunk)
    expected = assembled(values, matrices)
    memory = {}
    for rank in factored.ranks:
        local = memory[rank] = torch.zeros(math.prod(factored.local_shape(rank)), dtype=values.dtype)
        for block in factored.blocks(rank):
            box = tuple(
                slice(first, first + count)
                for first, count in zip(block.region.offset, block.region.shape, strict=True)
            )
            local.as_strided(block.region.shape, block.strides, block.start).copy_(values[box])
    for rank in factored.ranks:
        for matrix, numbers in zip(matrices, expected, strict=True):
            gathered = torch.zeros(matrix.numel, dtype=values.dtype)
            for holder in factored.replica(rank):
                for piece in pieces(factored, holder, matrix):
                    target = gathered.as_strided(piece.shape, piece.matrix_strides, piece.matrix_start)
                    assert not target.any()  # no number comes from two holders
                    target.copy_(memory[holder].as_strided(piece.shape, piece.storage_strides, piece.storage_start))
            assert torch.equal(gathered, numbers)


@generated(st.one_of(fuzzing.on_mesh(largest=30), fuzzing.with_momentum_elsewhere()), COUNT // 4)
def test_on_any_mesh_each_owner_gets_every_number_once(case: fuzzing.Held) -> None:
    (source,) = case.sources
    for side in SIDES:
        shrunk, _ = factored_matrices("w", case.shapes[0], case.specs[0], side)
        if isinstance(source, MeshLayout):
            factored: Layout = replace(source, shape=shrunk)
        else:
            assert isinstance(source, FlatShards)
            factored = factored_in_buffers({"w": (source, shrunk)})["w"]
        check_factored(case.shapes[0], case.specs[0], factored, source, side)


@generated(fuzzing.in_flat_buffers(largest=30), COUNT // 4)
def test_in_flat_buffers_each_owner_gets_every_number_once(case: fuzzing.Held) -> None:
    for side in SIDES:
        pairs = {}
        for number, (shape, spec, layout) in enumerate(zip(case.shapes, case.specs, case.targets, strict=True)):
            assert isinstance(layout, FlatShards)
            pairs[str(number)] = layout, factored_matrices("w", shape, spec, side)[0]
        factored = factored_in_buffers(pairs)
        for number, (shape, spec) in enumerate(zip(case.shapes, case.specs, strict=True)):
            check_factored(shape, spec, factored[str(number)], case.targets[number], side)
        for rank in case.targets[0].ranks:  # end to end, without gaps or overlaps
            lengths = [interval for layout in factored.values() for interval in layout.intervals_of(rank)]
            position = 0
            for interval in lengths:
                assert interval.start == position
                position += interval.length
            assert {layout.local_shape(rank) for layout in factored.values()} == {(position,)}


def test_a_factored_state_that_misses_a_number_is_found() -> None:
    """The proof of a plan sees it as it sees a parameter that is not covered."""
    flat = FlatShards.cut((3, 1), (0, 1), (0, 2, 2))
    with pytest.raises(LayoutError, match="held by none"):
        flat.prove_cover()
