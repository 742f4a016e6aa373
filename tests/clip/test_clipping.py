"""Clipping: norms over all shards, each element once; what a policy scales, and what a skipped step leaves alone."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import muonmesh as mm
from muonmesh.clip import norm_means
from muonmesh.clip.norm_means import DECAY, SPIKE, WARM_UP
from muonmesh.comm.storage import local_of
from muonmesh.numerics.rules import RULES, MuonRule, Rule
from muonmesh.step.runtime import Driver
from tests.support import layouts, problem, saving
from tests.support.meshes import mesh_of
from tests.support.on_ranks import on_ranks

COVERS = (
    "clip.clipping.clip_gradients",
    "clip.limits.Limits",
    "clip.norm_means.means_of",
    "clip.squares.norms_of",
    "clip.squares.add_squares",
    "comm.storage.overlapping",
)

MUON = [name for name, (_, spec) in problem.PARAMETERS.items() if spec != "adamw"]
ADAMW = [name for name in problem.PARAMETERS if name not in MUON]
FP32 = {"compute_dtype": torch.float32}
POLICIES = ("adamw_only", "all", "separate")
HOLD: dict[str, tuple[int, ...]] = {  # way of holding: on how many ranks
    "ddp": (2, 4),
    "fsdp": (2, 4),
    "shard1": (4,),
    "hsdp": (4,),
    "rows by cols": (4,),
    "fsdp over colwise": (4,),
    "fsdp over rowwise": (4,),
    "three axes": (4,),
    "experts": (4,),
    "declared rows by cols": (4,),
    "flat": (2, 4),
    "flat of tensor parallel": (4,),
}
CASES = [(ranks, layout) for layout, counts in HOLD.items() for ranks in counts]
# Norms and bits of every way are compared in `make soak`; one of each kind of cut in `make test`.
QUICK = [(2, "fsdp"), (4, "ddp"), (4, "shard1"), (4, "fsdp over colwise"), (4, "flat of tensor parallel")]
BITS = [case if case in QUICK else pytest.param(*case, marks=pytest.mark.soak) for case in CASES]


def huge(step: int) -> dict[str, Tensor]:
    """Squares of some overflow in fp32, those of others vanish."""
    scales = {"even": 1e25, "experts": 1e22, "norm": 3e24, "embedding": 1e-25}
    return {name: value * scales.get(name, 1.0) for name, value in problem.initial(2000 + step).items()}


def spiky(step: int, spike: int = WARM_UP + 2) -> dict[str, Tensor]:
    """Gradients of one size, those of two matrices and one vector a thousand times that in one step."""
    sizes = {"qkv": 1e3, "tall": 1e3, "norm": 1e3} if step == spike else {}
    values = {name: value * sizes.get(name, 1.0) for name, value in problem.initial(3000 + step).items()}
    values["square"] = torch.zeros_like(values["square"]) if step % 3 else values["square"]
    return values


def norm_of(gradients: dict[str, Tensor], names: list[str]) -> float:
    return math.sqrt(math.fsum(float(gradients[name].double().square().sum()) for name in names))


def trained_with_clipping(
    layout: str, policy: str, steps: int, gradients_of: Callable[[int], dict[str, Tensor]], **options: Any
) -> Any:
    """Step with clipping before each step; return the norms and their means, and parameters and state."""
    holding = problem.holding(layout)
    optimizer = problem.optimizer_of(holding, **FP32)
    results = []
    for step in range(steps):
        holding.give(gradients_of(step))
        norms = optimizer.clip_grad_norm_(1.5, policy=policy, **options)
        results.append((float(norms.total), float(norms.muon), float(norms.adamw), bool(norms.skipped)))
        optimizer.step()
    results += means_of(optimizer)
    return results, holding.whole(optimizer)


def means_of(optimizer: mm.Muon) -> list[tuple[float, float, float]]:
    """The running means of all norms and their counts, which all groups have."""
    optimizer.finish()
    first, *others = [group["norm_means"] for group in optimizer.param_groups]
    assert all(other == first for other in others)
    return list(first)


@pytest.mark.parametrize(("ranks", "layout"), CASES)
@on_ranks()
def test_norms_are_those_of_the_whole_gradients_by_one_collective(layout: str) -> None:
    holding = problem.holding(layout)
    optimizer = problem.optimizer_of(holding, **FP32)
    holding.give(huge(0))
    expected = [norm_of(huge(0), names) for names in ([*MUON, *ADAMW], MUON, ADAMW)]
    for policy in POLICIES:  # the first call of all makes the plan
        norms = optimizer.clip_grad_norm_(math.inf, policy="adamw_only")
        before = issued()
        norms = optimizer.clip_grad_norm_(math.inf, policy=policy)
        if dist.get_rank() == 0:
            float(norms), norms.item(), bool(norms.skipped)
        assert issued() - before == 1
        assert [float(norms.total), float(norms.muon), float(norms.adamw)] == pytest.approx(expected, rel=1e-12)


def issued() -> int:
    """How many collectives this rank has issued on the default group."""
    return dist.group.WORLD._get_sequence_number_for_group()


def all_policies(layout: str) -> list[Any]:
    """Two steps of each, and four of one with a warm-up of two norms, whose spike in the third step is skipped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norm_means, "WARM_UP", 2)
        return [
            *(trained_with_clipping(layout, policy, 2, problem.gradients) for policy in POLICIES),
            trained_with_clipping(layout, "separate", 4, functools.partial(spiky, spike=2), skip_above="4x"),
        ]


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    return all_policies("local")


