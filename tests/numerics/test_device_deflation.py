"""Deflation of devices, run on the CPU, against fp64: what becomes of singular values, accuracy, and bits."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from benchmarks.studies.remez import table_row
from mpmath import mp
from torch import Tensor, nn

import muonmesh as mm
from muonmesh.layout import cost
from muonmesh.numerics import device_deflation
from muonmesh.numerics.coefficients import COEFFICIENT_SETS, CoefficientSet, factored
from muonmesh.numerics.deflation import Deflation
from muonmesh.numerics.device_deflation import Step, deflate, joint_factor, norm_of
from muonmesh.numerics.kernels import Matmuls
from muonmesh.numerics.newton_schulz import orthogonalize
from muonmesh.numerics.normalize import normalize
from muonmesh.numerics.working_memory import Squares, deflation_at_once
from tests.device.dry_run import DryRun, dry_run
from tests.device.simulated import SimulatedDevice
from tests.support.device_form import TABLES, by_device_iteration, form_of, in_one_memory
from tests.support.tensors import relative_error

COVERS = ("numerics.device_deflation.deflate",)

ROWS, COLS, VECTORS = 96, 160, 24


def with_values(values: Tensor, cols: int = COLS, seed: int = 0) -> Tensor:
    """A matrix in bf16 with singular values, (rows, cols)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(values), cols, dtype=torch.float64, generator=generator)
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    return ((u * values) @ vh).bfloat16()


def like_momentum(rows: int = 384) -> Tensor:
    """Singular values that fall fast at first, then slowly, as momentum's."""
    number = torch.arange(1, rows + 1, dtype=torch.float64)
    return number**-1.5 + 0.003 * (1 - number / (rows + 40))


def not_numbers(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def brought_down(x: Tensor, table: Matmuls) -> tuple[Tensor, Tensor]:
    """Matrices, (batch, rows, cols), as `deflate` is given them and as it leaves them."""
    loaded = torch.empty(x.shape, dtype=torch.float16)
    inverse, _ = normalize(x, loaded)
    out = loaded.clone()
    deflate([out], inverse, VECTORS, table, not_numbers)
    return loaded.double(), out.double()


@pytest.mark.parametrize("table", TABLES)
def test_large_values_come_down_and_small_ones_stay(table: str) -> None:
    """The function of the docstring, with singular vectors as they were."""
    values = torch.cat([torch.logspace(0, -1, 20), torch.full((ROWS - 20,), 0.004)]).double()
    before, after = (x[0] for x in brought_down(with_values(values)[None], TABLES[table]))
    found = torch.linalg.svdvals(before)[:VECTORS]
    target = max(
        1.5 * float(values[VECTORS:].square().mean().sqrt()) * float(before.norm() / values.norm()),
        float(found.square().mean().sqrt()) / 10,
        float(found.pow(4).sum() ** 0.25) / 32,
    )
    root = (1 + (found[:20] / target) ** 2) ** -0.5
    expected = found[:20] * (1 - (1 - root**2) * (1 - root / 2))
    u, _, vh = torch.linalg.svd(before)
    torch.testing.assert_close((u.mT @ after @ vh[:ROWS].mT).diagonal()[:20], expected, rtol=0.02, atol=0)
    assert float(torch.linalg.matrix_norm(after, 2)) < 0.85 * target
    small = u.mT[VECTORS:] @ after @ vh[VECTORS:ROWS].mT
    assert relative_error(small, torch.diag(torch.linalg.svdvals(before)[VECTORS:])) < 0.05


def test_no_singular_value_grows_whatever_the_matrix() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, ROWS, COLS, generator=generator)
    x[1, 50:] = 0
    x[2] = x[2, :1]
    x[3] *= torch.logspace(0, -6, ROWS)[:, None]
    for before, after in zip(*brought_down(x.bfloat16(), TABLES["triton"]), strict=True):
        slack = 2.0**-9 * float(before.norm())
        assert bool((torch.linalg.svdvals(after) <= torch.linalg.svdvals(before) + slack).all())


def test_the_basis_holds_the_largest_directions() -> None:
    x = with_values(torch.cat([torch.ones(8), torch.full((ROWS - 8,), 1e-2)]).double())[None]
    before, after = (x[0] for x in brought_down(x, TABLES["triton"]))
    assert float(torch.linalg.svdvals(after)[0] / torch.linalg.svdvals(before)[0]) < 0.06


@pytest.mark.parametrize("rank", [1, 3, 40])
def test_where_all_that_is_left_is_rounding_it_is_hardly_raised_further_than_by_polar_express(rank: int) -> None:
    """A gradient of rank one took a step 5 times larger than Polar Express's, nearly all of it noise."""
    x = with_values((torch.arange(384) < rank).double(), 400)[None]
    deflated, usual = (by_device_iteration(x, coefficients=name) for name in ("deflated", "polar_express"))
    assert float(deflated.double().norm()) < 1.25 * float(usual.double().norm())


