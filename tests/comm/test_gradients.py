"""Gradients that are kept elsewhere than in ``parameter.grad``; one process, and two ranks for who shares what."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import muonmesh as mm
from muonmesh.integrations.megatron import MainGrad
from muonmesh.step import replicas
from muonmesh.step.connection import placed_members
from muonmesh.step.parameters import collect
from tests.support import problem
from tests.support.on_ranks import on_ranks

COVERS = (
    "comm.gradients.ParameterGrad",
    "integrations.megatron.main_grad.MainGrad",
    "step.replicas.fingerprints",
)

SETTINGS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
CLIPS: list[dict[str, Any] | None] = [
    None,
    *({"max_norm": 0.5, "policy": policy} for policy in ("adamw_only", "all", "separate")),
    {"max_norm": 1.0, "skip_above": 1e-3},
    {"max_norm": 1.0, "skip_above": "4x"},
]


def parameters(dtype: torch.dtype = torch.bfloat16) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(value.to(dtype)) for name, value in problem.initial().items()}


def groups(weights: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    muon = [name for name in weights if problem.PARAMETERS[name][1] != "adamw"]
    rest = [name for name in weights if name not in muon]
    specs = [problem.PARAMETERS[name][1] for name in muon]
    return [
        {"name": "muon", "params": [weights[n] for n in muon], "param_names": muon, "matrices": specs},
        {"name": "rest", "algorithm": "adamw", "params": [weights[n] for n in rest], "param_names": rest},
    ]


def in_main_grad(weights: dict[str, nn.Parameter]) -> None:
    """As Megatron's DistributedDataParallel: all in one fp32 buffer, of which each parameter has a view."""
    buffer = torch.zeros(sum(p.numel() for p in weights.values()))
    start = 0
    for parameter in weights.values():
        parameter.main_grad = buffer[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()


def in_grad(weights: dict[str, nn.Parameter]) -> None:
    for parameter in weights.values():
        parameter.grad_dtype = None  # or a bf16 parameter takes no fp32 gradient


def train_with_gradients_in(
    kept_in: str, clip: dict[str, Any] | None, *, seed: int = 0, **settings: Any
) -> tuple[dict[str, Tensor], list[Any]]:
    """Step four times; return weights and state, and what clipping and metrics said."""
    weights = parameters()
    in_main_grad(weights) if kept_in == "main_grad" else in_grad(weights)
    settings = {**SETTINGS, **({"gradients": MainGrad()} if kept_in == "main_grad" else {}), **settings}
    optimizer = mm.Muon(groups(weights), **settings)
    reports: list[Any] = []
    for step in range(4):
        # Zero for one matrix: it is left alone, wherever the zeros are read.
        gradients = {name: g * (name != "wide" or step < 2) for name, g in problem.gradients(step + seed).items()}
        for name, parameter in weights.items():
            if kept_in == "main_grad":
                parameter.main_grad.copy_(gradients[name])
            else:
                parameter.grad = gradients[name].clone()
        if clip is not None:
            norms = optimizer.clip_grad_norm_(**clip)
            reports.append([float(norm) for norm in (norms.total, norms.muon, norms.adamw, norms.skipped)])
        optimizer.step()
        reports.append(optimizer.metrics())
    results = {name: parameter.detach().clone() for name, parameter in weights.items()}
    results |= {f"{n}.{k}": v for n, p in weights.items() for k, v in optimizer.state[p].items()}
    results |= {
        f"{n}.gradient": (p.main_grad if kept_in == "main_grad" else p.grad).clone() for n, p in weights.items()
    }
    return results, reports


@pytest.mark.parametrize("clip", CLIPS, ids=str)
def test_main_grad_is_the_same_as_an_fp32_grad_bit_for_bit(clip: dict[str, Any] | None) -> None:
    """Weights, state, clipped gradients, norms and metrics: bf16 parameters, gradients that bf16 could not hold."""
    (main, main_reports), (plain, plain_reports) = (
        train_with_gradients_in("main_grad", clip),
        train_with_gradients_in("grad", clip),
    )
    assert main.keys() == plain.keys()
    assert [name for name in main if not torch.equal(main[name], plain[name])] == []
    assert main_reports == plain_reports
    assert any(not torch.equal(g, g.bfloat16().float()) for name, g in main.items() if name.endswith(".gradient"))


def test_zero_grad_zeroes_the_buffer_and_keeps_it() -> None:
    weights = parameters()
    in_main_grad(weights)
    views = {name: parameter.main_grad for name, parameter in weights.items()}
    optimizer = mm.Muon(groups(weights), gradients=MainGrad())
    for parameter in weights.values():
        parameter.main_grad.fill_(1.0)
    optimizer.zero_grad()
    assert all(weights[name].main_grad is view and not view.any() for name, view in views.items())


def test_main_grad_is_read_where_it_lies() -> None:
    weights = parameters()
    in_main_grad(weights)
    optimizer = mm.Muon(groups(weights), gradients=MainGrad(), **SETTINGS)
    optimizer.step()
    runtime = optimizer._runtime
    assert runtime.planned is not None
    collected = collect(runtime.planned, optimizer, runtime, None)
    read = {
        entry.member.name: entry.gradient
        for entries in (collected.muon, *collected.adamw)
        for entry in entries
        if entry
    }
    assert read.keys() == weights.keys()
    for name, gradient in read.items():
        assert isinstance(gradient, Tensor)
        assert gradient.data_ptr() == weights[name].main_grad.data_ptr(), name


def test_a_gradient_that_never_reached_main_grad_is_an_error() -> None:
    weight = nn.Parameter(torch.ones(4, 6))
    optimizer = mm.Muon([{"params": [("layer.weight", weight)]}], gradients=MainGrad())
    weight.grad = torch.ones(4, 6)
    with pytest.raises(
        mm.LayoutError, match=r"a parameter of shape \(4, 6\): found a gradient in grad and no main_grad; needed .*\. W"
    ):
        optimizer.step()
    assert torch.equal(weight, torch.ones(4, 6))


def test_names_come_from_the_source_where_groups_have_none() -> None:
    """Megatron's param groups list parameters without names; a checkpoint needs those of the model."""
    model = nn.ModuleDict({"module": nn.ModuleDict({"up": nn.Linear(4, 6), "down": nn.Linear(6, 4)})})
    source = Shared(model.named_parameters())
    muon = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim == 1]
    optimizer = mm.Muon([{"params": muon}, {"params": rest, "algorithm": "adamw"}], gradients=source)
    assert [group["param_names"] for group in optimizer.param_groups] == [
        ["up.weight", "down.weight"],
        ["up.bias", "down.bias"],
    ]
    for parameter in model.parameters():
        parameter.main_grad = torch.ones_like(parameter)
    optimizer.step()
    assert [row.parameter for row in optimizer.explain().rows] == ["up.weight", "down.weight", "up.bias", "down.bias"]
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["up.weight", "down.weight"]