@pytest.mark.parametrize(("ranks", "layout"), BITS)
def test_every_policy_has_the_bits_of_one_process(workers, alone, ranks: int, layout: str) -> None:
    outcomes = workers(ranks).run(all_policies, layout)
    for outcome in outcomes:
        for (norms, result), (alone_norms, expected), (same, _) in zip(outcome, alone, outcomes[0], strict=True):
            assert problem.differing(result, expected) == []
            assert norms == same  # norms and means have the same bits on all ranks, in another layout perhaps others
            for value, alone_value in zip(norms, alone_norms, strict=True):
                assert value == pytest.approx(alone_value, rel=1e-12)
        assert [skipped for *_, skipped in outcome[-1][0][:4]] == [False, False, True, False]


def clipped_gradients(gradients: dict[str, Tensor], policy: str, **options: Any) -> dict[str, Tensor]:
    model, group = problem.hold("local", problem.initial())
    optimizer = mm.Muon(problem.groups(model), process_group=group, **problem.SETTINGS, **FP32)
    for name, gradient in gradients.items():
        model.get_parameter(name).grad = gradient.clone()
    optimizer.clip_grad_norm_(1.5, policy=policy, **options)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_what_each_policy_scales() -> None:
    raw = problem.gradients(4)
    norm = {names[0]: norm_of(raw, names) for names in (MUON, ADAMW)}
    total = norm_of(raw, [*MUON, *ADAMW])
    by = {
        "adamw_only": (None, norm[ADAMW[0]]),
        "all": (total, total),
        "separate": (norm[MUON[0]], norm[ADAMW[0]]),
    }
    for policy in POLICIES:
        gradients = clipped_gradients(raw, policy)
        for names, limit in zip((MUON, ADAMW), by[policy], strict=True):
            for name in names:
                if limit is None:
                    assert torch.equal(gradients[name], raw[name])
                else:
                    assert torch.allclose(gradients[name], raw[name] * (1.5 / limit), rtol=1e-6, atol=0)


def test_small_gradients_are_not_scaled_and_torch_agrees() -> None:
    small = {name: gradient * 1e-9 for name, gradient in problem.gradients(4).items()}
    assert problem.differing(clipped_gradients(small, "all"), small) == []
    model, _ = problem.hold("local", problem.initial())
    for name, gradient in problem.gradients(4).items():
        model.get_parameter(name).grad = gradient
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.5)
    gradients = clipped_gradients(problem.gradients(4), "all")
    for name, parameter in model.named_parameters():
        assert torch.allclose(gradients[name], parameter.grad, rtol=1e-5)


def made_in_inference(gradient: Tensor) -> Tensor:
    with torch.inference_mode():
        return gradient.clone()


UNWRITABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda gradient: gradient[:1].expand(gradient.shape),
    "of inference": made_in_inference,
}


@pytest.mark.parametrize("kind", UNWRITABLE)
@on_ranks(2)
def test_a_gradient_that_cannot_be_written_on_one_rank_is_scaled_in_a_copy(kind: str) -> None:
    """It had raised torch's error on this rank alone, after the ranks had agreed, and the others waited."""
    weights = [nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(3, 5))]
    optimizer = mm.Muon([{"params": [("a", weights[0]), ("b", weights[1])]}], process_group="world")
    row = torch.arange(1.0, 7.0).expand(4, 6).clone()
    unwritten = UNWRITABLE[kind](row) if dist.get_rank() == 1 else row.clone()
    weights[0].grad, weights[1].grad = unwritten, torch.ones(3, 5)
    norm = math.sqrt(4 * 91 + 15)
    assert float(optimizer.clip_grad_norm_(1.0, policy="all")) == pytest.approx(norm)
    for weight, gradient in zip(weights, (row, torch.ones(3, 5)), strict=True):
        assert weight.grad is not None
        assert torch.allclose(weight.grad, gradient / norm, rtol=1e-6)
    if dist.get_rank() == 1:
        assert torch.equal(unwritten, row)
    optimizer.step()  # the next meeting of the ranks


@pytest.mark.parametrize("policy", ["all", "separate"])
def test_a_gradient_that_two_parameters_share_is_scaled_once(policy: Any) -> None:
    """``torch.autograd.grad`` returns one tensor for both summands of a sum."""
    a, b, bias = (nn.Parameter(torch.ones(shape)) for shape in ((4, 6), (4, 6), (24,)))
    matrices: dict[str, Any] = {"params": [("a", a), ("b", b)]}
    optimizer = mm.Muon([matrices, {"params": [("bias", bias)], "algorithm": "adamw"}])
    shared = torch.arange(1.0, 25.0)
    a.grad = b.grad = shared.view(4, 6)
    bias.grad = shared
    square = float(shared.square().sum())
    norms = {"all": (math.sqrt(3 * square),) * 2, "separate": (math.sqrt(2 * square), math.sqrt(square))}[policy]
    optimizer.clip_grad_norm_(1.0, policy=policy)
    for weight, norm in ((a, norms[0]), (b, norms[0]), (bias, norms[1])):
        assert weight.grad is not None
        assert torch.allclose(weight.grad.view(-1), torch.arange(1.0, 25.0) / norm, rtol=1e-6)


