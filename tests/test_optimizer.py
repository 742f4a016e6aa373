"""The optimizer in one process: against the fp64 oracle, and as a torch.optim.Optimizer."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import muonmesh as mm
from muonmesh.layout import Interval, MeshLayout
from tests.support import problem
from tests.support.tensors import relative_error

COVERS = (
    "optimizer.Muon",
    "report.explain.explain",
    "report.metrics.measure",
    "step.elementwise_step.step_elementwise",
    "step.runtime.Runtime",
    "step.parameter_steps.ParameterStep",
)


def against_the_oracle(
    dtype: torch.dtype,
    bounds: Callable[[str], tuple[float, float]],
    gradients_of: Any = problem.gradients,
    count: int = 3,
    **settings: Any,
) -> None:
    """Step a few times; each parameter, and what the steps have changed of it, is as near to fp64's as its bounds."""
    precision: dict[str, Any] = {"compute_dtype": dtype, "state_dtype": torch.float32}
    values = problem.initial()
    if dtype == torch.float64:
        values, precision["state_dtype"] = {name: value.double() for name, value in values.items()}, dtype
    *_, (model, optimizer) = problem.steps("local", count, values, gradients_of, **precision, **settings)
    params, state = problem.by_the_oracle(count, gradients_of, **settings)
    for name, parameter in model.named_parameters():
        bound, bound_of_change = bounds(name)
        start, entries = values[name].double(), optimizer.state[parameter]
        assert relative_error(parameter.detach(), params[name]) <= bound, name
        assert relative_error(parameter.detach().double() - start, params[name] - start) <= bound_of_change, name
        for key, reference in (("momentum_buffer", "momentum"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
            if key in entries:
                assert relative_error(entries[key], state[name][reference]) <= 1e-5, (name, key)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"nesterov": False},
        {"momentum": 0.0},
        {"weight_decay": 0.0},
        {"ns_coefficients": "simple"},
        {"ns_coefficients": "quintic"},
        {"ns_coefficients": "cans"},
        {"ns_coefficients": "deepseekv4", "ns_steps": 10},
        {"ns_steps": 8},
        *({"scale_mode": mode} for mode in ("original", "shape_scaling", "spectral", "unit_rms_norm", "none")),
        {"extra_scale_factor": 0.3},
    ],
    ids=lambda settings: "-".join(f"{k}={v}" for k, v in settings.items()) or "default",
)
def test_fp32_agrees_with_the_oracle(settings: dict[str, Any]) -> None:
    # A matrix of one row or column sits at σ = 1, where CANS' first polynomial alone has a slope of 26.
    slack = 5 if settings.get("ns_coefficients") == "cans" else 1
    against_the_oracle(torch.float32, lambda name: (1e-5 * slack, 1e-3 * slack), **settings)


def test_zero_gradients_agree_with_the_oracle() -> None:
    against_the_oracle(torch.float32, lambda name: (1e-5, 1e-3), problem.zeroed, count=4)


def test_bf16_compute_agrees_with_the_oracle_within_its_rounding() -> None:
    # One row or column sits at σ = 1, where the polynomials amplify bf16's rounding of σ² most.
    thin = {name for name, (shape, _) in problem.PARAMETERS.items() if len(shape) == 2 and min(shape) <= 3}
    against_the_oracle(torch.bfloat16, lambda name: (math.inf, 0.15 if name in thin else 0.06), weight_decay=0.0)


def test_fp64_everything_is_the_oracle() -> None:
    against_the_oracle(torch.float64, lambda name: (1e-12, 1e-9), count=5)


# ------------------------------------------------------------------ scale