class Shared(MainGrad):
    """A framework's source that knows names, and the groups of dense weights and of experts."""

    def __init__(self, names: Any = (), *, data_parallel: Any = None, expert_data_parallel: Any = None) -> None:
        super().__init__()
        self.names = {parameter: name for name, parameter in names}
        self.groups = expert_data_parallel, data_parallel

    def name(self, parameter: Tensor) -> str | None:
        return self.names.get(parameter)

    def group(self, parameter: Tensor) -> dist.ProcessGroup | None:
        return self.groups[getattr(parameter, "allreduce", True)]


class Copies(mm.GradientSource):
    """An engine that hands out copies: what is not written back is lost."""

    def __init__(self) -> None:
        self.copies: dict[Tensor, Tensor] = {}

    def gradient(self, parameter: Tensor) -> Tensor | None:
        gradient = self.copies.get(parameter)
        return None if gradient is None else gradient.clone()

    def write(self, parameter: Tensor, gradient: Tensor | None) -> None:
        self.copies.pop(parameter, None) if gradient is None else self.copies.__setitem__(parameter, gradient)


@pytest.mark.parametrize("policy", ["adamw_only", "all", "separate"])
def test_clipping_writes_back_through_the_source(policy: Any) -> None:
    source, weights, plain = Copies(), parameters(torch.float32), parameters(torch.float32)
    by_source = mm.Muon(groups(weights), gradients=source, **SETTINGS)
    by_grad = mm.Muon(groups(plain), **SETTINGS)
    for step in range(3):
        for name, gradient in problem.gradients(step).items():
            source.copies[weights[name]] = gradient * 10.0**step
            plain[name].grad = gradient * 10.0**step
        for optimizer in (by_source, by_grad):
            optimizer.clip_grad_norm_(0.01, policy=policy)
        changed = [
            not torch.equal(source.copies[weights[n]], g * 10.0**step) for n, g in problem.gradients(step).items()
        ]
        assert all(torch.equal(source.copies[weights[name]], plain[name].grad) for name in weights)
        for optimizer in (by_source, by_grad):
            optimizer.step()
    assert any(changed)
    assert all(torch.equal(weights[name], plain[name]) for name in weights)
    by_source.zero_grad()
    assert source.copies == {}