@pytest.mark.parametrize("part", ["first rows", "last rows", "last columns"])
def test_a_gradient_that_is_a_part_of_another_is_scaled_once(part: str) -> None:
    """`torch.autograd.grad` returns views for what is concatenated and added to another parameter."""
    whole, piece = nn.Parameter(torch.zeros(4, 6)), {"first rows": (2, 6), "last rows": (2, 6), "last columns": (4, 2)}
    other, constant = (
        nn.Parameter(torch.zeros(piece[part])),
        torch.zeros(4, 4) if "columns" in part else torch.zeros(2, 6),
    )
    parts = [other, constant] if part == "first rows" else [constant, other]
    summed = whole + torch.cat(parts, dim=int("columns" in part))
    raw = torch.arange(1.0, 25.0).view(4, 6)
    whole.grad, other.grad = torch.autograd.grad((summed * raw).sum(), [whole, other])
    expected = [gradient.clone() for gradient in (whole.grad, other.grad)]
    memory = whole.grad.untyped_storage().data_ptr()
    assert other.grad.untyped_storage().data_ptr() == memory, "they are views of one memory"
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in expected))
    mm.Muon([("whole", whole), ("other", other)]).clip_grad_norm_(1.0, policy="all")
    for weight, gradient in zip((whole, other), expected, strict=True):
        assert torch.allclose(weight.grad, gradient / norm, rtol=1e-6)


def with_gradient(mesh: DeviceMesh, placement: Placement, gradient: Tensor) -> nn.Parameter:
    """Ones on a mesh, with a gradient."""
    parameter = nn.Parameter(distribute_tensor(torch.ones_like(gradient), mesh, [placement], src_data_rank=None))
    parameter.grad = distribute_tensor(gradient, mesh, [placement], src_data_rank=None)
    return parameter


def half_mesh() -> tuple[int, DeviceMesh]:
    """The stage of this rank, of two, and the mesh of its two ranks."""
    stage = dist.get_rank() // 2
    return stage, [mesh_of((2,), (0, 1)), mesh_of((2,), (2, 3))][stage]


def muon_and_adamw(name: str, weight: nn.Parameter, bias: nn.Parameter | None = None) -> list[dict[str, Any]]:
    """Param groups of a matrix, and of a vector under AdamW where there is one."""
    groups: list[dict[str, Any]] = [{"params": [(name, weight)], "name": "muon"}]
    if bias is not None:
        groups.append({"params": [("bias", bias)], "name": "adamw", "algorithm": "adamw"})
    return groups


# ------------------------------------------------------------------- multiples of the running mean


class Mean:
    """The documented running mean of a norm, in Python floats."""

    def __init__(self) -> None:
        self.mean, self.count = 0.0, 0

    def limit(self, multiple: float) -> float:
        return multiple * self.mean if self.count >= 10 else math.inf

    def add(self, norm: float) -> None:
        if 0 < norm < math.inf:
            counted = min(norm, 2 * self.mean) if self.count >= 10 else norm
            self.count += 1
            self.mean += max(1 - 0.95, 1 / self.count) * (counted - self.mean)


def test_a_multiple_skips_spikes_and_follows_slow_growth() -> None:
    """The means and each decision are those of the documented rule; the spiky half is found under "separate" alone."""
    assert (DECAY, WARM_UP, SPIKE) == (0.95, 10, 2.0)
    sizes = [1.05**step for step in range(60)]  # benign growth, eighteenfold in the end
    spikes, nans, zeros = (15, 16, 40), (20, 50), (3, 12, 30)  # the second of the nans is infinite
    protected = {"adamw_only": ("adamw",), "all": ("total",), "separate": ("muon", "adamw")}
    for policy, names in protected.items():
        weight, bias, optimizer = small_model()
        means = {name: Mean() for name in ("total", "muon", "adamw")}
        generator = torch.Generator().manual_seed(0)
        for step, size in enumerate(sizes):
            drawn = (torch.randn(shape, generator=generator) for shape in ((6, 4), (5,)))
            weight.grad, bias.grad = (vector / vector.norm() * size for vector in drawn)
            weight.grad *= 1e4 if step in spikes else 0.0 if step in zeros else 1.0
            bias.grad[0] = {20: math.nan, 50: math.inf}.get(step, bias.grad[0])
            muon, adamw = (float(p.grad.double().norm()) for p in (weight, bias))
            norms = {"total": math.hypot(muon, adamw), "muon": muon, "adamw": adamw}
            needed = step in nans or any(norms[name] > means[name].limit(4.0) for name in names)
            measured = optimizer.clip_grad_norm_(math.inf, policy=policy, skip_above="4x")
            assert bool(measured.skipped) == needed, (policy, step)
            assert needed == (step in nans or (step in spikes and policy != "adamw_only")), (policy, step)
            optimizer.step()
            assert optimizer.skipped == needed
            for name, norm in norms.items():
                means[name].add(norm)
            averages, counts = means_of(optimizer)
            assert list(counts) == [mean.count for mean in means.values()]
            assert averages == pytest.approx([mean.mean for mean in means.values()], rel=1e-12)
    assert counts == (58, 57, 58)  # NaN and zero do not count


def test_norms_that_stay_large_are_taken_in_the_end() -> None:
    """After as many steps as docs/clipping.md says."""
    page = (Path(__file__).parents[2] / "docs/clipping.md").read_text()
    assert "stay 10 times larger pass after 19 steps" in " ".join(page.split())
    *parameters, optimizer = small_model()
    skipped = []
    for step in range(60):
        skipped.append(bool(clip_ones(*parameters, optimizer, 1.0 if step < 20 else 10.0).skipped))
        optimizer.step()
    assert skipped == [20 <= step < 39 for step in range(60)]  # 1.05**19 > 10 / 4