def test_a_joint_factor_is_the_polynomials_one_after_the_other() -> None:
    """Quintics and polynomials of degree 9, with numbers for each matrix."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, 8, 20, dtype=torch.float64, generator=generator) / 10
    nine = (1.0, -1.7, 1.2, -0.4, 0.05)
    lead, u, w, t = factored(nine)
    several = torch.tensor([1.0, 0.5], dtype=torch.float64)[:, None, None]
    steps = [Step(-1.5, 0.4 * several, 4.0 * several, w=None), Step(u * several, lead, 2.0, w=w, t=t), Step(-1.5, 0.4)]
    multiply, squares = TABLES["torch"].multiply, Squares(partial(torch.empty, 2, 8, 8, dtype=torch.float64))
    gram = x @ x.mT
    found = joint_factor(multiply, gram, steps, squares)
    assert found is gram
    assert len(squares.free) == 3
    for number, matrix in enumerate(x):
        r, product, share = matrix @ matrix.mT, torch.eye(8, dtype=torch.float64), float(several[number, 0, 0])
        for degree, (u_of, lead_of, growth) in enumerate(
            [(-1.5, 0.4 * share, 4.0 * share), (u * share, lead, 2.0), (-1.5, 0.4, 1.0)]
        ):
            h = r @ r + u_of * r
            z = torch.eye(8, dtype=torch.float64) + lead_of * (h if degree != 1 else h @ h + w * h + t * r)
            product, r = z @ product, growth * (z @ r @ z)
        assert relative_error(found[number], product) < 1e-12


@pytest.mark.parametrize("cols", [384, 800])
@pytest.mark.parametrize("table", TABLES)
def test_deflated_is_nearer_to_the_polar_factor_than_polar_express(table: str, cols: int) -> None:
    x = with_values(like_momentum(), cols)
    u, _, vh = torch.linalg.svd(x.double(), full_matrices=False)
    deflated, usual = (
        by_device_iteration(x[None], TABLES[table], coefficients=name)[0] for name in ("deflated", "polar_express")
    )
    assert relative_error(deflated, u @ vh) < 0.3 * relative_error(usual, u @ vh)
    assert float(torch.linalg.matrix_norm(deflated.double(), 2)) < 1.1


def test_large_values_that_are_alike_do_not_grow() -> None:
    """With the last factor mirrored, half of a triangle computed, the largest of these was 1.26."""
    x = with_values((torch.arange(384) < 192).double(), 400)
    result = by_device_iteration(x[None], coefficients="deflated")[0]
    assert float(torch.linalg.matrix_norm(result.double(), 2)) < 1.12


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("table", TABLES)
def test_bits_follow_from_the_matrix_alone(table: str, overwrite: bool) -> None:
    x = torch.stack([with_values(like_momentum(), 400, seed) for seed in (1, 2)])
    x = torch.stack([x[0], x[1] * 2.0**-100, x[1] * 2.0**100, torch.zeros_like(x[0]), x[0].clone()])
    x[4, 3, 5] = torch.nan
    results = by_device_iteration(x.clone(), TABLES[table], coefficients="deflated", overwrite=overwrite)
    assert torch.equal(results[1], results[2])
    assert not results[3].any()
    assert results[4].isnan().all()
    for matrix, result in zip(x[:2], results[:2], strict=True):
        assert torch.equal(by_device_iteration(matrix[None], TABLES[table], coefficients="deflated")[0], result)
        turned = by_device_iteration(matrix.mT.contiguous()[None], TABLES[table], coefficients="deflated")
        assert torch.equal(turned[0].mT, result)


@pytest.mark.parametrize("vectors", [8, 40])
def test_deflation_takes_no_more_memory_than_is_counted(vectors: int) -> None:
    """Two shapes; elements of 2 bytes, each tensor up to a multiple of 64 bytes. With launches: `test_triton`."""
    counted, shapes = 0, ((2, 48, 56), (1, 48, 333))

    def counting(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        nonlocal counted
        counted += -(-math.prod(shape) * dtype.itemsize // 64) * 64
        return torch.zeros(shape, dtype=dtype)

    x = [torch.ones(shape, dtype=torch.float16) for shape in shapes]
    deflate(x, torch.ones(3, 1, 1), vectors, TABLES["triton"], counting)
    assert 10_000 < counted <= 2 * deflation_at_once(shapes, vectors)


@pytest.mark.parametrize("one_by_one", [False, True])
def test_in_one_memory_a_matrix_has_the_bits_that_it_has_in_others(one_by_one: bool) -> None:
    """With another shape; by the table and step by step, whose squares take the memory that deflation had before."""
    inputs = [torch.stack([with_values(like_momentum(), cols, seed) for seed in (1, 2)]) for cols in (384, 416)]
    for method in ("auto", "standard"):
        found = in_one_memory(inputs, one_by_one, coefficients="deflated", method=method)
        for results, matrices in zip(found, inputs, strict=True):
            assert torch.equal(results, by_device_iteration(matrices, coefficients="deflated", method=method))


def test_where_the_table_is_taken() -> None:
    assert form_of(384, 800, coefficients="deflated").degrees == [[3, 5, 5]]
    assert form_of(384, 384, coefficients="deflated", steps=3, method="gram").degrees == [[3, 5, 5]]
    for options in ({"steps": 4}, {"method": "standard"}, {"dtype": torch.float32}):
        form = form_of(384, 800, coefficients="deflated", **options)
        assert [3, 5, 5] not in form.degrees
        assert form.deflated == 64
    x = with_values(like_momentum(), 400)
    exact = orthogonalize(x, coefficients="polar_express", steps=9, dtype=torch.float64).double()
    for dtype in (torch.float32, torch.float64):
        found = by_device_iteration(x.to(dtype)[None], TABLES["torch"], coefficients="deflated", dtype=dtype)[0]
        assert relative_error(found, exact) < 0.15


def test_a_set_of_one_s_own_is_deflated_too() -> None:
    polynomials = COEFFICIENT_SETS["deflated"].polynomials
    mm.register_coefficients("test-device", CoefficientSet(polynomials, "repeat_last", Deflation(32), steps=4))
    x = with_values(like_momentum(), 400)
    exact = orthogonalize(x, coefficients="polar_express", steps=9, dtype=torch.float64).double()
    assert relative_error(by_device_iteration(x[None], coefficients="test-device")[0], exact) < 0.1


@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in range(1, 11)), 11])
def test_the_table_is_what_its_script_derives(number: int) -> None:
    mp.dps = 40
    first, (growth, u, w, lead, *others) = table_row(number)
    assert first == pytest.approx(device_deflation._QUINTIC, rel=1e-12)
    second = device_deflation._SECOND
    assert growth == pytest.approx(device_deflation._SECOND_GROWTH, rel=1e-8)
    assert (u, w, lead) == pytest.approx((second.u, second.w, second.lead), rel=1e-8)
    assert others == pytest.approx(device_deflation._TABLE[number], rel=1e-8)


def test_an_explanation_says_why_a_cpu_takes_another_set() -> None:
    for name, by in (("auto", "polar_express"), ("deflated", "deflated")):
        weight = nn.Parameter(torch.empty(400, 900, device="meta"))
        text = str(mm.Muon([weight], ns_coefficients=name, process_group="local").explain())
        assert f"orthogonalized: 1 by {by} in fp16; by default a CPU computes in bf16, and" in text
    assert "by default a CPU" not in str(
        mm.Muon([nn.Parameter(torch.empty(400, 900))], process_group="local").explain()
    )


def test_norms_are_positive() -> None:
    assert norm_of(torch.tensor([[[3.0, 4.0]], [[0.0, 0.0]]]), TABLES["torch"]).flatten().tolist() == [5.0, 1.0]


# --- devices ----------------------------------------------------------------------------------------------------


def test_a_device_has_no_races_and_no_waits() -> None:
    x = with_values(like_momentum(), 400)
    with SimulatedDevice(0) as device:
        there = x.to("cuda:0")
        device.waits.clear()
        result = orthogonalize(there, coefficients="deflated", kernels="torch")
        assert not device.waits
        result = result.cpu().clone()
    assert relative_error(result, by_device_iteration(x[None], TABLES["torch"], coefficients="deflated")[0]) < 0.01


LLAMA = ((4096, 14336), (4096, 14336), (4096, 4096), (1024, 4096))


def stepped(**settings: Any) -> DryRun:
    """A step on matrices of a Llama 8B, without elements; it raises an error where the CPU would wait."""
    model = nn.Module()
    for number, shape in enumerate(LLAMA):
        model.register_parameter(f"weight{number}", nn.Parameter(torch.empty(shape, device="meta")))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        return dry_run(model, lambda copied: mm.Muon(list(copied.named_parameters()), lr=0.02, **settings), steps=1)


def test_a_step_takes_what_the_cost_model_says() -> None:
    """A quarter fewer operations than Polar Express, which keeps X and what follows it in one memory (decision 46)."""
    forms = [form_of(*shape, coefficients="auto") for shape in LLAMA]
    planned = sum(
        cost(*shape, degrees=form.degrees, one_gram=form.whole, deflated=form.deflated, on_device=True)
        for shape, form in zip(LLAMA, forms, strict=True)
    )
    run, usual = stepped(), stepped(ns_coefficients="polar_express")
    assert run.flops == pytest.approx(planned, rel=0.05)
    assert run.flops < 0.77 * usual.flops
    assert run.peak_bytes <= 784 * 2**20  # the default budget, in which more matrices have place together
    assert run.launches < usual.launches + 2 * 40
