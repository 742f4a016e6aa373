"""The iteration of devices in fp16, run on the CPU, against fp64: accuracy, range and bits."""

from __future__ import annotations

import math
import random
from itertools import accumulate, pairwise
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from muonmesh.comm.views import by_shape
from muonmesh.numerics.coefficients import CoefficientName
from muonmesh.numerics.iteration import buffers_of
from muonmesh.numerics.newton_schulz import Method, Orthogonalizer, orthogonalize
from muonmesh.numerics.working_memory import WorkingMemory, deflation_at_once
from tests.support.device_form import TABLES, by_device_iteration, in_one_memory
from tests.support.tensors import relative_error

COVERS = ("numerics.device_iteration.DeviceIteration", "numerics.working_memory.WorkingMemory")

ROWS, COLS = 384, 800


def decaying(decades: int, rows: int = ROWS, cols: int = COLS) -> Tensor:
    """A matrix in bf16 with singular values from 1 to 10^-decades."""
    generator = torch.Generator().manual_seed(decades)
    u, _, vh = torch.linalg.svd(torch.randn(rows, cols, dtype=torch.float64, generator=generator), full_matrices=False)
    return ((u * torch.logspace(0, -decades, rows, dtype=torch.float64)) @ vh).bfloat16()


def test_bf16_is_fp16_on_devices_and_three_steps_are_one_product() -> None:
    def of(device: str, **options: Any) -> Orthogonalizer:
        defaults = {
            "coefficients": "auto",
            "steps": None,
            "method": "auto",
            "dtype": torch.bfloat16,
            "kernels": "torch",
        }
        return Orthogonalizer.of(ROWS, COLS, **defaults | options, device=torch.device(device))

    for dtype in (torch.bfloat16, torch.float16):
        form = of("cuda", dtype=dtype)
        assert form.dtype == torch.float16
        assert form.degrees == [[3, 3, 3], [3, 3]]
        assert form.description == "polar_express in fp16"
    assert of("cuda", dtype=torch.float32).dtype == torch.float32
    assert of("cuda", dtype=torch.float32).description == "polar_express"
    assert of("cpu").dtype == torch.bfloat16
    with pytest.raises(TypeError, match="float16 on a CPU"):
        of("cpu", dtype=torch.float16)


@pytest.mark.parametrize("decades", [1, 4])
@pytest.mark.parametrize("table", TABLES)
def test_fp16_is_nearer_to_fp64_than_bf16_was(table: str, decades: int) -> None:
    """In bf16 the form of 3 + 2 steps has 2 to 5 times the error of single steps; in fp16 that of fp32 nearly."""
    x = decaying(decades)
    expected = orthogonalize(x.double(), dtype=torch.float64)
    usual = relative_error(orthogonalize(x, method="standard", kernels="torch"), expected)
    for method in ("standard", "gram"):
        result = by_device_iteration(x[None], TABLES[table], method=method)[0]
        assert relative_error(result, expected) < (0.5 if decades == 1 else 0.3) * usual
        assert float(torch.linalg.matrix_norm(result.double(), 2)) < 1.13


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("name", [name for name in get_args(CoefficientName) if name != "deflated"])
def test_every_set_at_every_magnitude(name: CoefficientName, table: str) -> None:
    """fp16 ends at 6·10⁴ and 6·10⁻⁸; powers of two keep matrices of 10⁻³⁰ and 10³⁰ away from both."""
    sizes = torch.tensor([1.0, 2.0**-100, 2.0**100, 0.0])[:, None, None]
    x = (torch.randn(1, 24, 56, generator=torch.Generator().manual_seed(1)) * sizes).bfloat16()
    expected = orthogonalize(x, coefficients=name, dtype=torch.float64)
    for method in get_args(Method):
        results = by_device_iteration(x, TABLES[table], coefficients=name, method=method)
        assert relative_error(results[0], expected[0].double()) < 0.015
        assert torch.equal(results[1], results[0])
        assert torch.equal(results[2], results[0])
        assert not results[3].any()
        exact = by_device_iteration(x.double(), TABLES[table], coefficients=name, method=method, dtype=torch.float64)
        assert relative_error(exact[0], orthogonalize(x.double(), coefficients=name, dtype=torch.float64)[0]) < 1e-11