def test_each_step_counts_the_norms_of_the_last_call_before_it() -> None:
    """Measuring, clipping twice, dropped gradients, and a step that raises count nothing more."""
    weight, bias, optimizer = small_model()

    def clip(size: float, **options: Any) -> None:
        weight.grad, bias.grad = torch.ones(6, 4), torch.full((5,), size / math.sqrt(5))
        optimizer.clip_grad_norm_(math.inf, **options)

    clip(7.0, skip_above="4x")
    clip(3.0, skip_above="4x")
    optimizer.step()
    assert [row[2] for row in means_of(optimizer)] == pytest.approx([3.0, 1])
    clip(9.0)
    optimizer.step()
    clip(9.0, skip_above=1e9)
    optimizer.step()
    clip(9.0, skip_above="4x")
    clip(9.0)  # as a logger may, and the next step is neither skipped nor counted by it
    optimizer.step()
    clip(9.0, skip_above="4x")
    optimizer.zero_grad()
    optimizer.step()
    assert [row[2] for row in means_of(optimizer)] == pytest.approx([3.0, 1])
    clip(5.0, skip_above="4x")
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match=r"lr: found -1\.0"):
        optimizer.step()
    assert [row[2] for row in means_of(optimizer)] == pytest.approx([3.0, 1])
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()  # takes the clipped gradients, so it counts them
    assert [row[2] for row in means_of(optimizer)] == pytest.approx([4.0, 2])


def test_an_overflow_that_clipping_did_not_see_counts_nothing() -> None:
    *parameters, optimizer = small_model()
    for overflow in (0.0, 1.0):
        clip_ones(*parameters, optimizer)
        optimizer.found_inf = torch.tensor(overflow)  # type: ignore[attr-defined]
        optimizer.step()
    assert means_of(optimizer)[1] == (1, 1, 1)


def test_a_group_that_is_added_takes_the_means_of_the_others() -> None:
    *parameters, optimizer = small_model()
    more = nn.Parameter(torch.ones(3))
    for step in range(3):
        if step == 1:
            optimizer.state_dict()
            optimizer.add_param_group({"params": [("more", more)], "algorithm": "adamw", "name": "more"})
        more.grad = torch.ones(3)
        clip_ones(*parameters, optimizer)
        optimizer.step()
    assert means_of(optimizer)[1] == (3, 3, 3)


@pytest.mark.parametrize(
    "means", [((1.0, 1.0, 1.0),), ((-1.0, 1.0, 1.0), (1, 1, 1)), ((math.nan, 1.0, 1.0), (1, 1, 1)), "none", None]
)
def test_means_that_no_step_leaves_are_refused(means: Any) -> None:
    *_, optimizer = small_model()
    saved = optimizer.state_dict()
    saved["state"] = {0: {"momentum_buffer": torch.ones(6, 4)}}
    saved["param_groups"][0]["norm_means"] = means
    with pytest.raises(mm.StateError, match="group 'muon' of the state: norm_means: found"):
        optimizer.load_state_dict(saved)
    assert means_of(optimizer) == [(0, 0, 0)] * 2


def test_a_state_without_means_begins_anew() -> None:
    *parameters, optimizer = small_model()
    clip_ones(*parameters, optimizer)
    optimizer.step()
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        del group["norm_means"]
    optimizer.load_state_dict(saved)
    assert means_of(optimizer) == [(0, 0, 0)] * 2


def steps_skipped(holding: layouts.Held, optimizer: mm.Muon, first: int, last: int) -> list[bool]:
    skipped = []
    for step in range(first, last):
        holding.give(spiky(step))
        skipped.append(bool(optimizer.clip_grad_norm_(1.5, policy="separate", skip_above="4x").skipped))
        optimizer.step()
    return skipped


def model_of(holding: layouts.Held) -> nn.Module:
    bag = nn.Module()
    for group in holding.groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            bag.register_parameter(name, parameter)
    return bag


WAYS: tuple[saving.How, ...] = ("torch's", "flat", "ours")


def save_means(path: str) -> Any:
    """Save in all ways just before the spike, and go on."""
    holding = problem.holding("fsdp")
    optimizer = problem.optimizer_of(holding, **FP32)
    steps_skipped(holding, optimizer, 0, WARM_UP + 2)
    for how in WAYS:
        saving.save(f"{path}/{how}", model_of(holding), optimizer, how)
    saved = means_of(optimizer)
    skipped = steps_skipped(holding, optimizer, WARM_UP + 2, WARM_UP + 4)
    return saved, skipped, means_of(optimizer), holding.whole(optimizer)


def load_means(layout: str, path: str) -> Any:
    """What each way of saving brings, and what comes of it."""
    results = []
    for how in WAYS:
        holding = problem.holding(layout)
        optimizer = problem.optimizer_of(holding, **FP32)
        saving.load(f"{path}/{how}", model_of(holding), optimizer, how)
        loaded = means_of(optimizer)
        skipped = steps_skipped(holding, optimizer, WARM_UP + 2, WARM_UP + 4)
        results.append((loaded, skipped, means_of(optimizer), holding.whole(optimizer)))
    return results


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [(4, "fsdp"), pytest.param(2, "shard1", marks=pytest.mark.soak), (2, "ddp"), (4, "hsdp")],
)
def test_means_are_saved_and_go_on_in_another_layout(workers, tmp_path: Path, ranks: int, layout: str) -> None:
    """Bit for bit in the same layout. The first step after the load is skipped, and the next is not."""
    (saved, skipped, after, result), *_ = workers(4).run(save_means, str(tmp_path))
    assert skipped == [True, False]
    assert saved[1] == (WARM_UP + 2,) * 3
    for outcome in workers(ranks).run(load_means, layout, str(tmp_path)):
        for loaded, again, later, whole in outcome:
            assert loaded == saved
            assert again == skipped
            assert later == after if layout == "fsdp" else later[0] == pytest.approx(after[0], rel=1e-12)
            assert problem.differing(whole, result) == []


