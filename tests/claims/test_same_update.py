"""Invariant 1: with equal gradients, parameters and state under any layout are bit for bit those of one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import muonmesh as mm
from muonmesh.numerics import kernels
from muonmesh.numerics.coefficients import COEFFICIENT_SETS
from muonmesh.numerics.deflation import Deflation
from tests.support import problem
from tests.support.in_copies import step_as_on_a_device
from tests.support.workers import Pool

COVERS = (
    "comm.storage.Storage",
    "layout.line_segments.shares_blocks",
    "step.muon_step.MuonStep",
)


@pytest.fixture(scope="module")
def workers(workers: Callable[[int], Pool]) -> Iterator[Callable[[int], Pool]]:
    """Two ranks are programs of their own here: what is ordered by hashes has another order on each of them."""
    programs = Pool(2, programs=True)
    yield lambda ranks: programs if ranks == 2 else workers(ranks)
    programs.close()


def hashed() -> int:
    return hash("lm_head.weight")


def test_names_hash_differently_on_two_ranks(workers) -> None:
    assert len(set(workers(2).run(hashed))) == 2


def steps_of_layout(
    layout: str, dtype: torch.dtype, count: int = 3, param_dtype: torch.dtype = torch.float32, **settings: Any
) -> tuple[list[str], dict[str, Tensor]]:
    """Step in a layout and alone on this very rank; return what differs, and the result."""
    values = {name: value.to(param_dtype) for name, value in problem.initial().items()}
    *_, (model, optimizer) = problem.steps(layout, count, values, compute_dtype=dtype, **settings)
    result = problem.result(model, optimizer)
    alone = problem.alone(count, param_dtype=param_dtype, compute_dtype=dtype, **settings)
    return problem.differing(result, alone), result


def promised_and_counted(layout: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return what explain() promises of a step and what a step did."""
    *_, (_, optimizer) = problem.steps(layout, 2, problem.initial(), compute_dtype=dtype)
    promise = optimizer.explain()
    did = optimizer.counts
    return (
        (promise.orthogonalizations, promise.collectives, promise.bytes_sent, promise.bytes_received),
        (did.orthogonalized, did.collectives, did.bytes_sent, did.bytes_received),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("layout", problem.LAYOUTS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_bit_for_bit(workers, ranks: int, layout: str, dtype: torch.dtype) -> None:
    for differing, _ in workers(ranks).run(steps_of_layout, layout, dtype):
        assert differing == []


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "shard1"])
def test_bit_for_bit_with_compiled_products(workers, products: None, layout: str) -> None:
    for differing, _ in workers(4).run(steps_of_layout, layout, torch.bfloat16, kernels="compiled"):
        assert differing == []


def run_as_with_avx512(layout: str, **settings: Any) -> tuple[list[str], bool]:
    """`run`, with products taken as where the processor has AVX-512: of any size; also whether it has any."""
    gains = dict(kernels._GAIN)
    kernels._GAIN.update(dict.fromkeys(gains, gains["avx512"]))
    kernels.auto_takes.cache_clear()
    try:
        return steps_of_layout(layout, torch.bfloat16, **settings)[0], kernels.auto_takes()[0] > 0
    finally:
        kernels._GAIN.update(gains)
        kernels.auto_takes.cache_clear()


@pytest.mark.parametrize("coefficients", ["polar_express", "deflated"])
@pytest.mark.parametrize("layout", problem.LAYOUTS)
def test_bit_for_bit_where_auto_takes_compiled_products(
    workers, products: None, layout: str, coefficients: str
) -> None:
    for differing, _ in workers(2).run(run_as_with_avx512, layout, ns_coefficients=coefficients):
        assert differing == []


GUARDED = {"high": (384, 800), "tall": (410, 384), "flat": (384, 800), "small": (30, 40)}
"""The first two need two more polynomials than "deflated" has, the third none, and the fourth is not deflated."""