@pytest.mark.parametrize("table", TABLES)
def test_entries_far_below_the_norm_are_not_rounded(table: str) -> None:
    """At norm 1, fp16 would round entries of 2⁻²⁰ to 4 bits."""
    x = torch.randn(1, 24, 56, generator=torch.Generator().manual_seed(1)).mul_(2.0**-20)
    x[0, 0, 0] = 1.0
    expected = orthogonalize(x.bfloat16(), dtype=torch.float64).double()
    result = by_device_iteration(x.bfloat16(), TABLES[table])
    assert relative_error(result[:, 1:, 1:], expected[:, 1:, 1:]) < 0.004


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("length", [2, 3, 4, 5, 6])
def test_polynomials_of_any_length_and_size(length: int, table: str) -> None:
    """Also of numbers that are small for fp16."""
    x = torch.randn(2, 24, 56, generator=torch.Generator().manual_seed(1)).bfloat16()
    steps = [[3.0, -3.0, *[1.0, -0.3, 0.02, 0.01][: length - 2]], [1.5, -0.5], [1.875, -1.25, 0.375], [1e-5, -1e-7]]
    expected = orthogonalize(x.double(), coefficients=steps, dtype=torch.float64)
    for method in ("standard", "gram"):
        assert relative_error(by_device_iteration(x, TABLES[table], coefficients=steps, method=method), expected) < 0.03


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_bits_of_a_matrix_do_not_depend_on_its_surroundings(dtype: torch.dtype, overwrite: bool) -> None:
    x = torch.randn(3, 40, 104, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[0, 3, 5] = torch.inf
    for method in ("standard", "gram"):
        options: Any = {"method": method, "overwrite": overwrite}
        results = by_device_iteration(x.clone(), **options)
        assert results.dtype == dtype
        assert results[0].isnan().all()
        for matrix, result in zip(x[1:], results[1:], strict=True):
            assert torch.equal(by_device_iteration(matrix[None], method=method)[0], result)
            assert torch.equal(by_device_iteration(matrix.mT.contiguous()[None], method=method)[0].mT, result)
            others = torch.ones(2, 40, 91, dtype=dtype), x[:1, :, :40].contiguous()  # of as many rows
            assert torch.equal(
                by_device_iteration(matrix[None].clone(), TABLES["triton"], *others, **options)[0], result
            )


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("lengths", [(3,), (3, 3, 3, 3), (5, 3), (3, 4, 2), (6, 6, 6), (4,)], ids=str)
def test_in_one_memory_a_matrix_has_the_bits_that_it_has_in_others(lengths: tuple[int, ...], one_by_one: bool) -> None:
    """X moves where X was, squares lie where X is not; whatever was there before is not read."""
    steps = [[2.0, -1.5, *[0.6, -0.1, 0.03, 0.01][: length - 2]] for length in lengths]
    shapes = (2, 64, 152), (3, 64, 80)
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    for method in ("standard", "gram"):
        options: Any = {"coefficients": steps, "method": method}
        for results, matrices in zip(in_one_memory(inputs, one_by_one, **options), inputs, strict=True):
            assert results.isfinite().all()
            assert torch.equal(results, by_device_iteration(matrices, **options))


def test_nothing_in_one_memory_overlaps() -> None:
    """Squares neither X nor each other, the first of them in both turns; nor a part of X what has not moved yet."""
    numbers = random.Random(1)
    for _ in range(300):
        rows = 8 * numbers.randint(1, 6)
        shapes = tuple(
            (numbers.randint(1, 5), rows, 8 * numbers.randint(rows // 8, 40)) for _ in range(numbers.randint(1, 3))
        )
        squares = tuple(numbers.randint(2, 4) for _ in range(numbers.randint(1, 5)))
        deflated = numbers.choice([0, rows])
        layout = WorkingMemory(shapes, squares, one_by_one=numbers.random() < 0.5, deflated=deflated)
        assert layout.matrices(0) >= deflation_at_once(shapes, deflated)
        length = sum(count * rows * cols for count, rows, cols in shapes)
        for product_number, needed in enumerate(squares):
            begin, end = layout.matrices(product_number), layout.matrices(product_number + 1)
            places = [range(start, start + layout.square) for start in layout.places(product_number)]
            assert len(places) == needed
            lasting = set(places[0])
            ranges = [range(begin, begin + length), *places]
            assert sum(map(len, ranges)) == len(set().union(*ranges))
            assert max(place.stop for place in ranges) <= layout.numel
            assert not any(start % 32 for start in (begin, end, *layout.places(product_number)))
            waiting = set(range(begin, begin + length))
            parts = [
                size
                for count, rows, cols in shapes
                for size in ([rows * cols] * count if layout.one_by_one else [count * rows * cols])
            ]
            pairs = list(pairwise(accumulate(parts, initial=0)))
            for cut in pairs[::-1] if product_number % 2 else pairs:
                written = set(range(end + cut[0], end + cut[1]))
                assert not written & (waiting | lasting)
                waiting -= set(range(begin + cut[0], begin + cut[1]))
            assert not waiting


def test_shapes_share_a_batch_only_if_each_begins_where_it_is_not_copied() -> None:
    device = torch.device("cuda")
    options: dict[str, Any] = {"coefficients": "auto", "steps": None, "method": "gram"}

    def joins(rows: int, cols: int) -> object:
        return Orthogonalizer.of(rows, cols, **options, dtype=torch.bfloat16, kernels="torch", device=device).joins

    assert joins(304, 1204) == joins(1500, 304) is not None
    assert joins(301, 1203) is None
    shapes = (1, 301, 1501), (2, 301, 1203)
    in_place = []
    for x in by_shape(torch.empty(sum(map(math.prod, shapes)), dtype=torch.bfloat16), shapes):
        memory, _ = buffers_of(x, x, torch.bfloat16, turns=1, overwrite=True)
        in_place.append(memory.data_ptr() == x.data_ptr())
    assert in_place == [True, False]