def with_a_vector_on_half(waits: bool | None) -> Any:
    """Ranks 0 and 1 hold a matrix alone, 2 and 3 have a vector too; "adamw_only" follows that vector's norm."""
    (stage, half), ones = half_mesh(), torch.ones(4, 6)
    weight = with_gradient(mesh_of((4,)), Shard(0), ones)
    bias = with_gradient(half, Replicate(), torch.ones(5)) if stage else None
    optimizer = mm.Muon(muon_and_adamw("weight", weight, bias), lr=0.1)
    optimizer._runtime.driver = Driver(waits)
    skipped = []
    for step in range(WARM_UP + 3):
        weight.grad = problem.placed_like(weight, ones)
        if bias is not None:
            bias.grad = problem.placed_like(bias, torch.full((5,), 100.0 if step == WARM_UP + 1 else 1.0))
        optimizer.clip_grad_norm_(1.0, skip_above="4x")
        optimizer.step()
        skipped.append(optimizer.skipped)
    return skipped, means_of(optimizer)


@pytest.mark.parametrize("waits", [None, False], ids=["host waits", "masked"])
def test_ranks_that_hold_nothing_of_a_half_have_its_mean(workers, waits: bool | None) -> None:
    outcomes = workers(4).run(with_a_vector_on_half, waits)
    for skipped, means in outcomes:
        assert skipped == [step == WARM_UP + 1 for step in range(WARM_UP + 3)]
        assert means == outcomes[0][1]
        assert means[1] == (WARM_UP + 3,) * 3


@on_ranks(2)
def test_a_step_that_the_device_stops_counts_nothing() -> None:
    """A step that finds an error on the device raises in the next."""
    weight, bias, optimizer = small_model("world")
    optimizer._runtime.driver = Driver(False)
    counts = []
    for step in range(3):
        weight.grad, bias.grad = torch.ones(6, 4), torch.ones(5)
        optimizer.clip_grad_norm_(1.0, skip_above="4x")
        if step == 1 and dist.get_rank() == 1:
            bias.grad = torch.ones(5).to_sparse()
        try:
            optimizer.step()
        except (TypeError, mm.PlanError):
            counts.append(-1.0)
        counts.append(means_of(optimizer)[1][0])
    assert counts == [1, 1, -1, 1]


# ------------------------------------------------------------------- skipping


def check_skipping(layout: str, policy: str, how: str) -> None:
    """Take a step, one that is skipped, and one more: the skipped one leaves every bit."""
    first, second = problem.initial(4000), problem.initial(4001)
    bad = {**second, "bias": second["bias"] * 1e6}
    holding, twin = problem.holding(layout), problem.holding(layout)
    optimizer, other = (problem.optimizer_of(h, **FP32) for h in (holding, twin))
    flags, results = [], []
    for gradients in (first, bad, second):
        holding.give(gradients)
        if gradients is bad and how == "nan" and dist.get_rank() == dist.get_world_size() - 1:
            for tensor in holding.tensors.values():
                if local_of(tensor.grad).numel():
                    local_of(tensor.grad).view(-1)[:1] = math.nan  # an overflow on one rank only
                    break
        norms = optimizer.clip_grad_norm_(1e9, policy=policy, skip_above=math.inf if how == "nan" else 1e5)
        flags.append(bool(norms.skipped))
        optimizer.step()
        results.append(holding.whole(optimizer))
    for gradients in (first, second):
        twin.give(gradients)
        other.clip_grad_norm_(1e9, policy=policy)
        other.step()
    assert flags == [False, True, False]
    assert problem.differing(results[0], results[1]) == []
    assert problem.differing(results[2], twin.whole(other)) == []
    assert len(problem.differing(results[1], results[2])) > 40  # the other steps did something


@pytest.mark.parametrize(
    ("ranks", "layout", "policies"),
    [
        pytest.param(2, "fsdp", POLICIES, id="fsdp", marks=pytest.mark.soak),
        pytest.param(4, "shard1", ["separate"], id="shard1"),
        pytest.param(4, "flat", ["all"], id="flat", marks=pytest.mark.soak),
    ],
)
@on_ranks()
def test_a_skipped_step_leaves_every_bit_and_only_that_step(layout: str, policies: Sequence[str]) -> None:
    for policy in policies:
        for how in ("above", "nan"):
            check_skipping(layout, policy, how)


@pytest.mark.parametrize("waits", [None, False], ids=["host waits", "masked"])
@on_ranks(4)
def test_ranks_that_own_nothing_decide_as_the_others_do(waits: bool | None) -> None:
    """A matrix of two rows on four ranks, so that two own nothing; the skip is also masked on the device."""
    weight = with_gradient(mesh_of((4,)), Shard(0), torch.ones(2, 6))
    optimizer = mm.Muon([weight], lr=0.1, **FP32)
    optimizer._runtime.driver = Driver(waits)
    moved = []
    skipped = False
    for scale in (1.0, math.inf, 1.0):
        weight.grad = problem.placed_like(weight, torch.randn(2, 6) * scale)
        before = weight.full_tensor().clone()
        norms = optimizer.clip_grad_norm_(1.0, policy="separate")
        skipped = skipped or bool(norms.skipped)
        optimizer.step()
        moved.append(not torch.equal(before, weight.full_tensor()))
    assert skipped
    assert weight.to_local().numel() == [6, 6, 0, 0][dist.get_rank()]
    assert moved == [True, False, True]


def clip_ones(weight: nn.Parameter, bias: nn.Parameter, optimizer: mm.Muon, size: float = 1.0) -> Any:
    """Clip gradients of ones, those of the vector times a size."""
    weight.grad, bias.grad = torch.ones(6, 4), torch.full((5,), size)
    return optimizer.clip_grad_norm_(1.0, skip_above="4x")