@functools.cache
def plateaus(step: int) -> dict[str, Tensor | None]:
    """Of the first two matrices 100 singular values are 300 times the others."""
    gradients: dict[str, Tensor | None] = {}
    for number, (name, shape) in enumerate(GUARDED.items()):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        if name in ("high", "tall"):
            u, v = (torch.linalg.qr(matrix).Q[:, : min(shape)] for matrix in (x, x.mT))
            x = (u * torch.where(torch.arange(min(shape)) < 100, 1.0, 1 / 300)) @ v.mT
        gradients[name] = x.float() * 2.0**step
    return gradients


def run_guarded(layout: str, threads: int) -> tuple[list[str], list[bool]]:
    """Step in a layout, and alone on one thread; return what differs, and which matrices got more polynomials."""
    before, parameters = torch.get_num_threads(), dict(problem.PARAMETERS)
    unguarded = replace(COEFFICIENT_SETS["deflated"], deflation=Deflation())
    mm.register_coefficients("test-unguarded", unguarded)
    problem.PARAMETERS.update({name: (shape, "whole") for name, shape in GUARDED.items()})
    try:
        results = []
        for layout_name, count in ((layout, threads), ("local", 1)):
            torch.set_num_threads(count)
            *_, (model, optimizer) = problem.steps(layout_name, 2, plateaus(0), plateaus, ns_coefficients="deflated")
            results.append(problem.result(model, optimizer))
        more = [
            not torch.equal(*(mm.orthogonalize(x, coefficients=name) for name in ("deflated", "test-unguarded")))
            for name, x in plateaus(0).items()
            if name != "small"
        ]
        return problem.differing(*results), more
    finally:
        torch.set_num_threads(before)
        problem.PARAMETERS.clear()
        problem.PARAMETERS.update(parameters)


@pytest.mark.parametrize("layout", problem.LAYOUTS)
@pytest.mark.parametrize(("ranks", "threads"), [(1, 2), (2, 1), (2, 2), (4, 1)])
def test_what_some_matrices_need_more_of_is_bit_for_bit_too(workers, ranks: int, threads: int, layout: str) -> None:
    """On a CPU "deflated" decides by each result how many polynomials it takes."""
    for differing, more in workers(ranks).run(run_guarded, layout, threads, timeout=300):
        assert differing == []
        assert more == [True, True, False]


def run_together(layout: str, param_dtype: torch.dtype, **settings: Any) -> tuple[list[str], float]:
    """Step as on a device, in a layout and alone; return what differs, and how far it is from a step on a CPU."""
    values = {name: value.to(param_dtype) for name, value in problem.initial().items()}
    *_, (model, optimizer) = problem.steps(layout, 3, values, prepare=step_as_on_a_device, **settings)
    result = problem.result(model, optimizer)
    alone, cpu = (
        problem.alone(3, prepare=prepare, param_dtype=param_dtype, **settings)
        for prepare in (step_as_on_a_device, None)
    )
    far = [
        float((alone[name].double() - cpu[name].double()).norm() / (1e-30 + cpu[name].double().norm())) for name in cpu
    ]
    return problem.differing(result, alone), max(far)


@pytest.mark.parametrize("layout", problem.LAYOUTS)
@pytest.mark.filterwarnings("ignore:.*without masters")
def test_what_a_device_runs_is_bit_for_bit_too(workers, layout: str) -> None:
    """Elementwise work on all pieces of a bucket, masked on the device, the memory of a bucket its own."""
    settings = {"compute_dtype": torch.float32, "memory_budget_mb": 0.08}
    for differing, far in workers(4).run(run_together, layout, torch.float32, **settings):
        assert differing == []
        assert far < 1e-5