@pytest.mark.parametrize("exponent", [-90, -40, 40, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_power_of_two_on_all_gradients_changes_no_bit_of_the_matrices(exponent: int, dtype: torch.dtype) -> None:
    def scaled(step: int) -> dict[str, Tensor]:
        return {k: v * 2.0**exponent for k, v in problem.gradients(step).items()}

    *_, (model, _) = problem.steps("local", 3, problem.initial(), compute_dtype=dtype)
    *_, (twin, _) = problem.steps("local", 3, problem.initial(), scaled, compute_dtype=dtype)
    for name, parameter in model.named_parameters():
        if problem.PARAMETERS[name][1] != "adamw":
            assert torch.equal(parameter, twin.get_parameter(name)), name


def test_momentum_does_not_become_denormal() -> None:
    weight = nn.Parameter(torch.zeros(8, 8))
    optimizer = mm.Muon([weight], lr=1.0, momentum=0.5)
    weight.grad = torch.full((8, 8), 1e-37)
    weight.grad[0, 0] = 1.0
    optimizer.step()
    for _ in range(12):
        weight.grad = torch.zeros(8, 8)
        weight.grad[0, 0] = 1.0
        optimizer.step()
    momentum = optimizer.state[weight]["momentum_buffer"]
    tiny = torch.finfo(torch.float32).tiny
    assert not ((momentum != 0) & (momentum.abs() < tiny)).any()
    assert momentum[0, 0] > 0.9
    assert momentum[1, 1] == 0


# ------------------------------------------------------------------ zero and missing gradients


def test_matrices_with_zero_gradient_are_left_alone_momentum_and_decay_included() -> None:
    trail = [problem.result(*pair) for pair in problem.steps("local", 4, problem.initial(), problem.zeroed)]
    before, after = trail[1], trail[3]
    for suffix in ("", ".momentum_buffer"):
        assert torch.equal(before["experts" + suffix][1], after["experts" + suffix][1])
        assert torch.equal(before["qkv" + suffix][24:32], after["qkv" + suffix][24:32])
        assert torch.equal(before["gate_up" + suffix][1::2], after["gate_up" + suffix][1::2])
        assert torch.equal(before["even" + suffix], after["even" + suffix])
        assert torch.equal(before["wide" + suffix], after["wide" + suffix])
        assert not torch.equal(before["experts" + suffix][0], after["experts" + suffix][0])
        assert not torch.equal(before["gate_up" + suffix][0::2], after["gate_up" + suffix][0::2])


def test_one_nonzero_element_anywhere_counts() -> None:
    weight = nn.Parameter(torch.ones(100, 100))
    optimizer = mm.Muon([weight], lr=0.1)
    weight.grad = torch.zeros(100, 100)
    weight.grad[99, 99] = 1e-30
    optimizer.step()
    assert not torch.equal(weight, torch.ones(100, 100))


def test_parameters_without_gradient_are_skipped_and_get_no_state() -> None:
    a, b = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))
    vector, other = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    groups = [{"params": [a, b]}, {"params": [vector, other], "algorithm": "adamw"}]
    optimizer = mm.Muon(groups, lr=0.1)
    a.grad, vector.grad = torch.ones(4, 4), torch.ones(4)
    optimizer.step()
    assert torch.equal(b, torch.ones(4, 4))
    assert torch.equal(other, torch.ones(4))
    assert "momentum_buffer" not in optimizer.state.get(b, {})
    assert not torch.equal(a, torch.ones(4, 4))


def test_nan_gradient_gives_nan_weights_not_silence() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    optimizer = mm.Muon([weight], lr=0.1)
    weight.grad = torch.full((4, 4), float("nan"))
    optimizer.step()
    assert weight.isnan().all()


# ------------------------------------------------------------------ inputs are not written


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=["compute32", "compute16"])
@pytest.mark.filterwarnings("ignore:.*without masters")
def test_gradients_and_momentum_are_not_overwritten(dtype: torch.dtype, nesterov: bool, compute: torch.dtype) -> None:
    """torch.optim.Muon until 2.14 overwrites bf16 momentum without Nesterov; others lerp into the gradient."""
    weight = nn.Parameter(torch.randn(16, 24).to(dtype))
    optimizer = mm.Muon([weight], lr=0.1, nesterov=nesterov, state_dtype=dtype, compute_dtype=compute)
    gradient = torch.randn(16, 24).to(dtype)
    weight.grad = gradient.clone()
    optimizer.step()
    assert torch.equal(weight.grad, gradient)
    expected = torch.zeros(16, 24, dtype=dtype).lerp_(gradient, 1 - 0.95)
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], expected)


def test_a_convolution_in_another_memory_format_has_the_same_bits() -> None:
    conv = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
    twin = copy.deepcopy(conv).to(memory_format=torch.contiguous_format)
    for layer in (conv, twin):
        layer.weight.grad = torch.randn(8, 4, 3, 3, generator=torch.Generator().manual_seed(0))
        mm.Muon([{"params": [layer.weight], "matrices": ["flatten"]}], lr=0.1).step()
    assert torch.equal(conv.weight, twin.weight)