def small_model(process_group: Any = None) -> tuple[nn.Parameter, nn.Parameter, mm.Muon]:
    weight, bias = nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(5))
    return weight, bias, mm.Muon(muon_and_adamw("weight", weight, bias), lr=0.1, process_group=process_group)


@pytest.mark.parametrize("forget", ["optimizer", "model", "nothing"])
def test_the_flag_is_forgotten_with_the_gradients(forget: str) -> None:
    weight, bias, optimizer = small_model()
    weight.grad, bias.grad = torch.randn(6, 4), torch.full((5,), 1e9)
    assert bool(optimizer.clip_grad_norm_(1.0, skip_above=10.0).skipped)
    if forget == "optimizer":  # a loop that goes on to the next batch without a step
        optimizer.zero_grad()
    bias.grad = torch.ones(5)
    weight.grad = torch.randn(6, 4)
    if forget == "model":
        assert not bool(optimizer.clip_grad_norm_(1.0, skip_above=10.0).skipped)  # the latest call decides
    optimizer.step()
    assert torch.equal(weight, torch.ones(6, 4)) == (forget == "nothing")
    optimizer.step()  # the flag was for one step, whether or not anybody clips again
    assert not torch.equal(weight, torch.ones(6, 4))


def test_the_threshold_is_not_polluted_by_a_norm_that_nothing_is_clipped_by() -> None:
    """Megatron-LM 5395, third finding: 6.2e6 of Muon's half made AdamW's 4.0e-4 look like a spike."""
    weight, bias, optimizer = small_model()
    weight.grad, bias.grad = torch.full((6, 4), 6.2e6 / math.sqrt(24)), torch.full((5,), 4.0e-4 / math.sqrt(5))
    norms = optimizer.clip_grad_norm_(1.0, skip_above=1.0)
    assert float(norms.muon) == pytest.approx(6.2e6)
    assert float(norms.adamw) == pytest.approx(4.0e-4)
    assert not bool(norms.skipped)
    assert bool(optimizer.clip_grad_norm_(1e9, policy="all", skip_above=1.0).skipped)
    assert bool(optimizer.clip_grad_norm_(1e9, policy="separate", skip_above=1.0).skipped)


# ------------------------------------------------------------------- who is clipped


def test_a_rule_is_clipped_unless_it_claims_to_be_scale_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-LM 5395, second finding: the exemption reached Lion and SOAP, which feel the scale."""

    class Lion(Rule):
        pass

    assert not Lion.scale_invariant
    assert [RULES[name].scale_invariant for name in ("muon", "adamw")] == [True, False]
    raw = problem.gradients(4)
    monkeypatch.setattr(MuonRule, "scale_invariant", False)
    assert all(not torch.equal(clipped_gradients(raw, "adamw_only")[name], raw[name]) for name in MUON)


def test_matrices_under_a_rule_that_feels_the_scale_are_clipped_where_all_are_matrices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without an AdamW half there seemed to be nothing to measure, so nothing was clipped."""
    monkeypatch.setattr(MuonRule, "scale_invariant", False)
    weight = nn.Parameter(torch.ones(6, 4))
    optimizer = mm.Muon([weight], lr=0.1)
    weight.grad = torch.ones(6, 4)
    assert float(optimizer.clip_grad_norm_(1.0, norms=False).adamw) == pytest.approx(24**0.5)
    assert float(weight.grad.norm()) == pytest.approx(1.0)


def test_bf16_parameters_with_masters_are_clipped_in_one_half() -> None:
    """Megatron-LM 5395, first finding: the wrapper for bf16 lost the flag."""
    results = []
    for max_norm in (math.inf, 0.01):
        weight, bias = (nn.Parameter(torch.ones(s, dtype=torch.bfloat16)) for s in ((6, 4), (5,)))
        groups = muon_and_adamw("weight", weight, bias)
        optimizer = mm.Muon(groups, lr=0.1, master_dtype=torch.float32, adamw_eps=1.0)
        weight.grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
        bias.grad = torch.ones(5).bfloat16()
        norms = optimizer.clip_grad_norm_(max_norm)
        assert float(norms.muon) == pytest.approx(float(weight.grad.double().norm()), rel=1e-12)
        optimizer.step()
        results.append((optimizer.state[weight]["master"].clone(), optimizer.state[bias]["master"].clone()))
    (muon, adamw), (muon_clipped, adamw_clipped) = results
    assert torch.equal(muon, muon_clipped)
    assert (1 - adamw_clipped).abs().max() < 0.2 * (1 - adamw).abs().max()


@pytest.mark.parametrize(
    ("norms", "skip_above", "collectives"), [(False, math.inf, 0), (True, math.inf, 1), (False, 5.0, 1)]
)
@on_ranks(2)
def test_what_nobody_needs_is_not_reduced(norms: bool, skip_above: float, collectives: int) -> None:
    """Megatron-LM 5395, fourth finding: an all-reduce for a chain of which nothing is clipped."""
    weight = with_gradient(mesh_of((2,)), Shard(0), torch.ones(4, 6))
    optimizer = mm.Muon([weight], lr=0.1)
    optimizer.clip_grad_norm_(1.0)
    before = issued()
    measured = optimizer.clip_grad_norm_(1.0, norms=norms, skip_above=skip_above)
    assert issued() - before == collectives
    left_out = [norm is None for norm in (measured.total, measured.muon, measured.adamw)]
    assert left_out == ([False] * 3 if norms else [True, True, False])


def test_norms_false_measures_only_what_the_policy_needs() -> None:
    needed = {"adamw_only": [0, 0, 1], "all": [1, 0, 0], "separate": [0, 1, 1]}
    for policy in POLICIES:
        weight, bias, optimizer = small_model()
        weight.grad, bias.grad = torch.ones(6, 4), torch.ones(5)
        norms = optimizer.clip_grad_norm_(1.0, policy=policy, norms=False)
        assert [norm is not None for norm in (norms.total, norms.muon, norms.adamw)] == needed[policy]
        assert math.isnan(norms.item()) == (norms.total is None)