@pytest.mark.parametrize(
    "settings",
    [
        {"nesterov": False},
        {"momentum": 0.0},
        {"state_dtype": torch.float64},
        {"param_dtype": torch.bfloat16},
        {"param_dtype": torch.bfloat16, "master_dtype": torch.float32},
        {"param_dtype": torch.bfloat16, "stochastic_rounding": 5},
        {"param_dtype": torch.float64, "compute_dtype": torch.float64},
        {"decay_mode": "cautious"},
        {"shard_state": True},
    ],
    ids=lambda settings: "-".join(settings),
)
@pytest.mark.filterwarnings("ignore:.*without masters")
def test_what_a_device_runs_is_bit_for_bit_with_settings(workers, settings: dict[str, Any]) -> None:
    settings = {"compute_dtype": torch.float32, "param_dtype": torch.float32, **settings}
    rough = settings["param_dtype"] == torch.bfloat16
    layout = "ddp" if "shard_state" in settings else "fsdp"
    for differing, far in workers(2).run(run_together, layout, **settings):
        assert differing == []
        assert far < (1e-2 if rough else 1e-4)


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "shard1"])
def test_one_process_without_distributed_has_the_same_bits(workers, layout: str) -> None:
    alone = problem.alone(3, compute_dtype=torch.float32)
    for _, result in workers(2).run(steps_of_layout, layout, torch.float32):
        assert problem.differing(result, alone) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"memory_budget_mb": 0.08},  # many buckets, pipelined
        {"memory_budget_mb": 16000.0},
        {"nesterov": False},
        {"compute_dtype": torch.float64},
        {"state_dtype": torch.float64},
        {"ns_coefficients": "simple", "ns_method": "standard"},
        {"scale_mode": "spectral", "extra_scale_factor": 0.3},
    ],
    ids=lambda settings: "-".join(settings),
)
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_bit_for_bit_with_settings(workers, layout: str, settings: dict[str, Any]) -> None:
    settings = dict(settings)
    dtype = settings.pop("compute_dtype", torch.bfloat16)
    for differing, _ in workers(2).run(steps_of_layout, layout, dtype, **settings):
        assert differing == []


@pytest.mark.parametrize("master", [None, torch.float32], ids=["no-master", "master"])
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "shard1"])
@pytest.mark.filterwarnings("ignore:.*without masters")
def test_bf16_parameters_bit_for_bit(workers, layout: str, master: torch.dtype | None) -> None:
    for differing, result in workers(2).run(
        steps_of_layout, layout, torch.bfloat16, param_dtype=torch.bfloat16, master_dtype=master
    ):
        assert differing == []
        assert result["tall"].dtype == torch.bfloat16
        assert result["tall.momentum_buffer"].dtype == torch.float32


ROUNDED = {"param_dtype": torch.bfloat16, "stochastic_rounding": 5}


@pytest.mark.parametrize("layout", [*problem.LAYOUTS, *problem.TWO_DIMS])
@pytest.mark.parametrize("ranks", [2, 4])
def test_stochastic_rounding_bit_for_bit(workers, ranks: int, layout: str) -> None:
    """Random numbers belong to elements of whole parameters."""
    if ranks == 2 and layout in problem.TWO_DIMS:
        layout = "shard1"
    for differing, result in workers(ranks).run(steps_of_layout, layout, torch.bfloat16, **ROUNDED):
        assert differing == []
        assert result["tall"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "settings",
    [{"shard_state": True}, {"decay_mode": "cautious"}, {"memory_budget_mb": 0.08}],
    ids=lambda settings: "-".join(settings),
)
def test_stochastic_rounding_bit_for_bit_with_settings(workers, settings: dict[str, Any]) -> None:
    layout = "ddp" if "shard_state" in settings else "fsdp"
    for differing, _ in workers(2).run(steps_of_layout, layout, torch.bfloat16, **ROUNDED, **settings):
        assert differing == []


@pytest.mark.parametrize("layout", problem.LAYOUTS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_step_does_what_explain_says(workers, ranks: int, layout: str) -> None:
    outcomes = workers(ranks).run(promised_and_counted, layout, torch.bfloat16)
    matrices = 0
    for promised, counts in outcomes:
        assert promised == counts
        matrices += counts[0]
    # no matrix is orthogonalized twice, none is left out
    assert matrices == len(_matrices())
    assert any(counts[2] for _, counts in outcomes)


def _matrices() -> list[int]:
    from tests.support.reference import split

    return [
        matrix.numel()
        for name, (shape, spec) in problem.PARAMETERS.items()
        if spec != "adamw"
        for matrix in split(problem.initial()[name], spec)
    ]