def test_what_others_count_is_left_out_of_norms() -> None:
    """The last pipeline stage's copy of a tied embedding: Megatron marks it shared. It is clipped like the rest."""
    weights = parameters(torch.float32)
    in_main_grad(weights)
    for name, gradient in problem.gradients(0).items():
        weights[name].main_grad.copy_(gradient)
    rest = [name for name in weights if problem.PARAMETERS[name][1] == "adamw"]
    others = sum(float(weights[name].main_grad.double().square().sum()) for name in rest[1:])
    weights[rest[0]].shared = True
    optimizer = mm.Muon(groups(weights), gradients=MainGrad(), **SETTINGS)
    assert float(optimizer.clip_grad_norm_(float("inf")).adamw) == pytest.approx(others**0.5)
    before = weights[rest[0]].main_grad.clone()
    optimizer.clip_grad_norm_(0.5 * others**0.5)
    assert torch.allclose(weights[rest[0]].main_grad, 0.5 * before, rtol=1e-4)  # the factor has a 1e-6 below it


@pytest.mark.parametrize("policy", ["adamw_only", "all", "separate"])
def test_what_is_measured_apart_is_clipped_as_an_optimizer_of_its_own_clips_it(policy: Any) -> None:
    """Megatron's ``grad_norm_group``: neither part's norm, threshold or limits know of the other's gradients."""
    weights = parameters(torch.float32)
    in_main_grad(weights)
    apart = {name for number, name in enumerate(weights) if number % 2}
    for name in apart:
        weights[name].grad_norm_group = "mtp"
    parts = [parameters(torch.float32), parameters(torch.float32)]
    for model in parts:
        in_main_grad(model)
    joint = mm.Muon(groups(weights), gradients=MainGrad(), **SETTINGS)
    alone = []
    for part, model in enumerate(parts):
        names = {name: p for name, p in model.items() if (name in apart) == bool(part)}
        alone.append(mm.Muon([g for g in groups(names) if g["params"]], gradients=MainGrad(), **SETTINGS))
    for step in range(2):
        for name, gradient in problem.gradients(step).items():
            for model in (weights, *parts):
                model[name].main_grad.copy_(gradient * (1e2**step if name in apart else 1.0))
        norms = joint.clip_grad_norm_(0.5, policy=policy, skip_above=1e12)
        main, other = (
            alone[0].clip_grad_norm_(0.5, policy=policy, skip_above=1e12),
            alone[1].clip_grad_norm_(0.5, policy=policy),
        )
        assert (float(norms), float(norms.apart["mtp"])) == (float(main), float(other))
        assert not norms.skipped
        for optimizer in (joint, *alone):
            optimizer.step()
        for name, parameter in weights.items():
            same = parts[name in apart][name]
            assert torch.equal(parameter.main_grad, same.main_grad)
            assert torch.equal(parameter, same)
    weights[next(iter(apart))].main_grad.fill_(float("nan"))
    assert joint.clip_grad_norm_(0.5, policy=policy).skipped


def test_a_norm_of_its_own_that_megatron_does_not_know_is_refused() -> None:
    weight = nn.Parameter(torch.ones(4, 6))
    weight.main_grad, weight.grad_norm_group = torch.ones(4, 6), "heads"
    optimizer = mm.Muon([{"params": [("layer.weight", weight)]}], gradients=MainGrad())
    with pytest.raises(
        mm.LayoutError,
        match=r"layer.weight: found norm_apart\(\) = 'heads'; needed one of the names in norms_apart: mtp",
    ):
        optimizer.clip_grad_norm_(1.0)


def test_copies_of_an_optimizer_have_the_source_too() -> None:
    weights = parameters()
    in_main_grad(weights)
    optimizer = mm.Muon(groups(weights), gradients=MainGrad())
    assert copy.deepcopy(optimizer).gradients is optimizer.gradients
    assert isinstance(pickle.loads(pickle.dumps(optimizer)).gradients, MainGrad)
    optimizer.gradients = other = Shared(weights.items())
    assert optimizer.gradients is other


@pytest.mark.parametrize("source", ["main_grad", MainGrad, object()])
def test_what_is_no_source_is_refused(source: Any) -> None:
    with pytest.raises(TypeError, match=r"gradients: found .*; needed a GradientSource\. Derive its class from"):
        mm.Muon([nn.Parameter(torch.ones(2, 2))], gradients=source)