# ------------------------------------------------------------------ a torch.optim.Optimizer


def small_optimizer() -> tuple[nn.Module, mm.Muon]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 4))
    return model, mm.from_model(model, lr=0.05)


def train_to_losses(model: nn.Module, optimizer: torch.optim.Optimizer, count: int, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + count):
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = (model(x) - x[:, :4]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.filterwarnings("ignore:.*without masters")
@pytest.mark.parametrize("master", [None, torch.float32], ids=["no-master", "master"])
def test_bf16_model_keeps_fp32_state_through_load_state_dict(master: torch.dtype | None) -> None:
    weight = nn.Parameter(torch.randn(16, 16).bfloat16())
    vector = nn.Parameter(torch.randn(16).bfloat16())

    def build(w: nn.Parameter, v: nn.Parameter) -> mm.Muon:
        return mm.Muon([{"params": [w]}, {"params": [v], "algorithm": "adamw"}], lr=0.01, master_dtype=master)

    optimizer = build(weight, vector)
    for p in (weight, vector):
        p.grad = torch.randn(p.shape).bfloat16()
    optimizer.step()
    twins = nn.Parameter(weight.detach().clone()), nn.Parameter(vector.detach().clone())
    other = build(*twins)
    other.load_state_dict(optimizer.state_dict())
    for p, q in zip((weight, vector), twins, strict=True):
        assert optimizer.state[p].keys() == other.state[q].keys()
        for key, value in optimizer.state[p].items():
            assert other.state[q][key].dtype == value.dtype, key
            assert torch.equal(other.state[q][key], value), key
    assert other.state[twins[0]]["momentum_buffer"].dtype == torch.float32
    assert ("master" in other.state[twins[0]]) == (master is not None)


@pytest.mark.filterwarnings("ignore:.*without masters")
def test_masters_keep_what_bf16_would_round_away() -> None:
    def weights(master: torch.dtype | None) -> Tensor:
        weight = nn.Parameter(torch.ones(32, 32).bfloat16())
        optimizer = mm.Muon([weight], lr=1e-4, weight_decay=0.0, master_dtype=master)
        for _ in range(200):
            weight.grad = torch.eye(32).bfloat16()
            optimizer.step()
        return weight.detach().float().diagonal()

    expected = 1 - 200 * 1e-4 * 0.2 * 32**0.5
    assert (weights(torch.float32) - expected).abs().max() < 0.005  # a bf16 ulp below 1 is 0.004
    assert (weights(None) - expected).abs().max() > 0.02


def stepped_in_bf16(value: float, lr: float, *, becomes: bool = False) -> mm.Muon:
    """An optimizer after a step of bf16 weights of this size, or of weights that become bf16 after one in fp32."""
    layer = nn.Linear(32, 32, bias=False, dtype=torch.float32 if becomes else torch.bfloat16)
    layer.weight.data.fill_(value)
    optimizer = mm.Muon([layer.weight], lr=lr)
    for dtype in (torch.float32, torch.bfloat16)[not becomes :]:
        layer.to(dtype).weight.grad = torch.randn(32, 32, dtype=dtype)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("becomes", [False, True], ids=["bf16", "becomes bf16 between steps"])
def test_bf16_without_masters_warns_once_with_the_share(becomes: bool) -> None:
    with pytest.warns(UserWarning, match=r"100% of its entries unchanged.*master_dtype=torch.float32"):
        optimizer = stepped_in_bf16(1.0, 1e-5, becomes=becomes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        stepped_in_bf16(1e-3, 0.1, becomes=becomes)  # which rounding keeps


def test_bf16_norms_without_masters_that_no_step_moves_are_named() -> None:
    def steps(**settings: Any) -> tuple[list[str], bool]:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2)]
        model = nn.Sequential(nn.Embedding(9, 8), *blocks, nn.Linear(8, 3)).bfloat16()
        before = model[2][1].weight.detach().clone()
        optimizer = mm.from_model(model, lr=1e-3, watch=False, **settings)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(10):
                optimizer.zero_grad()
                model(torch.arange(9)).float().square().sum().backward()
                optimizer.step()
        messages = [str(w.message) for w in caught if "AdamW trains these weights" in str(w.message)]
        return messages, torch.equal(model[2][1].weight, before)

    (message,), still = steps()
    assert still
    assert message.startswith("*.1.weight: AdamW trains these weights in 16 bits without masters")
    assert "at learning rate 0.001 rounding leaves all of their entries unchanged" in message
    for settings in ({"master_dtype": torch.float32}, {"stochastic_rounding": 0}, {"adamw": {"lr": 0.1}}):
        assert steps(**settings) == ([], False)


