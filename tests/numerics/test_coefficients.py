"""The published coefficient sets: their values, what follows their end, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import muonmesh as mm
from muonmesh.layout import cost
from muonmesh.numerics.coefficients import (
    COEFFICIENT_SETS,
    CoefficientName,
    CoefficientSet,
    choose,
    coefficient_schedule,
)
from muonmesh.numerics.deflation import Deflation
from muonmesh.step.connection import plan
from tests.support.device_form import form_of
from tests.support.on_ranks import on_ranks
from tests.support.programs import run_script

COVERS = (
    "numerics.coefficients.coefficient_schedule",
    "numerics.coefficients.register_coefficients",
)

JORDAN = (3.4445, -4.7750, 2.0315)
# As other implementations print it: the paper's polynomials at x / 1.01, to four decimals; the last is the limit.
POLAR_EXPRESS = [
    (8.2051, -22.9019, 16.4607),
    (4.0664, -2.8612, 0.5184),
    (3.9096, -2.8234, 0.5250),
    (3.2856, -2.4153, 0.4853),
    (2.2779, -1.6198, 0.3985),
    (1.8726, -1.2307, 0.3585),
    (1.8564, -1.2132, 0.3568),
    (1.8750, -1.2500, 0.3750),
]


def test_polar_express_is_the_paper_s_with_its_safety_factor() -> None:
    schedule = coefficient_schedule("polar_express", 8)
    for polynomial, rounded in zip(schedule, POLAR_EXPRESS, strict=True):
        assert polynomial == pytest.approx(rounded, abs=6.1e-5)
    # arXiv 2505.16932, listing 1, in full: a, b and c of the first step divided by 1.01, 1.01³ and 1.01⁵.
    assert schedule[0] == pytest.approx(
        (8.28721201814563 / 1.01, -23.595886519098837 / 1.030301, 17.300387312530933 / 1.0510100501), rel=1e-14
    )
    assert schedule[7] == (1.875, -1.25, 0.375)


@pytest.mark.parametrize(
    ("name", "length", "after"),
    [
        ("simple", 1, 0),
        ("quintic", 5, 0),
        ("polar_express", 8, 7),
        ("cans", 5, 4),
        ("deepseekv4", 10, 9),
        ("deflated", 4, 3),
    ],
)
def test_past_the_end(name: CoefficientName, length: int, after: int) -> None:
    published = coefficient_schedule(name, length)
    assert coefficient_schedule(name, max(1, length - 1)) == published[: max(1, length - 1)]
    longer = coefficient_schedule(name, length + 2)
    assert longer[:length] == published
    following = (published * 3)[length : length + 2] if after == 0 else (published[after],) * 2
    assert longer[length:] == following


def test_deepseekv4_is_eight_steps_of_jordan_s_and_two_that_converge() -> None:
    assert coefficient_schedule("deepseekv4", 10) == (JORDAN,) * 8 + ((2.0, -1.5, 0.5),) * 2
    assert coefficient_schedule("simple", 3) == (JORDAN,) * 3


@pytest.mark.parametrize("name", sorted(COEFFICIENT_SETS))
def test_every_set_grows_small_singular_values_and_stays_bounded(name: CoefficientName) -> None:
    if name == "deflated":
        return  # made for what comes before its polynomials: the next test
    sigma = torch.linspace(0, 1, 100_001, dtype=torch.float64)[1:]
    for a, b, c in coefficient_schedule(name, max(4, len(COEFFICIENT_SETS[name].polynomials))):
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    assert sigma[:10].min() > 50e-5  # 1e-5 … 1e-4 became at least fifty times larger
    assert sigma.max() < 1.3
    assert sigma.min() > 0


def test_deflated_is_what_its_script_derives() -> None:
    """And what it does: singular values in [0.012, 1] end where the script says, and smaller ones grow 88 times."""
    script = Path(__file__).parents[2] / "benchmarks" / "studies" / "remez.py"
    derivation = json.loads(run_script(script))
    polynomials = coefficient_schedule("deflated")
    for chosen, derived in zip(polynomials, derivation["polynomials"], strict=True):
        assert chosen == pytest.approx(derived, rel=1e-12)
    x = torch.logspace(-5, 0, 100_001, dtype=torch.float64)
    ends = x
    for safety, polynomial in zip((1.01, 1.01, 1.04), polynomials, strict=True):
        ends = sum((c * (safety * ends) ** (2 * k + 1) for k, c in enumerate(polynomial)), torch.zeros_like(x))
    inside = ends[x >= 0.012]
    assert [float(inside.min()), float(inside.max())] == pytest.approx(derivation["maps to"], abs=1e-6)
    assert float(inside.max()) < 1.084
    assert float((ends / x)[0]) / (1.01**2 * 1.04) == pytest.approx(88.4, rel=1e-2)


def test_a_sequence_of_one_s_own_may_mix_lengths_and_repeats_its_last() -> None:
    polynomials = [[1.5, -0.5], (2.0, -1.5, 0.5), (2.1, -1.8, 1.0, -0.3)]
    assert coefficient_schedule(polynomials, 5) == ((1.5, -0.5), (2.0, -1.5, 0.5), *((2.1, -1.8, 1.0, -0.3),) * 3)
    assert coefficient_schedule(polynomials, 1) == ((1.5, -0.5),)


@pytest.mark.parametrize(
    ("coefficients", "steps", "error", "says"),
    [
        ("polar", 5, ValueError, "found 'polar'; needed one of 'auto', 'simple'"),
        ([], 5, ValueError, "empty sequence"),
        ([(1.5,)], 5, ValueError, r"\(1\.5,\); needed two or more"),
        ([(1.5, float("nan"))], 5, ValueError, "at most 1e"),
        ([(1.5, "b")], 5, TypeError, "one tuple of numbers a step"),
        ((3.4445, -4.7750, 2.0315), 5, TypeError, "one tuple of numbers a step"),
        (5, 5, TypeError, "the name of a published set"),
        ("simple", 0, ValueError, "steps: found 0; needed at least 1"),
        ("simple", -3, ValueError, "steps: found -3"),
        ("simple", 2.0, TypeError, r"steps: found 2\.0 \(float\)"),
        ("simple", True, TypeError, r"steps: found True \(bool\)"),
    ],
)
def test_what_is_refused(coefficients: Any, steps: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        coefficient_schedule(coefficients, steps)


def test_a_set_of_one_s_own_is_known_by_its_name() -> None:
    coefficients = CoefficientSet(((3.0, -3.2, 1.2), (1.875, -1.25, 0.375)), "repeat_last", steps=4)
    mm.register_coefficients("test-mine", coefficients)
    x = torch.randn(9, 14, generator=torch.Generator().manual_seed(0))
    expected = mm.orthogonalize(x, coefficients=[*coefficients.polynomials, *[coefficients.polynomials[-1]] * 2])
    assert torch.equal(mm.orthogonalize(x, coefficients="test-mine"), expected)
    assert mm.orthogonalize(x, coefficients="test-mine", steps=1).norm() != expected.norm()
    optimizer = mm.Muon([torch.nn.Parameter(x.clone())], ns_coefficients="test-mine")
    assert optimizer.param_groups[0]["ns_coefficients"] == "test-mine"
    with pytest.raises(ValueError, match=r"found 'cans', a published set; .* Write register_coefficients\(\"my-cans\""):
        mm.register_coefficients("cans", coefficients)
    with pytest.raises(ValueError, match=r"the polynomial \(1.0,\)"):
        mm.register_coefficients("test-short", CoefficientSet(((1.0,),), "cycle"))
    quintic = (3.0, -3.2, 1.2)
    for number, polynomials in enumerate([((1.5, -0.5),), ((*quintic, 0.1, 0.01),), (quintic, (1.5, -0.5))]):
        with pytest.raises(ValueError, match=rf"number {1 + number // 2}, after Deflation\(.*\); needed three numbers"):
            mm.register_coefficients("test-deflating", CoefficientSet(polynomials, "cycle", Deflation(8)))


@on_ranks(2)
def test_ranks_compare_a_set_of_one_s_own_by_its_polynomials() -> None:
    last = 0.375 + 0.001 * dist.get_rank()
    mm.register_coefficients("test-ranks", CoefficientSet(((1.875, -1.25, last),), "repeat_last"))
    weight = torch.nn.Parameter(torch.ones(6, 8))
    weight.grad = torch.eye(6, 8)
    with pytest.raises(mm.PlanError, match="test-ranks"):
        mm.Muon([weight], ns_coefficients="test-ranks", process_group="world").step()


def test_auto_is_deflated_on_a_cpu_in_bf16_and_on_devices_if_they_are_large() -> None:
    assert choose("auto", None, form="cpu") == "deflated"
    for dtype in (torch.bfloat16, torch.float16):
        assert choose("auto", None, 4096, 11520, form="device", dtype=dtype) == "deflated"
    for steps, rows, cols, form, dtype in (
        (5, 4096, 11520, "cpu", torch.bfloat16),
        (5, 4096, 11520, "device", torch.bfloat16),
        (None, 4096, 11520, "cpu", torch.float32),
        (None, 4096, 11520, "device", torch.float32),
        (None, 4096, 11520, "cpu", torch.float64),
        (None, 4095, 14336, "device", torch.bfloat16),
        (None, 4096, 11519, "device", torch.bfloat16),
        (None, 4096, 11520, None, torch.bfloat16),
    ):
        assert choose("auto", steps, rows, cols, form=form, dtype=dtype) == "polar_express"
    assert choose("quintic", None, form="cpu") == "quintic"
    assert choose([JORDAN], None, 4096, 11520, form="device") == [JORDAN]
    with pytest.raises(ValueError, match="'auto', a published set"):
        mm.register_coefficients("auto", CoefficientSet((JORDAN,), "cycle"))


def test_on_a_device_each_matrix_gets_the_set_of_its_size() -> None:
    """Also of one parameter that is several matrices; explain() tells it, and each set is what a step would take."""
    fused = torch.nn.Parameter(torch.empty(14336, 4096, device="meta"))
    group = {"params": [fused], "param_names": ["qkv"], "matrices": [("rows", 12288, 1024, 1024)]}
    optimizer = mm.Muon([group], process_group="local")
    explanation = optimizer.explain()
    assert explanation.rows[0].sets == {"deflated in fp16": 1, "polar_express in fp16": 2}
    forms = [form_of(rows, 4096, coefficients="auto") for rows in (12288, 1024)]
    assert [form.degrees for form in forms] == [[[3, 5, 5]], [[3, 3, 3], [3, 3]]]
    assert explanation.rows[0].flops == sum(
        count * cost(rows, 4096, degrees=form.degrees, one_gram=form.whole, deflated=form.deflated, on_device=True)
        for count, rows, form in zip((1, 2), (12288, 1024), forms, strict=True)
    )
    optimizer.param_groups[0]["ns_steps"] = 5
    assert optimizer.explain().rows[0].sets == {"polar_express in fp16": 3}


def test_matrices_of_a_fused_parameter_share_batches_with_others_of_their_set_alone() -> None:
    """Of several groups; 1001 × 4099 elements are not aligned, so that shapes alone would let them share a batch."""
    split, shape = ("rows", 12288, 1001), (1001, 4099)
    weights = [torch.nn.Parameter(torch.empty(size, device="meta")) for size in ((13289, 4099), shape, shape)]
    named = {"params": weights[2:], "ns_coefficients": "deflated"}
    groups = [{"params": weights[:2], "matrices": [split, None]}, named]
    optimizer = mm.Muon(groups, process_group="local", kernels="torch")
    parameters = plan(optimizer.param_groups, optimizer._runtime).plan.parameters
    fused, same, other = (parameter.settings for parameter in parameters)
    assert fused == same != other


@pytest.mark.parametrize(("shape", "named"), [((390, 400), "deflated"), ((400, 384), "deflated"), ((383, 400), None)])
def test_an_optimizer_takes_the_set_that_suits_its_matrix(shape: tuple[int, int], named: str | None) -> None:
    """By default on a CPU; the ranks compare its name, and explain() tells it."""
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight = torch.nn.Parameter(torch.zeros(shape))
    optimizer = mm.Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, scale_mode="none")
    weight.grad = gradient.clone()
    (row,) = optimizer.explain().rows
    optimizer.step()
    expected = mm.orthogonalize(gradient.bfloat16(), coefficients=named or "polar_express")
    assert torch.equal(weight.detach(), -expected.float())
    assert row.sets == {named or "polar_express": 1}
    assert ("orthogonalized: 1 by deflated" in str(optimizer.explain())) == bool(named)
    assert optimizer._runtime.planned is not None
    assert optimizer._runtime.planned.plan.parameters[0].settings.startswith("deflated, 3 steps, auto")
    optimizer.param_groups[0]["ns_steps"] = 5
    assert optimizer.explain().rows[0].sets == {"polar_express": 1}
    assert optimizer._runtime.planned.plan.parameters[0].settings.startswith("polar_express, 5 steps, auto")
