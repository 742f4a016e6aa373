"""`("interleaved", (a, b, …), dim)`: matrices that alternate along a dim in runs of unequal length."""

from __future__ import annotations

import json
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import muonmesh as mm
from muonmesh.layout import MeshLayout, Shard, split_matrices
from muonmesh.layout.piece_table import pieces
from tests.support.fuzzing import canonical, mesh_layouts, planned, stored

COVERS = ("layout.matrix.assemble",)


def cut(x: Tensor, runs: list[int], dim: int) -> list[Tensor]:
    """The matrices by hand: what index i of dim belongs to depends on its place within a turn."""
    position = torch.arange(x.shape[dim]) % sum(runs)
    ends = [sum(runs[: i + 1]) for i in range(len(runs))]
    masks = [(end - run <= position) & (position < end) for run, end in zip(runs, ends, strict=True)]
    return [x[mask] if dim == 0 else x[:, mask] for mask in masks]


def assembled_by_hand(whole: Tensor, spec: Any, layout: MeshLayout) -> list[Tensor]:
    """The matrices that owners put together from what one copy's ranks store; -1 where nothing was written."""
    storages = {rank: stored(layout, rank, whole).view(-1) for rank in layout.replica(layout.ranks[0])}
    results = []
    for matrix in split_matrices("w", tuple(whole.shape), spec):
        result = torch.full(matrix.shape, -1)
        for rank, storage in storages.items():
            for piece in pieces(layout, rank, matrix):
                into = result.view(-1).as_strided(piece.shape, piece.matrix_strides, piece.matrix_start)
                into.copy_(storage.as_strided(piece.shape, piece.storage_strides, piece.storage_start))
        results.append(result)
    return results


@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
@hypothesis.given(st.data())
def test_the_regions_are_those_cut_by_hand(data: st.DataObject) -> None:
    runs = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    dim, turns, other = data.draw(st.integers(0, 1)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    shape: tuple[int, ...] = (sum(runs) * turns, other) if dim == 0 else (other, sum(runs) * turns)
    spec: Any = ("interleaved", tuple(runs), dim)
    if transposed := data.draw(st.booleans()):
        shape, spec = shape[::-1], ("transposed", spec)
    if stacked := data.draw(st.booleans()):
        shape, spec = (data.draw(st.integers(1, 3)), *shape), ("stack", spec)
    if data.draw(st.booleans()):
        spec = json.loads(json.dumps(spec))  # tuples come back as lists
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    slices = whole if stacked else whole[None]
    expected = [m for x in slices for m in cut(x.mT if transposed else x, runs, dim)]

    layout = data.draw(mesh_layouts(shape))
    matrices = assembled_by_hand(whole, spec, layout)
    assert [tuple(m.shape) for m in matrices] == [tuple(canonical(m).shape) for m in expected]
    assert all(torch.equal(f, canonical(e)) for f, e in zip(matrices, expected, strict=True))
    assert [(m.rows, m.cols) for m in split_matrices("w", shape, spec)] == [tuple(m.shape) for m in expected]
    planned(shape, spec, layout)  # which proves that the matrices tile the parameter


def test_megatron_qkv() -> None:
    """Per query group: its queries, one key, one value, each of head_dim rows; here split over two ranks."""
    heads, groups, head_dim, hidden = 6, 2, 4, 5
    q, k, v = (torch.randn(n * head_dim, hidden) for n in (heads, groups, groups))
    parts = [x.chunk(groups) for x in (q, k, v)]
    qkv = torch.cat([parts[i][group] for group in range(groups) for i in range(3)])
    spec = ("interleaved", (heads // groups * head_dim, head_dim, head_dim), 0)
    for placement in (Shard(0), Shard(0, 2)):
        layout = MeshLayout(tuple(qkv.shape), (2,), (0, 1), (placement,))
        for matrix, expected in zip(assembled_floats(qkv, spec, layout), (q, k, v), strict=True):
            assert torch.equal(matrix, canonical(expected))


def assembled_floats(whole: Tensor, spec: Any, layout: MeshLayout) -> list[Tensor]:
    numbers = torch.arange(whole.numel()).reshape(whole.shape)
    return [whole.flatten()[at] for at in assembled_by_hand(numbers, spec, layout)]


def test_a_step_is_that_of_the_separate_matrices() -> None:
    spec = ("interleaved", (6, 2, 1), 0)
    whole, gradient = torch.randn(2, 18, 8)
    fused = nn.Parameter(whole.clone())
    apart = [nn.Parameter(m.clone()) for m in cut(whole, [6, 2, 1], 0)]
    settings: dict[str, Any] = {"lr": 0.1, "compute_dtype": torch.float32}
    optimizers = [mm.Muon([{"params": [fused], "matrices": [spec]}], **settings), mm.Muon(apart, **settings)]
    fused.grad = gradient
    for parameter, part in zip(apart, cut(gradient, [6, 2, 1], 0), strict=True):
        parameter.grad = part.clone()
    for optimizer in optimizers:
        optimizer.step()
    assert not torch.equal(fused.detach(), whole)
    for matrix, expected in zip(cut(fused.detach(), [6, 2, 1], 0), apart, strict=True):
        assert torch.equal(matrix, expected.detach())


@pytest.mark.parametrize(
    ("unequal", "equal"),
    [
        (("interleaved", (3, 3), 0), ("interleaved", 2, 0, 3)),
        (("interleaved", (1, 1, 1), 1), ("interleaved", 3, 1)),
        (("interleaved", (8, 4), 0), ("rows", 8, 4)),
        (("interleaved", (6,), 0), ("rows", 12)),
    ],
)
def test_forms_that_say_the_same(unequal: Any, equal: Any) -> None:
    whole = torch.arange(12 * 6).reshape(12, 6)
    layout = MeshLayout.replicated((12, 6), (0,))
    pairs = zip(assembled_by_hand(whole, unequal, layout), assembled_by_hand(whole, equal, layout), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (("interleaved", (3, 2), 0), "12 is not a multiple of 5, the length of one turn"),
        (("interleaved", (2, 1, 1), 1), "6 is not a multiple of 4"),
        (("interleaved", 5, 0, 2), "12 is not a multiple of 10"),
        (("interleaved", (2, 0), 0), "sizes must be positive integers"),
        (("interleaved", (2, "1"), 0), "sizes must be positive integers"),
        (("interleaved", ((2, 1), 1), 0), "sizes must be positive integers"),
        (("interleaved", (), 0), "sizes must be positive integers"),
        (("interleaved", (2, 1), 2), "dim must be 0 or 1"),
        (("interleaved", (2, 1)), "wrong number of values"),
        (("interleaved", (2, 1), 0, 2), "wrong number of values"),
        (("interleaved",), "wrong number of values"),
    ],
)
def test_what_does_not_fit_is_refused(spec: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^block\.qkv: found matrices .*{message}.*needed a form.*\(runs\.\.\.\)"):
        split_matrices("block.qkv", (12, 6), spec)