def test_gradient_accumulation_is_one_orthogonalization_of_the_sum() -> None:
    model, optimizer = small_optimizer()
    twin, other = copy.deepcopy((model, optimizer))
    x = torch.randn(8, 12)
    model(x).square().sum().backward()
    optimizer.step()
    for half in x.chunk(2):
        twin(half).square().sum().backward()
    other.step()
    assert optimizer.counts.orthogonalized == other.counts.orthogonalized == 2
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-3)


def test_named_parameters_and_use_muon_alias() -> None:
    layer = nn.Linear(4, 4, bias=False)
    optimizer = mm.Muon(layer.named_parameters(), lr=0.1)
    assert optimizer.param_groups[0]["param_names"] == ["weight"]
    other = mm.Muon([{"params": [layer.weight], "use_muon": False}], lr=0.1)
    assert other.param_groups[0]["algorithm"] == "adamw"


def test_explain_and_metrics_tell_the_size_of_a_step() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(64, 256))
    optimizer = mm.Muon([{"params": [weight], "param_names": ["w"], "name": "muon"}], lr=0.1, weight_decay=0.0)
    (row,) = optimizer.explain().rows
    optimizer.metrics()
    before = weight.detach().clone()
    weight.grad = torch.randn(64, 256)
    optimizer.step()
    change = weight.detach() - before
    assert abs(row.rms / float(change.square().mean().sqrt()) - 1) < 0.1
    assert abs(row.spectral / float(torch.linalg.matrix_norm(change, 2)) - 1) < 0.15
    figures = optimizer.metrics()
    assert figures["muon/update_rms"] == pytest.approx(float(change.square().mean().sqrt()), rel=1e-3)
    assert figures["muon/gradient_rms"] == pytest.approx(float(weight.grad.square().mean().sqrt()), rel=1e-6)
    assert figures["muon/momentum_rms"] == pytest.approx(0.05 * figures["muon/gradient_rms"], rel=1e-5)
    ratio = float(change.norm() / weight.detach().norm())
    assert figures["muon/update_to_weight"] == pytest.approx(ratio, rel=1e-3)


# ------------------------------------------------------------------ the state-creating step of torch's checkpoints


def test_the_state_creating_step_changes_nothing_later() -> None:
    """torch's `_init_optim_state` steps at lr 0 with zero gradients; AdamW's step count must not move."""
    model, optimizer = small_optimizer()
    twin, other = copy.deepcopy((model, optimizer))
    rates = [group["lr"] for group in other.param_groups]
    for p in twin.parameters():
        p.grad = torch.zeros_like(p)
    for group in other.param_groups:
        group["lr"] = 0.0
    other.step()
    for group, lr in zip(other.param_groups, rates, strict=True):
        group["lr"] = lr
    assert len(other.state_dict()["state"]) == len(list(twin.parameters()))
    assert train_to_losses(model, optimizer, 4) == train_to_losses(twin, other, 4)


def test_a_warm_up_step_at_rate_zero_does_count() -> None:
    model, optimizer = small_optimizer()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train_to_losses(model, optimizer, 1)
    vector = optimizer.param_groups[-1]["params"][0]
    assert optimizer.state[vector]["step"] == 1
    assert optimizer.state[vector]["exp_avg"].abs().max() > 0


# ------------------------------------------------------------------ bad input