# ------------------------------------------------------------------- several meshes and stages


@pytest.mark.parametrize("common", [False, True])
@on_ranks(4)
def test_stages_that_share_nothing_are_clipped_by_a_common_norm_if_asked(common: bool) -> None:
    """Ranks 0 and 1 hold one matrix, 2 and 3 another: two stages of a pipeline."""
    stage, mesh = half_mesh()
    weight = with_gradient(mesh, Shard(0), torch.full((4, 6), 1.0 + stage))
    groups = muon_and_adamw(f"{stage}.weight", weight, with_gradient(mesh, Replicate(), torch.full((5,), 3.0 + stage)))
    groups[1]["params"] = [(f"{stage}.bias", groups[1]["params"][0][1])]
    optimizer = mm.Muon(groups, lr=0.1)
    group = dist.group.WORLD if common else None
    norms = optimizer.clip_grad_norm_(1.0, policy="all", process_group=group, skip_above=14.0 if common else 100.0)
    skipped = bool(norms.skipped)
    optimizer.step()
    optimizer.step()
    squares = [24 * (1 + s) ** 2 + 5 * (3 + s) ** 2 for s in range(2)]
    assert float(norms) == pytest.approx(math.sqrt(sum(squares) if common else squares[stage]), rel=1e-12)
    assert skipped == common  # though neither stage alone is above the threshold


@on_ranks(4)
def test_groups_that_share_no_mesh_are_counted_once() -> None:
    """One matrix on all ranks, one on each half: every element is counted once."""
    stage, half = half_mesh()
    shared, of_half = with_gradient(mesh_of((4,)), Shard(0), torch.ones(4, 6)), torch.full((4, 6), 2.0 + stage)
    optimizer = mm.Muon([("all", shared), (f"half{stage}", with_gradient(half, Shard(1), of_half))], lr=0.1)
    for policy in ("adamw_only", "separate"):
        norm = float(optimizer.clip_grad_norm_(1.0, policy=policy))
        assert norm == pytest.approx(math.sqrt(24 * (1 + 4 + 9)), rel=1e-12)


@pytest.mark.parametrize("stages", [False, True], ids=["one set", "stages"])
@on_ranks(4, timeout=20)
def test_ranks_without_an_adamw_half_take_part_in_its_norm(stages: bool) -> None:
    """Ranks 2 and 3 have an AdamW half, 0 and 1 none; they share a matrix, or are stages of a pipeline."""
    stage, half = half_mesh()
    weight = with_gradient(half if stages else mesh_of((4,)), Shard(0), torch.ones(4, 6))
    weight.grad = None
    bias = with_gradient(half, Replicate(), torch.full((5,), 2.0)) if stage else None
    optimizer = mm.Muon(muon_and_adamw(f"{stage}.weight" if stages else "weight", weight, bias), lr=0.1)
    group = dist.group.WORLD if stages else None
    norms = optimizer.clip_grad_norm_(1.0, norms=False, process_group=group)
    assert float(norms.adamw) == pytest.approx(math.sqrt(20), rel=1e-12)


# ------------------------------------------------------------------- GradScaler


def under_a_scaler(layout: str, unscale: bool, tell: bool, bad: list[int]) -> tuple[list[float], dict[str, Tensor]]:
    """Three fp16 steps under a GradScaler, the second of which overflows on one rank."""
    holding = problem.holding(layout)
    optimizer = problem.optimizer_of(holding, **FP32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    scaler.scale(torch.ones(()))  # as the loss would be
    scales = []
    for step in range(3):
        holding.give({name: value * scaler.get_scale() for name, value in problem.initial(5000 + step).items()})
        if step == 1 and dist.get_rank() in bad:
            parameter = next(p for g in holding.groups for p in g["params"] if local_of(p.grad).numel())
            local_of(parameter.grad).view(-1)[:1] = math.inf
        if unscale:
            scaler.unscale_(optimizer)
            optimizer.clip_grad_norm_(1.5)
        scaler.step(optimizer, scaler=scaler) if tell else scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, holding.whole(optimizer)


def unscaled(clip: bool) -> dict[str, Tensor]:
    holding = problem.holding("local")
    optimizer = problem.optimizer_of(holding, **FP32)
    for step in (0, 2):
        holding.give(problem.initial(5000 + step))
        if clip:
            optimizer.clip_grad_norm_(1.5)
        optimizer.step()
    return holding.whole(optimizer)


@pytest.mark.parametrize("unscale", [False, True], ids=["step unscales", "unscaled and clipped before"])
@pytest.mark.parametrize(
    ("layout", "tell"),
    [
        ("ddp", False),
        ("fsdp", True),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in (("fsdp", False), ("declared rows by cols", True))),
        ("flat", True),
    ],
)
def test_an_overflow_on_one_rank_skips_on_all_and_scales_stay_equal(
    workers, layout: str, tell: bool, unscale: bool
) -> None:
    """With DDP the reduced gradients overflow everywhere; with FSDP2 torch asks the mesh; others pass the scaler."""
    outcomes = workers(4).run(under_a_scaler, layout, unscale, tell, [0, 1, 2, 3] if layout == "ddp" else [3])
    for scales, result in outcomes:
        assert scales == [2.0**10, 2.0**9, 2.0**9]
        assert problem.differing(result, unscaled(unscale)) == []


