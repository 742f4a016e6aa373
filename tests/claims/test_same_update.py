"""Invariant 1: with equal gradients, parameters and state under any layout are bit for bit those of one process."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

import muonmesh as mm
from muonmesh.comm.storage import local_of
from muonmesh.numerics import kernels
from muonmesh.numerics.coefficients import COEFFICIENT_SETS
from muonmesh.numerics.deflation import Deflation
from tests.support import layouts, problem
from tests.support.in_copies import step_as_on_a_device
from tests.support.meshes import mesh_of
from tests.support.on_ranks import on_ranks
from tests.support.samples import one_in, pairs_of
from tests.support.workers import Pool

COVERS = (
    "comm.storage.Storage",
    "layout.line_segments.shares_blocks",
    "step.muon_step.MuonStep",
    "comm.placing.storage_of",
    "comm.sharing.sharded_over_replicas",
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
    layout: str, param_dtype: torch.dtype = torch.float32, **settings: Any
) -> tuple[list[str], dict[str, Tensor], tuple[tuple[int, ...], ...]]:
    """Step in a layout and alone on this very rank; return what differs, the result, and what was promised and done."""
    values = {name: value.to(param_dtype) for name, value in problem.initial().items()}
    *_, (model, optimizer) = problem.steps(layout, 3, values, **settings)
    result = problem.result(model, optimizer)
    alone = problem.alone(3, param_dtype=param_dtype, **settings)
    return problem.differing(result, alone), result, problem.promised_and_counted(optimizer)


BF16: dict[str, Any] = {"param_dtype": torch.bfloat16}
ROUNDED = {**BF16, "stochastic_rounding": 5}
SETTINGS: list[dict[str, Any]] = [
    {"memory_budget_mb": 0.08},  # many buckets, pipelined
    {"memory_budget_mb": 16000.0},
    {"nesterov": False},
    {"compute_dtype": torch.float64},
    {"state_dtype": torch.float64},
    {"ns_coefficients": "simple", "ns_method": "standard"},
    *({"scale_mode": mode, "extra_scale_factor": 0.3} for mode in ("spectral", "unit_rms_norm", "original")),
]
CASES: list[Any] = [
    # Random numbers belong to elements of whole parameters.
    *pairs_of((2, 4), problem.LAYOUTS, ({}, {"compute_dtype": torch.float32}, ROUNDED)),
    *((2, layout, settings) for layout in ("ddp", "fsdp") for settings in SETTINGS),
    *((2, layout, BF16) for layout in ("ddp", "fsdp", "shard1")),
    *((2, layout, {**BF16, "master_dtype": torch.float32}) for layout in ("ddp", "fsdp", "shard1")),
    *((4, layout, ROUNDED) for layout in problem.TWO_DIMS),
    (2, "ddp", {**ROUNDED, "shard_state": True}),
    *((2, "fsdp", {**ROUNDED, **more}) for more in ({"decay_mode": "cautious"}, {"memory_budget_mb": 0.08})),
]


@pytest.mark.parametrize(("ranks", "layout", "settings"), CASES, ids=str)
@pytest.mark.filterwarnings("ignore:.*without masters")
def test_bit_for_bit(workers, ranks: int, layout: str, settings: dict[str, Any]) -> None:
    """As on each of the ranks alone, and here, without torch.distributed. And a step does what `explain` says."""
    alone = problem.alone(3, **{key: value for key, value in settings.items() if key != "shard_state"})
    assert alone["tall"].dtype == settings.get("param_dtype", torch.float32)
    assert alone["tall.momentum_buffer"].dtype == settings.get("state_dtype", torch.float32)
    orthogonalized = sent = 0
    for differing, result, (promised, counted) in workers(ranks).run(steps_of_layout, layout, **settings):
        assert differing == []
        assert problem.differing(result, alone) == []
        assert promised == counted
        sent += counted[2]
        orthogonalized += counted[0]
    assert orthogonalized == len(problem.matrices()), "each once"
    assert sent


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "shard1"])
def test_bit_for_bit_with_compiled_products(workers, products: None, layout: str) -> None:
    for differing, *_ in workers(4).run(steps_of_layout, layout, kernels="compiled"):
        assert differing == []


def run_as_with_avx512(layout: str, **settings: Any) -> tuple[list[str], bool]:
    """`run`, with products taken as where the processor has AVX-512: of any size; also whether it has any."""
    gains = dict(kernels._GAIN)
    kernels._GAIN.update(dict.fromkeys(gains, gains["avx512"]))
    kernels.auto_takes.cache_clear()
    try:
        return steps_of_layout(layout, **settings)[0], kernels.auto_takes()[0] > 0
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


def step_guarded(layout: str, threads: int) -> dict[str, Tensor]:
    torch.set_num_threads(threads)
    *_, (model, optimizer) = problem.steps(layout, 2, plateaus(0), plateaus, ns_coefficients="deflated")
    return problem.result(model, optimizer)


@functools.cache
def alone_on_one_thread() -> tuple[dict[str, Tensor], list[bool]]:
    """Return the result of one process, and which matrices got more polynomials: once for all layouts."""
    result = step_guarded("local", 1)
    unguarded = replace(COEFFICIENT_SETS["deflated"], deflation=Deflation())
    mm.register_coefficients("test-unguarded", unguarded)
    more = [
        not torch.equal(*(mm.orthogonalize(x, coefficients=name) for name in ("deflated", "test-unguarded")))
        for name, x in plateaus(0).items()
        if name != "small"
    ]
    return result, more


@pytest.mark.parametrize(
    ("ranks", "threads", "layout"),
    [
        *((ranks, threads, layout) for ranks, threads in ((1, 2), (2, 1), (4, 1)) for layout in problem.LAYOUTS),
        *one_in(4, [(2, 2, layout) for layout in problem.LAYOUTS]),
    ],
)
@on_ranks(timeout=300)
def test_what_some_matrices_need_more_of_is_bit_for_bit_too(layout: str, threads: int) -> None:
    """On a CPU "deflated" decides by each result how many polynomials it takes; one process does on one thread."""
    before, parameters = torch.get_num_threads(), dict(problem.PARAMETERS)
    problem.PARAMETERS.update({name: (shape, "whole") for name, shape in GUARDED.items()})
    try:
        alone, more = alone_on_one_thread()
        assert problem.differing(step_guarded(layout, threads), alone) == []
    finally:
        torch.set_num_threads(before)
        problem.PARAMETERS.clear()
        problem.PARAMETERS.update(parameters)
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


TOGETHER: list[tuple[int, str, dict[str, Any]]] = [
    *((4, layout, {"memory_budget_mb": 0.08}) for layout in problem.LAYOUTS),
    *((2, "fsdp", settings) for settings in ({"nesterov": False}, {"momentum": 0.0}, {"decay_mode": "cautious"})),
    *((2, "fsdp", settings) for settings in ({"state_dtype": torch.float64}, BF16, ROUNDED)),
    (2, "fsdp", {**BF16, "master_dtype": torch.float32}),
    (2, "fsdp", {"param_dtype": torch.float64, "compute_dtype": torch.float64}),
    (2, "ddp", {"shard_state": True}),
]


@pytest.mark.parametrize(("ranks", "layout", "settings"), TOGETHER, ids=str)
@pytest.mark.filterwarnings("ignore:.*without masters")
def test_what_a_device_runs_is_bit_for_bit_too(workers, ranks: int, layout: str, settings: dict[str, Any]) -> None:
    """Elementwise work on all pieces of a bucket, masked on the device, the memory of a bucket its own."""
    settings = {"compute_dtype": torch.float32, "param_dtype": torch.float32, **settings}
    rough = settings["param_dtype"] == torch.bfloat16
    for differing, far in workers(ranks).run(run_together, layout, **settings):
        assert differing == []
        assert far < (1e-2 if rough else 1e-4 if ranks == 2 else 1e-5)


# ------------------------------------------------------------------ every way of holding a matrix


EIGHT = [name for name, (sizes, _) in layouts.EIGHT.items() if len(sizes) == 3]
FP32: dict[str, Any] = {"compute_dtype": torch.float32}


def stepped_as_held(layout: str, seed: int = 0, **settings: Any) -> tuple[list[str], Any, Any]:
    """What differs from one process; what was promised and done; elements of momentum here, and in all."""
    placed = problem.holding(layout, seed)
    optimizer = problem.optimizer_of(placed, **settings)
    for step in range(3):
        placed.give(problem.gradients(step))
        optimizer.step()
    settings.pop("shard_state", None)
    result = placed.whole(optimizer)
    stored = [state["momentum_buffer"] for state in optimizer.state.values() if "momentum_buffer" in state]
    elements = sum(local_of(buffer).numel() for buffer in stored)
    whole = sum(value.numel() for name, value in result.items() if name.endswith(".momentum_buffer"))
    differing = problem.differing(result, problem.alone(3, **settings))
    return differing, problem.promised_and_counted(optimizer), (elements, whole)


# Declared shards are cut by the same layouts; one of each kind stays.
DECLARED = ("hsdp", "rows by cols", "fsdp over colwise", "strided alone", "experts")
IN_SOAK = [pytest.mark.soak]
HOLDINGS = [
    *(pytest.param(4, name, 0, FP32, id=name) for name in layouts.MESHES),
    *(
        pytest.param(4, f"declared {name}", 0, FP32, id=f"declared {name}", marks=IN_SOAK * (name not in DECLARED))
        for name in layouts.MESHES
    ),
    *(
        pytest.param(4, name, 0, {"memory_budget_mb": 0.08}, id=f"{name}, bf16")
        for name in ("hsdp", "fsdp over colwise", "experts")
    ),
    *(
        pytest.param(4, "flat", seed, settings, id=f"flat {seed}, {settings}")
        for seed, settings in itertools.product(range(3), (FP32, {}))
    ),
    *(
        pytest.param(2, "flat", seed, settings, id=f"flat {seed}, 2 ranks, {settings}", marks=IN_SOAK)
        for seed, settings in itertools.product(range(3), (FP32, {}))
    ),
    *(pytest.param(4, "flat of tensor parallel", seed, FP32, id=f"flat shards {seed}") for seed in range(3)),
    *(pytest.param(8, name, 0, FP32, id=name, marks=IN_SOAK * (name == "hsdp over rowwise")) for name in EIGHT),
]


@pytest.mark.parametrize(("ranks", "layout", "seed", "settings"), HOLDINGS)
def test_bit_for_bit_in_any_layout(workers, ranks: int, layout: str, seed: int, settings: dict[str, Any]) -> None:
    orthogonalized = 0
    for differing, (promised, counted), _ in workers(ranks).run(stepped_as_held, layout, seed, **settings):
        assert differing == []
        assert promised == counted
        orthogonalized += counted[0]
    assert orthogonalized == len(problem.matrices()), "each once, over all ranks"


@pytest.mark.parametrize("settings", [FP32, {}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["ddp", "hsdp", "replicate inside", "all replicated"])
def test_momentum_shared_by_replicas_has_the_same_bits_and_takes_less(workers, layout: str, settings: Any) -> None:
    outcomes = workers(4).run(stepped_as_held, layout, shard_state=True, **settings)
    assert [differing for differing, *_ in outcomes] == [[]] * 4
    stored, (whole, *_) = [elements for *_, (elements, _) in outcomes], [whole for *_, (_, whole) in outcomes]
    assert sum(stored) == whole, "each element once"
    assert max(stored) <= 1.25 * whole / 4


@pytest.mark.parametrize("layout", ["fsdp over rowwise", "three axes", "hsdp, shard 1", "cols by rows"])
def test_momentum_is_shared_where_it_can_be(workers, layout: str) -> None:
    outcomes = workers(4).run(stepped_as_held, layout, shard_state=True, **FP32)
    assert [differing for differing, *_ in outcomes] == [[]] * 4


@pytest.mark.parametrize("dim", [0, 1, 2])
@on_ranks(4)
def test_whole_experts_cost_no_communication(dim: int) -> None:
    """Eight experts on four ranks, two each, or each cut among all."""
    mesh = mesh_of((4,))
    value = torch.randn(8, 12, 20, generator=torch.Generator().manual_seed(0))
    twin = nn.Parameter(value.clone())
    weight = nn.Parameter(distribute_tensor(value.clone(), mesh, [Shard(dim)], src_data_rank=None))
    optimizers = [mm.Muon([weight], lr=0.1), mm.Muon([twin], lr=0.1, process_group="local")]
    gradient = torch.randn(8, 12, 20, generator=torch.Generator().manual_seed(1))
    weight.grad, twin.grad = distribute_tensor(gradient, mesh, [Shard(dim)], src_data_rank=None), gradient.clone()
    for optimizer in optimizers:
        optimizer.step()
    counts = optimizers[0].counts
    assert torch.equal(weight.full_tensor(), twin)
    assert counts.orthogonalized == 2
    assert (counts.bytes_sent == 0) == (dim == 0)