def small_weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(4, 6))


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: mm.Muon([nn.Parameter(torch.randn(4))]), ValueError, r'group0.0: found shape \(4,\).*"adamw"'),
        (lambda: mm.Muon([nn.Parameter(torch.randn(4, 3, 2, 2))]), ValueError, "flatten"),
        (lambda: mm.Muon([nn.Parameter(torch.randn(0, 3))]), ValueError, "sizes of at least 1"),
        (
            lambda: mm.Muon([{"params": [small_weight()], "name": "a"}, {"params": [small_weight()], "name": "a"}]),
            ValueError,
            "'a' twice",
        ),
        (
            lambda: mm.Muon([{"params": [small_weight()], "matrices": [("rows", 3, 3)]}]),
            ValueError,
            "add up to 6, not 4",
        ),
        (lambda: mm.Muon([{"params": [small_weight()], "matrices": ["rows"]}]), ValueError, "matrices 'rows'"),
        (lambda: mm.Muon([{"params": [small_weight()], "matrices": ["blocks"]}]), ValueError, "unknown form"),
        (lambda: mm.Muon([{"params": [small_weight()], "matrices": "whole"}]), ValueError, "one entry per parameter"),
        (
            lambda: mm.Muon([{"params": [small_weight()], "algorithm": "adamw", "matrices": 3}]),
            ValueError,
            "one entry per parameter",
        ),
        (lambda: mm.Muon([{"params": [small_weight()], "algorithm": "sgd"}]), ValueError, '"muon" or "adamw"'),
        (lambda: mm.Muon([{"params": [small_weight()], "betas": (0.9, 0.99)}]), ValueError, "adamw_betas"),
        (lambda: mm.Muon([{"params": [small_weight()], "learning_rate": 0.1}]), ValueError, "needed 'lr'"),
        (lambda: mm.Muon([small_weight()], state_device="cuda"), ValueError, "state_device"),
        (
            lambda: mm.Muon([small_weight()], state_device="cpu", state_dtype="int8"),
            ValueError,
            "on the device at once",
        ),
        (lambda: mm.Muon([small_weight()], memory_budget_mb=-1), ValueError, "memory_budget_mb"),
        (lambda: mm.Muon([small_weight()], bucket_cap_mb=16), TypeError, "'bucket_cap_mb'.*Write memory_budget_mb="),
        (lambda: mm.Muon([small_weight()], process_group="all"), ValueError, "process_group"),
        (lambda: mm.Muon(nn.Linear(2, 2)), TypeError, "from_model"),
    ],
)
def test_bad_settings_say_what_to_write(build: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build()


def test_keys_of_frameworks_and_schedulers_are_left_alone() -> None:
    group = {
        "params": [small_weight()],
        "initial_lr": 0.1,
        "wd_mult": 1.0,
        "is_expert_parallel": False,
        "max_momentum": 0.9,
    }
    assert mm.Muon([group], lr=0.1).param_groups[0]["wd_mult"] == 1.0


def test_a_refused_group_leaves_the_optimizer_as_it_was() -> None:
    optimizer = mm.Muon([small_weight()], lr=0.1)
    with pytest.raises(ValueError, match="group1"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.randn(4))], "algorithm": "muon"})
    assert len(optimizer.param_groups) == 1


def test_sparse_gradients_raise_and_nothing_is_written() -> None:
    embedding = nn.Embedding(8, 4, sparse=True)
    good = nn.Parameter(torch.ones(4, 4))
    optimizer = mm.Muon([{"params": [good]}, {"params": [embedding.weight], "algorithm": "adamw"}], lr=0.1)
    good.grad = torch.ones(4, 4)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match=r"sparse.*dense gradient.*sparse=False"):
        optimizer.step()
    assert torch.equal(good, torch.ones(4, 4))
    assert not optimizer.state[good]


def test_loading_the_state_of_another_kind_of_optimizer_loads_nothing() -> None:
    model, optimizer = small_optimizer()
    train_to_losses(model, optimizer, 1)
    saved = optimizer.state_dict()
    before = copy.deepcopy(optimizer.state_dict())
    broken = copy.deepcopy(saved)
    broken["state"][0] = {"exp_avg": torch.zeros(16, 12)}
    with pytest.raises(mm.StateError, match=r"0.weight: found state \['exp_avg'\]; needed 'momentum_buffer'"):
        optimizer.load_state_dict(broken)
    broken = copy.deepcopy(saved)
    broken["state"][0]["momentum_buffer"] = torch.zeros(8, 12)
    with pytest.raises(mm.StateError, match=r"0.weight: found momentum_buffer a plain tensor of shape \(8, 12\)"):
        optimizer.load_state_dict(broken)
    broken = copy.deepcopy(saved)
    broken["param_groups"][0]["matrices"] = [("rows", 8, 8), "whole", "whole"]  # as older checkpoints have it
    with pytest.raises(mm.StateError, match="found matrices"):
        optimizer.load_state_dict(broken)
    broken = copy.deepcopy(saved)
    broken["param_groups"][0]["lr"] = None
    with pytest.raises(mm.StateError, match="of the state: lr: found None; needed a number"):
        optimizer.load_state_dict(broken)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert torch.equal(after["state"][0]["momentum_buffer"], before["state"][0]["momentum_buffer"])