@on_ranks(4)
def test_scales_that_will_differ_are_warned_of() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        under_a_scaler("declared rows by cols", False, False, [3])
    text = " ".join(str(w.message) for w in caught)
    assert ("scaler.step(optimizer, scaler=scaler)" in text) == (dist.get_rank() < 3)


def test_fp16_gradients_lose_nothing_when_the_step_unscales() -> None:
    """Unscaled in fp16 they would vanish: 2⁻²⁰ · 2⁻¹⁰ is no fp16 number."""
    weight = nn.Parameter(torch.ones(4, 4, dtype=torch.float16))
    twin = nn.Parameter(torch.ones(4, 4, dtype=torch.float16))
    gradient = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).half() * 2.0**-14
    optimizer, other = mm.Muon([weight], lr=0.1), mm.Muon([twin], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    scaler.scale(torch.ones(()))
    weight.grad, twin.grad = gradient.clone(), gradient.clone()
    scaler.step(optimizer)
    other.step()
    assert torch.equal(weight, twin)  # a power of two changes no bit of the direction
    momenta = optimizer.state[weight]["momentum_buffer"], other.state[twin]["momentum_buffer"]
    assert torch.equal(momenta[0] * 2.0**16, momenta[1])


# ------------------------------------------------------------------- bad input


@pytest.mark.parametrize("policy", POLICIES)
def test_without_gradients_norms_are_zero_and_steps_go_on(policy: str) -> None:
    weight, _, optimizer = small_model()
    norms = optimizer.clip_grad_norm_(1.0, policy=policy, skip_above=1.0)
    assert (float(norms), float(norms.muon), float(norms.adamw), bool(norms.skipped)) == (0, 0, 0, False)
    optimizer.step()
    assert torch.equal(weight, torch.ones(6, 4))


def test_a_gradient_without_data_is_refused() -> None:
    weight = nn.Parameter(torch.ones(6, 4, device="meta"))
    optimizer = mm.Muon([weight], lr=0.1)
    weight.grad = torch.ones(6, 4, device="meta")
    with pytest.raises(TypeError, match=r"group0\.0: found a gradient on meta"):
        optimizer.clip_grad_norm_(1.0)


@pytest.mark.parametrize(
    ("how", "waits", "error", "message"),
    [
        ("sparse", None, TypeError, "bias: found a gradient with layout"),
        ("sparse", False, TypeError, "bias: found a gradient with layout"),
        ("argument", None, ValueError, r"skip_above: found -1\.0"),
    ],
)
@on_ranks(2, timeout=10)
def test_what_is_wrong_on_one_rank_ends_on_every_rank(
    how: str, waits: bool | None, error: type[Exception], message: str
) -> None:
    weight, bias, optimizer = small_model("world")
    optimizer._runtime.driver = Driver(waits)
    weight.grad, bias.grad = torch.full((6, 4), 9.0), torch.full((5,), 9.0)
    arguments: dict[str, Any] = {}
    if dist.get_rank() == 1 and how == "sparse":
        bias.grad = torch.full((5,), 9.0).to_sparse()
    elif dist.get_rank() == 1:
        arguments["skip_above"] = -1.0

    def clip_and_step() -> None:
        optimizer.clip_grad_norm_(1.0, policy="all", **arguments)
        for _ in range(2):
            optimizer.step()

    with pytest.raises(error if dist.get_rank() == 1 else mm.PlanError, match=message):
        clip_and_step()
    assert torch.equal(weight, torch.ones(6, 4))  # nothing has been written
    assert waits is False or torch.equal(weight.grad, torch.full((6, 4), 9.0))


@pytest.mark.parametrize("skip_above", [math.inf, "4x"])
@on_ranks(4)
def test_all_stages_clip_again_where_one_plans_again(skip_above: float | str) -> None:
    """The first call scales stage 0 and stage 1 by 1/√48.

    Ranks 0 and 1 get a second matrix after a step, 2 and 3 do not, and all are clipped by one norm.
    """
    stage, mesh = half_mesh()
    optimizer = mm.Muon([(f"{stage}.weight", with_gradient(mesh, Shard(0), torch.ones(4, 6)))], lr=0.1)
    optimizer.clip_grad_norm_(1.0, policy="all", skip_above=skip_above, process_group=dist.group.WORLD)
    optimizer.step()
    if stage == 0:
        more = with_gradient(mesh, Shard(0), torch.ones(4, 6))
        optimizer.add_param_group({"params": [("more", more)], "algorithm": "muon", "name": "more"})
    norm = float(optimizer.clip_grad_norm_(1e3, policy="all", skip_above=skip_above, process_group=dist.group.WORLD))
    optimizer.step()
    assert means_of(optimizer)[1] == ((0, 0, 0) if skip_above == math.inf else (2, 2, 0))
    assert norm == pytest.approx(25**0.5, rel=1e-6)


@pytest.mark.parametrize(
    ("first", "second"),
    [({"policy": "all"}, {"policy": "adamw_only"}), ({"skip_above": "4x"}, {"skip_above": 4.0})],
    ids=["policy", "skip_above"],
)
@on_ranks(4, timeout=10)
def test_stages_with_other_arguments_end_in_an_error_on_all(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Ranks 0 and 1 are one stage, 2 and 3 the other; the first two ask for one policy and the others for another."""
    stage, mesh = half_mesh()
    weight = with_gradient(mesh, Shard(0), torch.ones(4, 6))
    optimizer = mm.Muon([(f"{stage}.weight", weight)], lr=0.1)
    with pytest.raises(mm.PlanError, match=r"(?s)policy.*skip_above"):
        optimizer.clip_grad_norm_(1.0, **(second if stage else first), process_group=dist.group.WORLD)
    assert torch.equal(weight.grad.to_local(), torch.ones(2, 6))
