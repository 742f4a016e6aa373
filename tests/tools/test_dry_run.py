"""What one step would launch, move and hold on CUDA, and that the host never waits, shown on fake tensors."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.cuda._utils import _get_device_index
from torch.distributed.tensor import Placement, Replicate, Shard

import muonmesh as mm
from muonmesh.layout.cost import cost
from muonmesh.numerics.newton_schulz import Orthogonalizer
from muonmesh.report.traffic import traffic
from muonmesh.step.connection import plan
from muonmesh.tools.forecasts.device_rates import DeviceRates
from muonmesh.tools.forecasts.step_memory import step_memory
from tests.device.dry_run import DryRun, dry_run
from tests.device.launches import HostSync
from tests.device.pretended import pretended_cuda
from tests.support.figures import CASES, GPT2, LLAMA, STEPS, Model, bag, optimizer_of, row, table
from tests.support.samples import one_in

COVERS = (
    "layout.budget.Budget",
    "report.traffic.traffic",
    "step.batches.Batches",
    "tools.forecasts.step_memory.step_memory",
)

MIB = 2**20
VECTORS = 2**16  # bytes: rates and flags
WORKSPACE = 32 * MIB  # what cuBLAS takes on an H100, which no dry run counts
SOAK = pytest.mark.soak

pytestmark = pytest.mark.filterwarnings(
    "ignore:Accessing the data pointer of FakeTensor", "ignore:.*without masters", "ignore:.*lr_scheduler"
)


def matrices_only(model: nn.Module) -> mm.Muon:
    return mm.Muon(list(model.named_parameters()), lr=0.02)


def torchs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon(list(model.parameters()), lr=0.02)


def on(*placements: Placement) -> Callable[[str, nn.Parameter], tuple[Placement, ...]]:
    return lambda name, parameter: placements


# ------------------------------------------------------------------ figures


@pytest.fixture(scope="module")
def gpt2() -> DryRun:
    return dry_run(bag(*GPT2), matrices_only)


def test_three_layers_of_gpt2(gpt2: DryRun) -> None:
    torch_run = dry_run(bag(*GPT2), torchs)
    assert gpt2.launches <= 120 < torch_run.launches
    assert gpt2.bytes_per_element <= 28
    assert gpt2.kept_bytes < VECTORS
    assert gpt2.parts()["device"] < 0.6 * torch_run.parts()["device"]
    assert gpt2.seconds == gpt2.parts()["host"]  # a few small matrices wait for the host
    assert torch_run.launches == 396  # as counted before, by another count: 23 launches a matrix and its copies


@pytest.mark.soak
def test_what_a_gpu_is_compared_with_is_modelled() -> None:
    """`make test-gpu` measures the same cases and writes both beside each other."""
    small = {name: replace(case, shapes=[(64, 64), (64, 128)]) for name, case in CASES.items()}
    small["a layer of Llama 8B"].optimizer("cpu").step()  # real parameters with gradients
    text = table({name: (row(case.modelled()), None) for name, case in small.items()})
    for name in CASES:
        assert f"| {name} |" in text
    assert text.count("not measured") == len(CASES)


WHERE: dict[str, tuple[dict[str, int], tuple[Placement, ...]]] = {
    "one device": ({}, ()),
    "fsdp 8": ({"shard": 8}, (Shard(0),)),
    "ddp 8": ({"replicate": 8}, (Replicate(),)),
    "hsdp 2x4": ({"replicate": 2, "shard": 4}, (Replicate(), Shard(0))),
    "fsdp 4, tp 2": ({"shard": 4, "tp": 2}, (Shard(0), Shard(1))),
}
MIXED = [(2304, 768), (768, 768), (3072, 768), (768, 3072), (256, 4096), (128, 96), (1024, 1024), (640, 64)]
CLOSE = 1.02  # what vectors take


def spent(layout: str, shapes: Sequence[tuple[int, ...]], budget: float | None) -> tuple[DryRun, mm.Explanation, int]:
    """A step with a budget, counted, what the optimizer tells of it, and the modelled peak."""
    mesh, placements = WHERE[layout]
    ranks: dict[str, Any] = {"mesh": mesh, "placements": on(*placements)} if mesh else {}
    make = lambda model: mm.Muon(list(model.parameters()), memory_budget_mb=budget)  # noqa: E731
    reports: list[tuple[mm.Explanation, int]] = []

    def step(optimizer: mm.Muon) -> None:
        optimizer.step()
        planned = plan(optimizer.param_groups, optimizer._runtime)
        moved = traffic(planned.plan, planned.rank)
        of = planned.orthogonalizer
        modelled = step_memory(
            planned.plan, moved, lambda number: of(number).needs, lambda number, shape: of(number).joins or shape
        )
        reports.append((optimizer.explain(), modelled))

    run = dry_run(bag(*shapes), make, world=math.prod(mesh.values()), steps=1, step=step, **ranks)
    return run, *reports[-1]


@pytest.mark.parametrize("layout", WHERE)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=SOAK) for seed in range(1, 8))])
def test_a_step_keeps_to_its_budget_down_to_one_matrix(layout: str, seed: int) -> None:
    """Peaks of the real step, and the modelled peak is near them; a larger budget never starts more."""
    numbers, least, before = random.Random(seed), 0, math.inf
    shapes = MIXED * 2 if seed == 0 else numbers.choices(MIXED, k=numbers.randint(3, 20))
    for budget in (0, 24, 64, 200):
        run, explanation, modelled = spent(layout, shapes, budget)
        least = least or run.peak_bytes
        assert run.peak_bytes <= CLOSE * max(least, budget * MIB)
        assert explanation.budget_bytes == budget * MIB
        assert run.peak_bytes / CLOSE - MIB / 4 <= modelled <= 1.35 * run.peak_bytes
        assert run.launches + run.collectives <= before
        before = run.launches + run.collectives


@pytest.mark.parametrize("layout", ["one device", "ddp 8", "fsdp 8"])
def test_the_default_takes_twice_the_memory_of_torch_or_160_mib(layout: str) -> None:
    """On one device 1.5 times, with cuBLAS's workspace. The host takes half of torch.optim.Muon's time."""
    shapes = GPT2 * 4
    torch_run = dry_run(bag(*shapes), torchs, steps=1)
    run, *_ = spent(layout, shapes, None)
    assert run.peak_bytes <= (1.5 * (torch_run.peak_bytes + WORKSPACE) if layout == "one device" else 160 * MIB)
    assert run.parts()["host"] < 0.5 * torch_run.parts()["host"] or layout != "one device"
    small, *_ = spent(layout, shapes, 2 * torch_run.peak_bytes / MIB)
    assert small.peak_bytes <= CLOSE * 2 * torch_run.peak_bytes
    assert small.launches < torch_run.launches / 3
    assert max(run.collectives, small.collectives) <= 40


LLAMA_1B = [(2048, 2048), (512, 2048), (512, 2048), (2048, 2048), (8192, 2048), (8192, 2048), (2048, 8192)]


@pytest.mark.parametrize(
    ("shapes", "measured", "workspace"),
    [(GPT2, 53, 0), (LLAMA_1B * 4, 176, WORKSPACE), (LLAMA * 2, 544, WORKSPACE)],
    ids=["gpt2", "llama 1b", "llama 8b"],
)
def test_the_peak_is_at_most_that_of_torch_on_an_h100_and_half_as_much(
    shapes: list[tuple[int, ...]], measured: int, workspace: int
) -> None:
    """``measured``: MiB of torch.optim.Muon there. From 2,048 rows on cuBLAS multiplies for us, too."""
    run, _, modelled = spent("one device", shapes, None)
    assert run.peak_bytes + workspace <= 1.5 * measured * MIB
    assert modelled == pytest.approx(run.peak_bytes, rel=0.01)


def test_llama_8b_under_ddp_on_8_takes_few_collectives_and_twice_the_memory_of_torch() -> None:
    """dion makes 4 all-gathers of it; 169 collectives before."""
    run, explanation, _ = spent("ddp 8", LLAMA * 32, None)
    assert run.collectives == explanation.collectives == 36
    assert run.peak_bytes <= CLOSE * 2 * (8 * 14336 * 4096 + 4 * 4096 * 4096)  # as torch.optim.Muon, counted: 512 MiB


def test_torch_finds_the_number_of_a_pretended_device() -> None:
    """It asks whether what it is given is a `torch.cuda.device`, which has to be a class."""
    with pretended_cuda(), torch.cuda.device("cuda:0"):
        assert _get_device_index(torch.device("cuda", 0), optional=True) == 0


def test_products_cost_what_the_plan_says(gpt2: DryRun) -> None:
    """The same FLOPs, counted by the operations that run and by the cost model that balances ranks."""
    device, planned = torch.device("cuda", 0), 0
    options: dict[str, Any] = {"coefficients": "polar_express", "steps": None, "method": "auto", "kernels": "torch"}
    for rows, cols in GPT2:
        form = Orthogonalizer.of(rows, cols, **options, dtype=torch.bfloat16, device=device)
        planned += cost(rows, cols, degrees=form.degrees)
    assert gpt2.flops == pytest.approx(planned, rel=0.1)


def test_a_small_matrix_takes_few_calls_of_python() -> None:
    """What the host calls in our files for one matrix more; a thousand take no time that depends on the machine."""
    files = f"{Path(mm.__file__).parent}/"  # a clone, and so its environment, may lie in a folder of the package's name

    def calls(matrices: int) -> int:
        counted = 0

        def count_call(frame: FrameType, event: str, argument: object) -> None:
            nonlocal counted
            file = frame.f_code.co_filename
            counted += event == "call" and file.startswith(files) and "/tools/" not in file

        def step(optimizer: mm.Muon) -> None:
            nonlocal counted
            counted = 0
            sys.setprofile(count_call)
            optimizer.step()
            sys.setprofile(None)

        dry_run(bag(*[(64, 64)] * matrices), matrices_only, step=step, steps=2)  # the first creates state
        return counted

    assert (calls(60) - calls(20)) / 40 <= 19


class Limits(NamedTuple):
    """At most so many launches, bytes an element, and MiB at once; so many GB sent, None: not looked at."""

    launches: float = math.inf
    bytes_per_element: float = math.inf
    peak_mib: float = math.inf
    gigabytes_sent: float | None = None


ONE: tuple[dict[str, int], tuple[Placement, ...]] = ({}, ())
FSDP_TP: tuple[dict[str, int], tuple[Placement, ...]] = ({"shard": 8, "tp": 8}, (Shard(0), Shard(1)))
HSDP = (Replicate(), Shard(0))
EXPERTS = [(192, 256, 128), (192, 128, 256)] * 4
SQUARES = [(4096, 4096)] * 4
SUMS = Limits(peak_mib=1312)  # (5 × 2 + 9 × 8) bytes an element of one: the second is what computes summands in fp64


@pytest.mark.parametrize(
    ("mesh", "placements", "shapes", "rule", "limits"),
    [
        pytest.param(*ONE, LLAMA * 2, "muon", Limits(200, 28, 816, 0.0), id="one-device"),
        pytest.param(*ONE, LLAMA * 32, "muon", Limits(1690, 28, 1010, 0.0), id="one-device-whole", marks=SOAK),
        pytest.param({"shard": 8}, (Shard(0),), LLAMA * 2, "muon", Limits(100, 36, 409, 0.203423744), id="fsdp-8"),
        pytest.param({"shard": 64}, (Shard(0),), LLAMA * 8, "muon", Limits(80, 49.5, 385, 0.168296448), id="fsdp-64"),
        pytest.param(
            *({"shard": 2048}, (Shard(0),), LLAMA * 8, "muon", Limits(80, 802, 385, 0.119095296)),
            id="fsdp-2048",
            marks=SOAK,
        ),
        pytest.param(*FSDP_TP, LLAMA * 8, "muon", Limits(80, 49.5, 385, 0.168296448), id="fsdp-8-tp-8", marks=SOAK),
        pytest.param(
            {"replicate": 8, "shard": 8}, HSDP, LLAMA * 8, "muon", Limits(95, 26.5, 423, 0.978321408), id="hsdp-8x8"
        ),
        pytest.param(
            *({"replicate": 32, "shard": 64}, HSDP, LLAMA * 8, "muon", Limits(120, 56, 385, 3.756785664)),
            id="hsdp-32x64",
            marks=SOAK,
        ),
        pytest.param(
            {"replicate": 64}, (Replicate(),), LLAMA * 2, "muon", Limits(100, 24, 1009, 7.398752256), id="ddp-64"
        ),
        pytest.param(*ONE, [(64, 64)] * 1000, "muon", Limits(45), id="1000 small"),
        # 24 experts a rank: not 24 times as many launches as one.
        pytest.param({"experts": 8}, (Shard(0),), EXPERTS, "muon", Limits(150, gigabytes_sent=0.0), id="experts"),
        # The replica of the owner adds up; what goes to the others travels in rounds, as without sums.
        pytest.param({"replicate": 64}, (Replicate(),), SQUARES, "adamuon", SUMS, id="sums, ddp-64"),
        pytest.param({"replicate": 64}, (Replicate(),), SQUARES, "hyperball", SUMS, id="norms, ddp-64", marks=SOAK),
        *(
            pytest.param({"replicate": 8, "shard": 8}, HSDP, SQUARES, rule, SUMS, id=f"{rule}, hsdp-8x8", marks=SOAK)
            for rule in ("adamuon", "hyperball")
        ),
        # Several fp64 copies of a matrix beside each other would be ten times what it takes in bf16.
        pytest.param(*ONE, [(1024, 1 << 16)], "adamuon", Limits(peak_mib=7 * 4 * 64 + 1), id="sums in parts"),
    ],
)
def test_a_step_keeps_to_its_limits(
    mesh: dict[str, int],
    placements: tuple[Placement, ...],
    shapes: list[tuple[int, ...]],
    rule: str,
    limits: Limits,
) -> None:
    """Memory is that of a few of the largest matrices, however many replicas there are. The whole: 10 s."""
    ranks: dict[str, Any] = {"mesh": mesh, "placements": on(*placements)} if mesh else {}
    make = lambda model: mm.Muon([{"params": list(model.parameters()), "algorithm": rule}], lr=0.02)  # noqa: E731
    run = dry_run(bag(*shapes), make, world=math.prod(mesh.values()), steps=1, **ranks)
    assert run.launches <= limits.launches
    assert run.bytes_per_element <= limits.bytes_per_element
    assert run.peak_bytes <= limits.peak_mib * MIB
    assert run.kept_bytes < VECTORS
    assert limits.gigabytes_sent in (None, pytest.approx(run.bytes_sent / 1e9, rel=1e-3))


@pytest.mark.parametrize("shape", [(14336, 4096), (4096, 14336), (28672, 8192)], ids=str)
def test_a_large_matrix_takes_less_memory_than_with_torch(shape: tuple[int, int]) -> None:
    """In bf16 X twice and four squares, or less: the squares of two Gram steps."""
    muonmesh_run, torch_run = (dry_run(bag(shape), make, steps=2) for make in (matrices_only, torchs))
    (rows, cols) = sorted(shape)
    assert muonmesh_run.peak_bytes <= 2 * (2 * rows * cols + 4 * rows * rows) + MIB
    assert muonmesh_run.peak_bytes <= 0.7 * torch_run.peak_bytes
    assert muonmesh_run.launches <= 60


def test_bytes_sent_are_what_the_layout_needs() -> None:
    """bf16 directions to the owners and results back: each element that a rank stores and does not own, twice."""
    run = dry_run(bag(*[(512, 256)] * 16), matrices_only, world=4, mesh={"shard": 4}, placements=on(Shard(0)))
    stored = 16 * 512 * 256 // 4
    assert run.bytes_sent == 2 * (2 * stored * 3 // 4)


def test_without_triton_bytes_stay_few(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = dry_run(bag(*GPT2), matrices_only)
    for module in ("numerics.kernels", "step.by_kernel"):
        monkeypatch.setattr(f"muonmesh.{module}.is_usable", lambda device: False)
    plain = dry_run(bag(*GPT2), matrices_only)
    assert plain.kernels < fused.kernels
    assert fused.bytes_per_element < plain.bytes_per_element <= 150  # each part of a rule is masked by itself


# ------------------------------------------------------------------ the host never waits


LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "fsdp": {"world": 4, "mesh": {"shard": 4}, "placements": on(Shard(0))},
    "ddp": {"world": 4, "mesh": {"replicate": 4}, "placements": on(Replicate())},
}


@pytest.mark.parametrize("layout", one_in(3, ["fsdp", "one", "ddp"]))
@pytest.mark.parametrize("step", STEPS)
def test_the_host_does_not_wait(step: str, layout: str) -> None:
    """Neither in the first step nor later."""
    # torch's fused AdamW has no fake implementation for a rate on the device.
    model = Model()
    dry_run(model, optimizer_of, step=STEPS[step], **LAYOUTS[layout])


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        (torch.float32, {"compute_dtype": torch.float32}),
        (torch.bfloat16, {}),
        (torch.bfloat16, {"master_dtype": torch.float32}),
        (torch.float32, {"rule": "normuon"}),
        (torch.float32, {"rule": "adamuon"}),
        (torch.float32, {"rule": "soap"}),
        (torch.float32, {"rule": "dynmuon"}),
        (torch.float32, {"decay_mode": "cautious"}),
        (torch.bfloat16, {"stochastic_rounding": 5}),
        (torch.float32, {"shard_state": True}),
        (torch.float32, {"state_dtype": "int8"}),
        (torch.bfloat16, {"state_device": "cpu", "rule": "adamuon", "master_dtype": torch.float32}),
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", one_in(3, ["ddp", "one", "fsdp"]))
def test_the_host_does_not_wait_with_settings(layout: str, dtype: torch.dtype, settings: dict[str, Any]) -> None:
    dry_run(Model(dtype), lambda model: optimizer_of(model, **settings), **LAYOUTS[layout])


@pytest.mark.parametrize(
    "wait",
    [
        lambda p: p.sum().item(),
        lambda p: bool(p.any()),
        lambda p: p.cpu(),
        lambda p: torch.ones(3).to(p.device),
        lambda p: p[p > 0],
        lambda p: p.nonzero(),
        lambda p: torch.equal(p, p),
        lambda p: p.flatten().long().bincount(),
    ],
    ids=["item", "bool", "to the host", "to the device", "mask", "nonzero", "equal", "bincount"],
)
def test_a_wait_is_an_error(wait: Callable[[Tensor], object]) -> None:
    """The dry run sees each kind of wait: it could fail above."""

    def step(optimizer: mm.Muon) -> None:
        optimizer.step()
        wait(optimizer.param_groups[0]["params"][0].detach())

    with pytest.raises(HostSync):
        dry_run(bag((8, 8)), matrices_only, step=step)


# ------------------------------------------------------------------ state on the host


@pytest.mark.parametrize("layout", ["fsdp", pytest.param("one", marks=pytest.mark.soak)])
def test_state_on_the_host_is_on_the_device_for_a_bucket(layout: str) -> None:
    """It is copied there and back once a step, and what is there at once is the state of a few buckets.

    bf16 weights have masters, so each element of a matrix has 8 bytes of state, of AdamW's embedding 12.
    """
    ranks, count = LAYOUTS[layout].get("world", 1), 32

    def run(**settings: Any) -> DryRun:
        with torch.device("meta"):
            matrices = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(count))
            model = nn.ModuleDict({"matrices": matrices, "embedding": nn.Embedding(256, 64)}).bfloat16()
        masters = {"master_dtype": torch.float32, "memory_budget_mb": 16.0}  # one matrix for each owner
        return dry_run(model, lambda model: mm.from_model(model, **masters, **settings), **LAYOUTS[layout])

    away, stays = run(state_device="cpu"), run()
    bucket = 8 * MIB  # in each layout: the state of one matrix, or of a part of as many as there are ranks
    state = count * bucket // ranks + 256 * 64 * 12 // ranks
    assert state <= stays.state_bytes
    assert away.state_bytes < 1000  # counts of steps
    assert state <= away.bytes_to_host <= state + 1000
    assert state <= away.bytes_to_device <= state + 1000
    assert max(stays.bytes_to_host, stays.bytes_to_device) < 1000
    assert away.peak_bytes <= min(stays.peak_bytes, 18.1 * MIB) + 4 * bucket


def test_state_on_the_host_stays_there_when_it_is_compared_measured_and_loaded() -> None:
    """Replicas compare it, `metrics` reads it, and the host waits for neither. What is loaded is put there."""
    devices = set[str]()

    def step(optimizer: mm.Muon) -> None:
        optimizer._runtime.loaded = True
        optimizer.clip_grad_norm_(1.0, skip_above="4x")
        optimizer.step()
        optimizer.metrics()
        planned = optimizer._runtime.planned
        assert planned is not None
        for member in planned.members:  # fake numbers pass no check of `load_state_dict`, so what it does after that
            for form in member.forms(optimizer._runtime.precision):
                if form.key != "step":
                    devices.add(f"{member.tensor.device.type}: {form.saved.fresh().device.type}")

    make = lambda model: mm.from_model(model, state_device="cpu", process_group="world")  # noqa: E731
    run = dry_run(Model(), make, step=step, world=4)
    assert run.state_bytes < 1000
    assert devices == {"cuda: cpu"}


# ------------------------------------------------------------------ the dry run itself


def test_a_dry_run_changes_nothing_and_ends_its_ranks() -> None:
    model, event = bag((8, 16)), torch.cuda.Event
    dry_run(model, matrices_only, world=2, mesh={"shard": 2}, placements=on(Shard(0)))
    assert model.weight0.device.type == "meta"  # type: ignore[union-attr]
    assert not dist.is_initialized()
    assert torch.cuda.Event is event


def test_a_mesh_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mesh: found {'shard': 4}, 4 ranks; needed world=8 ranks"):
        dry_run(bag((8, 8)), matrices_only, world=8, mesh={"shard": 4}, placements=on(Shard(0)))


def test_the_model_of_time_is_its_slowest_part() -> None:
    far = dict.fromkeys(("flops", "published", "bytes", "wire"), math.inf)
    fast = DeviceRates(**far, kernel=1e-3, operation=1e-4, view=1e-5, matrix=0.0)
    run = dry_run(bag((80, 80)), matrices_only, rates=fast)
    started = run.kernels * 1e-3 + (run.launches - run.kernels) * 1e-4
    assert run.seconds == pytest.approx(started + run.views * 1e-5)
    assert run.limited_by == "host"
    assert 10 < run.kernels < run.launches


@pytest.mark.parametrize(
    ("operation", "launches", "moved"),
    [
        (lambda x: x.mul_(2.0), 1, 2 * 4000),
        (lambda x: x.clone(), 1, 2 * 4000),
        (lambda x: x.copy_(x[:1]), 1, 4000 + 40),
        (lambda x: torch.add(x, x[:, :1], out=x), 1, 4000 + 400 + 4000),
        (lambda x: x.view(-1)[5:], 0, 0),
        (lambda x: torch._foreach_mul_([x] * 300, 2.0), 3, 300 * 2 * 4000),
        (lambda x: torch.cat([x] * 300), 3, 2 * 300 * 4000),
    ],
    ids=["in place", "clone", "copy", "out", "view", "foreach", "cat"],
)
def test_launches_and_bytes_of_single_operations(
    operation: Callable[[Tensor], object], launches: int, moved: int
) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from tests.device.launches import Launches
    from tests.device.pretended import pretended_cuda

    with pretended_cuda(), FakeTensorMode():
        x = torch.empty(100, 10, device="cuda")
        with Launches() as count:
            operation(x)
    assert count.launches == launches
    assert count.elementwise_bytes == moved


def test_memory_is_counted_while_it_lives() -> None:
    def step(optimizer: mm.Muon) -> None:
        first = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        del first
        second = torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")
        second.view(2, -1).zero_()

    assert dry_run(bag((8, 8)), matrices_only, step=step).peak_bytes == 2 * MIB