def test_loading_the_state_of_other_groups_says_which_parameters_moved() -> None:
    model = small_optimizer()[0]
    optimizer, other = mm.from_model(model, lr=0.1), mm.from_model(model, lr=0.1, overrides={"0.weight": {"lr": 0.5}})
    moved = r"Build the groups .*\. The group of 0\.weight is 'muon\[lr=0\.5\]' in the state and 'muon' here$"
    with pytest.raises(mm.StateError, match=r"found 4 groups, with parameters: 'muon' 1, 'muon\[lr.*" + moved):
        optimizer.load_state_dict(other.state_dict())
    fewer = optimizer.state_dict()
    for key in ("params", "param_names"):
        fewer["param_groups"][0][key] = fewer["param_groups"][0][key][:-1]
    with pytest.raises(mm.StateError, match=r"The group of \S+ is missing in the state and 'muon' here$"):
        optimizer.load_state_dict({**fewer, "state": {}})
    unnamed = [{**group, "param_names": None} for group in other.state_dict()["param_groups"]]
    with pytest.raises(mm.StateError, match=r"needed 3 groups, .*when the state was saved$"):
        optimizer.load_state_dict({"state": {}, "param_groups": unnamed})


def test_the_state_of_another_optimizer_is_converted() -> None:
    model = small_optimizer()[0]
    optimizer, other = mm.from_model(model, lr=0.1), torch.optim.AdamW(model.parameters())
    with pytest.raises(
        mm.StateError, match=r"found 1 group, .*Write .*muonmesh\.checkpoint\.convert\(saved, optimizer"
    ):
        optimizer.load_state_dict(other.state_dict())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"state_dtype": "int8"},
        {"rule": "normuon", "state_dtype": torch.bfloat16},
        {"rule": "adamuon", "master_dtype": torch.float32},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*without masters")
def test_explain_tells_the_bytes_of_state_that_a_step_leaves(settings: dict[str, Any]) -> None:
    """Before there is any: codes and scales of int8, masters, what a rule keeps by row, AdamW's moments and counts."""
    model = nn.Sequential(nn.Embedding(30, 300), nn.Linear(300, 520), nn.Linear(520, 7), nn.Linear(7, 3)).bfloat16()
    optimizer = mm.from_model(model, compute_dtype=torch.float32, **settings)
    report = optimizer.explain()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state_bytes = {
        name: sum(tensor.numel() * tensor.element_size() for tensor in optimizer.state[parameter].values())
        for name, parameter in model.named_parameters()
    }
    assert {row.parameter: row.state for row in report.rows} == state_bytes
    assert report.state_bytes == sum(state_bytes.values())
    assert f"stores {report.state_bytes / 1e6:.3g} MB of optimizer state" in str(report)
    tight = replace(report, budget_bytes=64 << 20)
    assert "a step takes up to memory_budget_mb=64 more\n" in str(tight)
    assert "=64 more, and more for 2 matrices that it takes one at a time\n" in str(replace(tight, alone=2))


def test_a_flat_tensor_is_explained_parameter_by_parameter() -> None:
    """Its parameters have names, shapes and state of their own, whichever rule steps them."""
    shapes = {"first": (4, 3), "second": (6,)}
    flat, contents, start = nn.Parameter(torch.randn(20)), list[mm.FlatParameter](), 0
    for name, shape in shapes.items():
        intervals = ((Interval(0, math.prod(shape), start),),)
        contents.append(mm.FlatParameter(name, mm.FlatShards(MeshLayout.replicated(shape, (0,)), intervals, (20,))))
        start += math.prod(shape)
    group = {"params": [flat], "param_names": ["flat"], "algorithm": "adamw", "reasons": ["as it is flat"]}
    report = mm.Muon([group], layouts={"flat": contents}).explain()
    assert [(row.parameter, row.matrices, row.reason) for row in report.rows] == [
        ("first", "4×3", "as it is flat"),
        ("second", "6", "as it is flat"),
    ]
    count = 4  # of steps, for each
    assert [row.state for row in report.rows] == [2 * 4 * math.prod(shape) + count for shape in shapes.values()]
    assert sum(row.state for row in report.rows) == report.state_bytes