def test_a_source_with_the_earlier_name_of_a_method_is_refused() -> None:
    class Source(mm.GradientSource):
        def gradient(self, parameter: Tensor) -> Tensor | None:
            return parameter.grad

        def write(self, parameter: Tensor, gradient: Tensor | None) -> None: ...

    earlier = type("Earlier", (Source,), {"place": lambda self, matrices: ()})
    with pytest.raises(
        TypeError, match=r"gradients: found .*Earlier.* with place\(\);.* Rename it to momentum_storages"
    ):
        mm.Muon([nn.Parameter(torch.zeros(2, 3))], gradients=earlier())


# ------------------------------------------------------------------ two ranks


def under_ddp(kept_in: str) -> tuple[dict[str, Tensor], int]:
    """Two ranks with the same gradients; the data-parallel group comes from the source, or from process_group=."""
    weights = parameters()
    if kept_in == "main_grad":
        in_main_grad(weights)
        optimizer = mm.Muon(groups(weights), gradients=Shared(data_parallel=dist.group.WORLD), **SETTINGS)
    else:
        in_grad(weights)
        optimizer = mm.Muon(groups(weights), process_group="world", **SETTINGS)
    for step in range(3):
        for name, gradient in problem.gradients(step).items():
            if kept_in == "main_grad":
                weights[name].main_grad.copy_(gradient)
            else:
                weights[name].grad = gradient
        optimizer.clip_grad_norm_(0.5, policy="all")
        optimizer.step()
    results = {name: parameter.detach().clone() for name, parameter in weights.items()}
    return results, optimizer.counts.orthogonalized


def test_the_group_of_the_source_divides_the_work(workers) -> None:
    from_source, from_argument = (workers(2).run(under_ddp, kept_in) for kept_in in ("main_grad", "grad"))
    for (weights, count), (other, same_count) in zip(from_source, from_argument, strict=True):
        assert [name for name in weights if not torch.equal(weights[name], other[name])] == []
        assert count == same_count
    assert all(count > 0 for _, count in from_source)


@on_ranks(2)
def test_experts_are_shared_over_their_own_group() -> None:
    """A dense weight shared by both ranks and an expert of each rank's own, of one name."""
    rank = dist.get_rank()
    alone = [dist.new_group([number]) for number in range(2)][rank]
    dense, expert = nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.full((6, 4), rank + 1.0))
    expert.allreduce = False
    source = Shared(data_parallel=dist.group.WORLD, expert_data_parallel=alone)
    optimizer = mm.Muon([{"params": [("dense", dense), ("expert", expert)]}], gradients=source)
    generator = torch.Generator().manual_seed(0)
    dense.main_grad = torch.randn(6, 4, generator=generator)
    expert.main_grad = torch.randn(6, 4, generator=generator) * (rank + 1)
    optimizer.step()
    assert [member.storage.layout.ranks for member in placed_members(optimizer)] == [(0, 1), (rank,)]
    assert not torch.equal(expert, torch.full((6, 4), rank + 1.0))


@on_ranks(2)
def test_a_group_without_this_rank_is_refused() -> None:
    group, weight = dist.new_group([0]), nn.Parameter(torch.ones(4, 4))

    def build() -> mm.Muon:
        return mm.Muon([{"params": [("weight", weight)]}], gradients=Shared(data_parallel=group))

    if dist.get_rank() == 0:
        build()
        return
    with pytest.raises(ValueError, match=r"weight: found.*needed None or a ProcessGroup with this rank in it"):
        build()


@pytest.mark.parametrize("shape", [(4096,), (), (0, 3), (64, 64)])
def test_replicas_compare_a_gradient_without_a_wide_copy_of_it(monkeypatch: pytest.MonkeyPatch, shape: Any) -> None:
    """Of an embedding of a billion elements in bf16, a copy in fp64 would take 8 GB in the first step."""
    monkeypatch.setattr(replicas, "_AT_ONCE", 64)
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        norm, product = replicas._sums_of(gradient)
    assert max(event.self_cpu_memory_usage for event in profile.events()) <= 64 * 8
    assert norm == pytest.approx(float(gradient.double().norm()), rel=1e-12)
    wave = torch.arange(gradient.numel(), dtype=torch.float64).remainder(64).cos().view(shape)
    assert product == pytest.approx(float((gradient.double() * wave).sum()), rel=1e-12, abs=1e-12)
