"""The contract of torch.optim: what torch's own generic tests ask of each of its optimizers, asked of `Muon`.

torch tests its optimizers by a table of inputs (`OptimizerInfo`, in torch.testing._internal.common_optimizers, which
needs a package that is not among ours) and generic tests (`test/test_optim.py`, not in the wheel). `INPUTS` is such a
table; the tests have the intent of torch's and their names in the docstrings. Where `Muon` does otherwise on purpose,
`DEVIATIONS` says so, why, and which test shows it.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
import typing
from collections import OrderedDict
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    ParamsT,
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.optim.swa_utils import SWALR, AveragedModel

import muonmesh as mm
from muonmesh.checkpoint import state
from tests.support.samples import one_in
from tests.support.tensors import same_bits

pytestmark = pytest.mark.filterwarnings("ignore:.*without masters")

# ------------------------------------------------------------------ the table

INPUTS: dict[str, dict[str, Any]] = {
    "default": {},
    "lr": {"lr": 0.01},
    "tensor lr": {"lr": torch.tensor(0.001)},
    "tensor lr of one dim": {"lr": torch.tensor([0.001])},
    "no decay": {"weight_decay": 0.0},
    "much decay": {"weight_decay": 0.9},
    "no momentum": {"momentum": 0.0},
    "less momentum": {"momentum": 0.8},
    "no nesterov": {"nesterov": False},
    **{f"scale {mode}": {"scale_mode": mode} for mode in ("original", "spectral", "unit_rms_norm", "none")},
    "extra scale": {"extra_scale_factor": 0.3},
    "six steps": {"ns_steps": 6},
    "coefficients by name": {"ns_coefficients": "quintic"},
    "coefficients": {"ns_coefficients": ((3.4445, -4.775, 2.0315),)},
    "gram": {"ns_method": "gram"},
    "betas and eps": {"adamw_betas": (0.8, 0.99), "adamw_eps": 1e-6},
    "fp32": {"compute_dtype": torch.float32},
    "fp64": {"compute_dtype": torch.float64, "state_dtype": torch.float64},
    "bf16 state": {"state_dtype": torch.bfloat16},
    "masters": {"master_dtype": torch.float64},
    "shared state": {"shard_state": True},
    "small buckets": {"memory_budget_mb": 0.0016},
    "local": {"process_group": "local"},
}
SHAPES = {"bias": (10,), "head": (5, 3), "scalar": (), "stack": (2, 4, 3), "tall": (9, 4), "weight": (5, 10)}
MUON = ("weight", "tall", "stack")
inputs = pytest.mark.parametrize("name", one_in(3, INPUTS))


def drawn_parameters(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {name: nn.Parameter(value.to(dtype)) for name, value in drawn.items()}


def groups_of_both(params: dict[str, nn.Parameter], **settings: Any) -> list[dict[str, Any]]:
    return [
        {"params": [params[n] for n in MUON], "param_names": list(MUON), "name": "muon", **settings},
        *(
            {"params": [params[n]], "param_names": [n], "algorithm": "adamw", "name": n, **settings}
            for n in SHAPES
            if n not in MUON
        ),
    ]


def made_with(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[dict[str, nn.Parameter], mm.Muon]:
    params = drawn_parameters(seed, dtype)
    return params, mm.Muon(groups_of_both(params), **copy.deepcopy(INPUTS[name]))


def draw(params: dict[str, nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in params.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def step_drawn(params: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        draw(params, step)
        optimizer.step()


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


# ------------------------------------------------------------------ it goes downhill


def descends(name: str, make: Callable[[Tensor], nn.Parameter], scheduler: Any = None) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = make(torch.randn(10, 5, generator=generator))
    bias = nn.Parameter(torch.randn(10, generator=generator))
    x = torch.randn(5, generator=generator)
    settings = {"lr": 0.01, **copy.deepcopy(INPUTS[name])}
    optimizer = mm.Muon([{"params": [weight]}, {"params": [bias], "algorithm": "adamw"}], **settings)
    schedule = scheduler(optimizer) if scheduler else None

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (weight.mv(x) + bias).pow(2).sum()
        loss.backward()
        return loss

    first = float(closure())
    for _ in range(20):
        loss = optimizer.step(closure)
        if isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
            schedule.step(loss)
        elif schedule is not None:
            schedule.step()
    assert float(closure()) < first


@inputs
@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "not contiguous"])
def test_it_goes_downhill(name: str, contiguous: bool) -> None:
    """test_forloop_goes_right_direction."""

    def make(value: Tensor) -> nn.Parameter:
        return nn.Parameter(value if contiguous else torch.stack([value, value], -1)[..., 0])

    assert make(torch.zeros(10, 5)).is_contiguous() == contiguous
    descends(name, make)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4], gamma=0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, factor=0.4, total_iters=4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, gamma=0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=30, power=0.9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=30),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=4),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.001, max_lr=0.02, step_size_up=3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.02, total_steps=30),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, gamma=0.9)], milestones=[2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, gamma=0.9)]
    ),
    "SWALR": lambda o: SWALR(o, swa_lr=0.005, anneal_epochs=3),
}


def test_every_scheduler_of_torch_is_here() -> None:
    classes = {name for name in lr_scheduler.__all__ if name != "LRScheduler"} | {"SWALR"}
    assert set(SCHEDULERS) == classes


@pytest.mark.parametrize(
    "lr", [pytest.param(0.01, id="number", marks=pytest.mark.soak), pytest.param(torch.tensor(0.01), id="tensor")]
)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_scheduler_moves_both_halves_as_it_moves_adamw(scheduler: str, lr: Any) -> None:
    """test_forloop_goes_right_direction_with_lrsched, for all of them: the rates are those that torch's AdamW gets."""
    params, twins = drawn_parameters(), drawn_parameters()
    optimizer = mm.Muon(groups_of_both(params), lr=copy.deepcopy(lr))
    # A tensor for each group: torch shares one between groups, where ReduceLROnPlateau counts once for each of them.
    other = torch.optim.AdamW([{"params": g["params"], "lr": copy.deepcopy(lr)} for g in groups_of_both(twins)])
    schedule, twin = SCHEDULERS[scheduler](optimizer), SCHEDULERS[scheduler](other)
    moved = set()
    for step in range(8):
        step_drawn(params, optimizer, range(step, step + 1))
        step_drawn(twins, other, range(step, step + 1))
        for stepped in (schedule, twin):
            stepped.step(1.0) if isinstance(stepped, lr_scheduler.ReduceLROnPlateau) else stepped.step()
        rates = [float(g["lr"]) for g in optimizer.param_groups]
        assert rates == [float(g["lr"]) for g in other.param_groups]
        moved.add(rates[0])
    assert len(moved) > 1
    if not isinstance(schedule, SWALR):
        state = copy.deepcopy(schedule.state_dict())
        schedule.load_state_dict(state)
    descends("default", nn.Parameter, SCHEDULERS[scheduler])


@pytest.mark.parametrize("scheduler", ["CyclicLR", "OneCycleLR"])
def test_what_cycles_momentum_cycles_muons(scheduler: str) -> None:
    """AdamW's betas stay: they are `adamw_betas`, which torch's schedulers do not know."""
    params = drawn_parameters()
    optimizer = mm.Muon(groups_of_both(params), lr=0.01)
    schedule = SCHEDULERS[scheduler](optimizer)
    momenta = []
    for step in range(6):
        before = optimizer.param_groups[0]["momentum"]
        old = optimizer.state[params["weight"]].get("momentum_buffer", torch.zeros(5, 10)).clone()
        step_drawn(params, optimizer, range(step, step + 1))
        expected = old.lerp(params["weight"].grad, 1 - before)
        assert torch.equal(optimizer.state[params["weight"]]["momentum_buffer"], expected)
        schedule.step()
        momenta.append(before)
    assert len(set(momenta)) > 3
    assert all(group["adamw_betas"] == (0.9, 0.95) for group in optimizer.param_groups)


# ------------------------------------------------------------------ learning rates and groups


@inputs
def test_a_tensor_as_learning_rate_is_the_number_and_is_read_at_every_step(name: str) -> None:
    """test_tensor_lr: of no dim and of one, changed in place."""
    number = float(INPUTS[name].get("lr", 0.01))
    results = []
    for lr in (number, torch.tensor(number, dtype=torch.float64), torch.tensor([number], dtype=torch.float64)):
        params = drawn_parameters()
        optimizer = mm.Muon(groups_of_both(params), **{**INPUTS[name], "lr": lr})
        step_drawn(params, optimizer, range(2))
        for group in optimizer.param_groups:
            if isinstance(lr, Tensor):
                group["lr"].fill_(number / 4)
            else:
                group["lr"] = number / 4
        step_drawn(params, optimizer, range(2, 4))
        results.append([p.detach() for p in params.values()])
        if isinstance(lr, Tensor):
            assert float(lr) == number  # each of the groups has a copy
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])


@inputs
def test_groups_have_decay_of_their_own(name: str) -> None:
    """test_param_groups_weight_decay: a group without decay is not decayed by another's."""
    settings = {k: v for k, v in INPUTS[name].items() if k != "weight_decay"}
    results = {}
    for decays in ((0.0, 0.5), (0.5, 0.0), (0.0, 0.0)):
        params = drawn_parameters()
        param_groups = groups_of_both(params)
        for group in param_groups:
            group["weight_decay"] = decays[0] if group["name"] == "muon" else decays[1]
        step_drawn(params, mm.Muon(param_groups, **copy.deepcopy({"lr": 0.1, **settings})), range(3))
        results[decays] = {n: p.detach() for n, p in params.items()}
    for n in SHAPES:
        decayed, plain = ((0.5, 0.0), (0.0, 0.5)) if n in MUON else ((0.0, 0.5), (0.5, 0.0))
        assert same_bits(results[plain][n], results[0.0, 0.0][n])
        assert not same_bits(results[decayed][n], results[0.0, 0.0][n])


@inputs
def test_groups_have_rates_of_their_own(name: str) -> None:
    """test_param_groups_lr: a rate of zero leaves its group alone, and only that."""
    params = drawn_parameters()
    param_groups = groups_of_both(params)
    param_groups[0]["lr"], param_groups[1]["lr"] = 0.0, 0.0
    before = {n: p.detach().clone() for n, p in params.items()}
    step_drawn(params, mm.Muon(param_groups, **copy.deepcopy(INPUTS[name])), range(2))
    still = {*MUON, param_groups[1]["name"]}
    assert {n for n, p in params.items() if same_bits(p.detach(), before[n])} == still


def test_a_group_added_later_takes_the_defaults_as_they_are_then() -> None:
    params = drawn_parameters()
    optimizer = mm.Muon([params["weight"]])
    optimizer.defaults["lr"] = 0.5
    optimizer.add_param_group({"params": params["tall"], "algorithm": "muon"})
    optimizer.add_param_group({"params": iter([params["stack"]]), "lr": 0.1, "algorithm": "muon"})
    assert [g["lr"] for g in optimizer.param_groups] == [3e-4, 0.5, 0.1]
    step_drawn({n: params[n] for n in MUON}, optimizer, range(1))
    assert all("momentum_buffer" in optimizer.state[params[n]] for n in MUON)


def test_parameters_may_be_given_in_every_way_that_torch_takes() -> None:
    annotated = typing.get_type_hints(mm.Muon.__init__)["params"]
    assert set(typing.get_args(annotated)) == set(typing.get_args(ParamsT))
    results = []
    for give in (
        lambda params: [params["weight"], params["tall"]],
        lambda params: (params["weight"], params["tall"]),
        lambda params: (params[n] for n in ("weight", "tall")),
        lambda params: [("weight", params["weight"]), ("tall", params["tall"])],
        lambda params: ((n, params[n]) for n in ("weight", "tall")),
        lambda params: OrderedDict((n, params[n]) for n in ("weight", "tall")).items(),
        lambda params: {n: params[n] for n in ("weight", "tall")}.values(),
        lambda params: [{"params": params["weight"]}, {"params": params["tall"]}],
        lambda params: ({"params": [params[n]]} for n in ("weight", "tall")),
        lambda params: [{"params": (params[n] for n in ("weight", "tall"))}],
        lambda params: [{"params": ((n, params[n]) for n in ("weight", "tall"))}],
        lambda params: nn.ParameterList([params["weight"], params["tall"]]).parameters(),
    ):
        params = drawn_parameters()
        optimizer = mm.Muon(give(params), lr=0.1)
        step_drawn({n: params[n] for n in ("weight", "tall")}, optimizer, range(2))
        results.append([params["weight"].detach(), params["tall"].detach()])
        names = [n for g in optimizer.param_groups for n in g["param_names"]]
        assert len(set(names)) == 2
    assert all(same_bits(results[0], other) for other in results)


# ------------------------------------------------------------------ steps that do nothing


@inputs
def test_a_step_without_gradients_does_nothing(name: str) -> None:
    """test_step_is_noop_when_params_have_no_grad."""
    params, optimizer = made_with(name)
    before = [p.detach().clone() for p in params.values()]
    optimizer.step()
    assert same_bits(before, [p.detach() for p in params.values()])
    assert not any("momentum_buffer" in s for s in optimizer.state.values())


@inputs
def test_zero_gradients_move_nothing_without_decay(name: str) -> None:
    """test_step_is_noop_for_zero_grads."""
    params = drawn_parameters()
    optimizer = mm.Muon(groups_of_both(params), **copy.deepcopy({**INPUTS[name], "weight_decay": 0.0}))
    before = [p.detach().clone() for p in params.values()]
    for parameter in params.values():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(3):
        optimizer.step()
    assert same_bits(before, [p.detach() for p in params.values()])


def test_a_group_without_parameters_is_left_alone() -> None:
    params = drawn_parameters()
    optimizer = mm.Muon([{"params": []}, {"params": [params["weight"]]}, {"params": [], "algorithm": "adamw"}])
    draw(params, 0)
    before = params["weight"].detach().clone()
    optimizer.step()
    assert not same_bits(before, params["weight"].detach())
    alone = mm.Muon([{"params": []}])
    assert alone.step(lambda: 3.0) == 3.0
    assert float(alone.clip_grad_norm_(1.0)) == 0.0
    assert alone.metrics() == {}
    alone.load_state_dict(alone.state_dict())
    assert str(alone.explain())


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none: bool) -> None:
    params, optimizer = made_with("default")
    draw(params, 0)
    optimizer.zero_grad(set_to_none)
    for parameter in params.values():
        assert parameter.grad is None if set_to_none else not parameter.grad.any()  # type: ignore[union-attr]


# ------------------------------------------------------------------ state


@inputs
@pytest.mark.parametrize("count", [Tensor.clone, float], ids=["counts", "numbers for counts"])
def test_a_state_dict_continues_bit_for_bit(name: str, count: Callable[[Tensor], Any]) -> None:
    """test_load_state_dict, test_save_load_equality_with_weights_only: through a file, weights_only.

    And test_load_nontensor_step: states of torch before 1.12.
    """
    params, optimizer = made_with(name)
    step_drawn(params, optimizer, range(3))
    state = through_a_file(optimizer.state_dict())
    assert same_bits(state["state"], optimizer.state_dict()["state"])
    for entry in state["state"].values():
        entry.update({"step": count(entry["step"])} if "step" in entry else {})
    twins, other = made_with(name)
    for n, parameter in params.items():
        twins[n].data.copy_(parameter.data)
    other.load_state_dict(state)
    assert same_bits(other.state_dict()["state"], optimizer.state_dict()["state"])
    for trained, o in ((params, optimizer), (twins, other)):
        step_drawn(trained, o, range(3, 6))
    assert same_bits([p.detach() for p in params.values()], [p.detach() for p in twins.values()])
    assert same_bits(other.state_dict()["state"], optimizer.state_dict()["state"])


def test_settings_in_numbers_of_other_libraries_are_saved_as_floats() -> None:
    """A warmup in NumPy leaves its scalars in the groups, which torch.load(weights_only=True) refuses."""
    number = {"lr": np.float32(0.01), "weight_decay": np.float64(0.1), "momentum": Fraction(9, 10)}
    params, twins = drawn_parameters(), drawn_parameters()
    optimizer = mm.Muon(groups_of_both(params))
    for group in optimizer.param_groups:
        group.update(number, adamw_betas=[Fraction(9, 10), np.float64(0.95)], initial_lr=np.float64(0.02))
    step_drawn(params, optimizer, range(2))
    state = through_a_file(optimizer.state_dict())
    for group in state["param_groups"]:
        assert {key: (type(group[key]), group[key]) for key in number} == {
            k: (float, float(v)) for k, v in number.items()
        }
        assert [*group["adamw_betas"], group["initial_lr"]] == [0.9, 0.95, 0.02]
    other = mm.Muon(groups_of_both(twins))
    other.load_state_dict(state)
    for name, parameter in twins.items():
        parameter.data.copy_(params[name].detach())
    step_drawn(params, optimizer, range(2, 4))
    step_drawn(twins, other, range(2, 4))
    assert all(same_bits(p.detach(), twins[n].detach()) for n, p in params.items())


@inputs
def test_state_dicts_come_in_the_same_order(name: str) -> None:
    """test_state_dict_deterministic."""
    params, optimizer = made_with(name)
    step_drawn(params, optimizer, range(1))
    state = optimizer.state_dict()
    assert list(state["state"]) == list(range(len(params)))
    assert [g["params"] for g in state["param_groups"]] == [[0, 1, 2], [3], [4], [5]]
    assert [g["param_names"] for g in state["param_groups"]] == [list(MUON), ["bias"], ["head"], ["scalar"]]
    twins, other = made_with(name)
    other.load_state_dict(state)
    assert list(other.state_dict()["state"]) == list(range(len(twins)))


def test_settings_of_the_state_win_and_missing_ones_stay() -> None:
    """test_can_load_older_state_dict: a state from before a setting existed."""
    params, optimizer = made_with("default")
    step_drawn(params, optimizer, range(1))
    state = copy.deepcopy(optimizer.state_dict())
    for group in state["param_groups"]:
        for key in ("nesterov", "ns_method", "extra_scale_factor", "param_names", "name", "adamw_eps"):
            group.pop(key)
        group["lr"] = 0.125
    twins = drawn_parameters()
    other = mm.Muon(groups_of_both(twins), nesterov=False, extra_scale_factor=0.5)
    other.load_state_dict(state)
    assert {g["lr"] for g in other.param_groups} == {0.125}
    assert {(g["nesterov"], g["extra_scale_factor"]) for g in other.param_groups} == {(False, 0.5)}
    assert other.param_groups[0]["param_names"] == list(MUON)
    step_drawn(twins, other, range(1, 2))


@pytest.mark.parametrize("from_names", [True, False])
@pytest.mark.parametrize("to_names", [True, False])
def test_states_with_and_without_names_load_into_each_other(from_names: bool, to_names: bool) -> None:
    """test_can_load_from_to_named_state_dict; the names of the optimizer that loads stay."""

    def weight_and_optimizer(named: bool) -> tuple[nn.Parameter, mm.Muon]:
        weight = drawn_parameters()["weight"]
        return weight, mm.Muon([("own", weight)] if named else [weight], lr=0.1)

    weight, optimizer = weight_and_optimizer(from_names)
    step_drawn({"weight": weight}, optimizer, range(2))
    twin, other = weight_and_optimizer(to_names)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["param_names"] == (["own"] if to_names else ["group0.0"])
    assert same_bits(other.state[twin], optimizer.state[weight])


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_states_load_across_dtypes_of_parameters(source: torch.dtype, to: torch.dtype) -> None:
    """test_cpu_load_state_dict and its relatives: moments as the parameters, momentum as `state_dtype`."""
    params, optimizer = made_with("default", dtype=source)
    step_drawn(params, optimizer, range(2))
    twins, other = made_with("default", dtype=to)
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    for n in params:
        state, loaded_state = optimizer.state[params[n]], other.state[twins[n]]
        if n in MUON:
            assert same_bits(state, loaded_state)
            assert loaded_state["momentum_buffer"].dtype == torch.float32
        else:
            assert loaded_state["step"].dtype == torch.float32
            assert same_bits(loaded_state["exp_avg"], state["exp_avg"].to(to))
    step_drawn(twins, other, range(2, 3))


@inputs
def test_what_is_loaded_is_not_shared_with_what_it_was_loaded_from(name: str) -> None:
    params, optimizer = made_with(name)
    step_drawn(params, optimizer, range(2))
    state = optimizer.state_dict()
    state_before = copy.deepcopy(state)
    twins, other = made_with(name)
    other.load_state_dict(state)
    step_drawn(twins, other, range(2, 4))
    other.param_groups[0]["momentum"] = 0.5
    assert same_bits(state, state_before)
    assert same_bits(optimizer.state_dict(), state_before)


@inputs
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_have_every_setting_and_go_on_alike(name: str, how: str) -> None:
    """test_deepcopy_copies_all_public_attrs, test_pickle."""
    params, optimizer = made_with(name)
    step_drawn(params, optimizer, range(2))
    pair = (params, optimizer)
    twins, other = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    public = {key for key in vars(optimizer) if not key.startswith("_")}
    assert public == {key for key in vars(other) if not key.startswith("_")}
    # torch's own __setstate__ adds this one
    assert same_bits({**optimizer.defaults, "differentiable": False}, other.defaults)
    assert same_bits(optimizer.state_dict(), other.state_dict())
    for trained, o in ((params, optimizer), (twins, other)):
        step_drawn(trained, o, range(2, 4))
    assert same_bits([p.detach() for p in params.values()], [p.detach() for p in twins.values()])


@inputs
def test_it_prints_its_groups(name: str) -> None:
    """test_optimizer_can_be_printed."""
    _, optimizer = made_with(name)
    first, *lines, last = repr(optimizer).splitlines()
    assert (first, last) == ("Muon (", ")")
    assert [line.split(":")[0].strip() for line in lines] == [group["name"] for group in optimizer.param_groups]


# ------------------------------------------------------------------ hooks


def test_hooks_of_a_step_run_in_torchs_order_and_may_change_its_arguments() -> None:
    """test_step_pre_hook, test_step_post_hook, test_step_all_hooks."""
    params, optimizer = made_with("default")
    draw(params, 0)
    calls: list[str] = []
    hook_arguments: list[Any] = []
    handles = [
        register_optimizer_step_pre_hook(lambda o, a, k: calls.append("global pre")),
        register_optimizer_step_post_hook(lambda o, a, k: calls.append("global post")),
        optimizer.register_step_pre_hook(lambda o, a, k: calls.append("pre")),
        optimizer.register_step_post_hook(lambda o, a, k: calls.append("post")),
    ]

    def replaced(o: Any, args: Any, kwargs: Any) -> Any:
        hook_arguments.append((o is optimizer, args[1:], kwargs))
        return args, {"closure": lambda: 7.0}

    handles.append(optimizer.register_step_pre_hook(replaced))
    calls.clear()
    assert optimizer.step() == 7.0
    assert calls == ["global pre", "pre", "post", "global post"]
    for handle in handles:
        handle.remove()
    calls.clear()
    assert optimizer.step() is None
    assert calls == []
    assert hook_arguments[-1] == (True, (), {})


def test_hooks_of_state_dict_and_load_state_dict() -> None:
    """test_state_dict_pre_hook, ..._post_hook, test_load_state_dict_pre_hook_and_prepend, ..._post_hook."""
    params, optimizer = made_with("default")
    step_drawn(params, optimizer, range(1))
    calls: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda o: calls.append("pre"))
    optimizer.register_state_dict_pre_hook(lambda o: calls.append("pre, in front"), prepend=True)
    optimizer.register_state_dict_post_hook(lambda o, state: {**state, "mine": 1})
    state = optimizer.state_dict()
    assert calls == ["pre, in front", "pre"]
    assert state["mine"] == 1

    def doubled(o: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        calls.append("load")
        state_dict = copy.deepcopy(state_dict)
        for group in state_dict["param_groups"]:
            group["lr"] = group["lr"] * 2
        for entry in state_dict["state"].values():
            if "momentum_buffer" in entry:
                entry["momentum_buffer"] *= 2
        return state_dict

    twins, other = made_with("default")
    other.register_load_state_dict_pre_hook(lambda o, state_dict: calls.append("load, first"), prepend=True)
    other.register_load_state_dict_pre_hook(doubled)
    other.register_load_state_dict_post_hook(lambda o: calls.append(f"loaded {o.param_groups[0]['lr']}"))
    other.register_load_state_dict_post_hook(lambda o: calls.append("loaded, first"), prepend=True)
    calls.clear()
    other.load_state_dict(state)
    assert calls == ["load, first", "load", "loaded, first", "loaded 0.0006"]
    assert same_bits(
        other.state[twins["weight"]]["momentum_buffer"], optimizer.state[params["weight"]]["momentum_buffer"] * 2
    )
    assert same_bits(state["state"][0]["momentum_buffer"], optimizer.state[params["weight"]]["momentum_buffer"])


def test_a_step_shows_in_profiles_under_its_name() -> None:
    """_hook_for_profile: the record has torch's name, once, also after a copy."""
    params, optimizer = made_with("default")
    for stepped in (optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        draw(params, 0)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            stepped.step()
            stepped.zero_grad()
        names = [event.name for event in profile.events() if event.name.startswith("Optimizer.")]
        assert names == ["Optimizer.step#Muon.step", "Optimizer.zero_grad#Muon.zero_grad"]


def test_a_subclass_is_hooked_once() -> None:
    class Mine(mm.Muon):
        pass

    params = drawn_parameters()
    optimizer = Mine(groups_of_both(params))
    calls: list[str] = []
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    step_drawn(params, optimizer, range(1))
    assert calls == ["post"]


# ------------------------------------------------------------------ around it


def test_closure() -> None:
    params, optimizer = made_with("default")
    calls: list[bool] = []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        draw(params, len(calls))
        return 2.5

    with torch.no_grad():
        assert optimizer.step(closure) == 2.5
    assert calls == [True]
    assert optimizer.step() is None


@inputs
@pytest.mark.parametrize("transposed", ["parameters", "gradients", "both"])
def test_memory_formats_change_no_bit(name: str, transposed: str) -> None:
    params, optimizer = made_with(name)
    twins, other = made_with(name)
    for parameter in twins.values():
        if transposed != "gradients" and parameter.ndim:
            parameter.data = torch.stack([parameter.data, parameter.data], -1)[..., 0]
    for step in range(2):
        for trained in (params, twins):
            draw(trained, step)
        for parameter in twins.values():
            if transposed != "parameters" and parameter.ndim > 1 and parameter.grad is not None:
                parameter.grad = parameter.grad.mT.contiguous().mT
        optimizer.step()
        other.step()
    assert same_bits([p.detach() for p in params.values()], [p.detach() for p in twins.values()])


@pytest.mark.parametrize("average", [None, torch.optim.swa_utils.get_ema_avg_fn(0.9)], ids=["swa", "ema"])
def test_averaged_models(average: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    optimizer = mm.from_model(model, lr=0.1)
    averaged = AveragedModel(model, avg_fn=average)
    schedule = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    params = dict(model.named_parameters())
    trail = []
    for step in range(3):
        step_drawn(params, optimizer, range(step, step + 1))
        averaged.update_parameters(model)
        schedule.step()
        trail.append([p.detach().clone() for p in model.parameters()])
    mean = [torch.stack(values).mean(0) for values in zip(*trail, strict=True)]
    if average is None:
        for expected, actual in zip(mean, averaged.parameters(), strict=True):
            torch.testing.assert_close(actual.detach(), expected)
    assert not same_bits(mean, trail[-1])


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("growth", [2.0**4, 2.0**20])
@inputs
def test_grad_scaler(name: str, growth: float, unscale: bool) -> None:
    """test_grad_scaling_autocast_fused_optimizers and test_fused_does_not_step_if_foundinf."""
    params, optimizer = made_with(name)
    twins, other = made_with(name)
    scaler = torch.amp.GradScaler("cpu", init_scale=growth)
    scaler.scale(torch.ones(()))
    for step in range(2):
        draw(params, step)
        draw(twins, step)
        other.step()
        for parameter in params.values():
            parameter.grad.mul_(scaler.get_scale())  # type: ignore[union-attr]
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert same_bits([p.detach() for p in params.values()], [p.detach() for p in twins.values()])
    assert same_bits(optimizer.state_dict()["state"], other.state_dict()["state"])
    draw(params, 3)
    params["bias"].grad[3] = math.inf  # type: ignore[index]
    before = copy.deepcopy(optimizer.state_dict())
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == growth / 2
    assert same_bits([p.detach() for p in params.values()], [p.detach() for p in twins.values()])
    assert same_bits(optimizer.state_dict(), before)


# ------------------------------------------------------------------ wrong input


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape or (2, 3), dtype=dtype))


def test_a_rate_that_a_framework_moves_to_a_device_is_brought_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate moves the whole state dict to the GPU, and so does ``torch.load(map_location=...)``."""
    with FakeTensorMode():
        assert state._on_host(torch.empty((), device="cuda")).device.type == "cpu"
    saved = (optimizer := mm.Muon([weight()], lr=torch.tensor(0.1))).state_dict()
    saved["param_groups"][0]["lr"] = torch.tensor(-1.0)  # in place of one on a device, it is refused as such
    monkeypatch.setattr(state, "_on_host", lambda lr: torch.tensor(0.25, device="cpu") if lr < 0 else lr)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.25


# As torch's get_error_inputs_for_all_optims and error_inputs of its Muon: what is wrong, its class, its words.
ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a tensor": (lambda: mm.Muon(weight()), TypeError, "should be an iterable of Tensors or dicts"),
    "no parameters": (lambda: mm.Muon([]), ValueError, "empty parameter list"),
    "an empty generator": (lambda: mm.Muon(iter(())), ValueError, "empty parameter list"),
    "in two groups": (
        lambda: mm.Muon([{"params": (w := weight())}, {"params": w}]),
        ValueError,
        "some parameters appear in more than one parameter group",
    ),
    "twice in one group": (lambda: mm.Muon([w := weight(), w]), ValueError, "found a parameter twice"),
    "a set": (lambda: mm.Muon({weight()}), TypeError, "ordered collections"),
    "names for some": (
        lambda: mm.Muon([("weight", weight()), weight()]),
        ValueError,
        "all optimizer params should be with/without names. Some param names are missing",
    ),
    "two rates": (lambda: mm.Muon([weight()], lr=torch.tensor([0.1, 0.2])), ValueError, "tensor of one element"),
    "a rate on a device": (
        lambda: mm.Muon([weight()], lr=torch.zeros((), device="meta")),
        ValueError,
        "one element with it, in CPU memory",
    ),
    "a set in a group": (lambda: mm.Muon([{"params": {weight()}}]), TypeError, "ordered collections"),
    "numbers": (lambda: mm.Muon([1.0]), TypeError, "can only optimize Tensors"),
    "text": (lambda: mm.Muon("weight"), TypeError, "can only optimize Tensors"),
    "one group alone": (lambda: mm.Muon({"params": [weight()]}), TypeError, "can only optimize Tensors"),
    "not a leaf": (lambda: mm.Muon([weight() * 2]), ValueError, "can't optimize a non-leaf Tensor"),
    "a group without params": (lambda: mm.Muon([{"lr": 0.1}]), KeyError, "params"),
    "a list as group": (lambda: mm.Muon([weight()]).add_param_group([weight()]), TypeError, "needed a dict"),
    "negative rate": (lambda: mm.Muon([weight()], lr=-0.5), ValueError, "lr: found -0.5"),
    "a vector": (lambda: mm.Muon([weight(3)]), ValueError, r"found shape \(3,\)"),
    "complex": (lambda: mm.Muon([weight(dtype=torch.complex64)]), TypeError, "complex64"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    """test_errors."""
    call, error, message = ERRORS[case]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    "case", ["no parameters", "in two groups", "a set in a group", "numbers", "text", "not a leaf"]
)
def test_errors_are_those_of_torch(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same call with torch's AdamW gives the same class and words."""
    call, error, message = ERRORS[case]
    monkeypatch.setattr(mm, "Muon", torch.optim.AdamW)
    with pytest.raises(error, match=message):
        call()


# ------------------------------------------------------------------ deviations


DEVIATIONS: dict[str, tuple[str, str]] = {
    "a parameter twice in one group raises; torch warns": ("it would be updated twice", "test_errors"),
    "a set of parameters raises at the top too": (
        "its order differs from rank to rank, and parameters without names are known by their order",
        "test_errors",
    ),
    "a group that is added later says its algorithm": (
        "an embedding is a matrix too, and its module is not known then",
        "test_a_group_that_is_added_later_says_its_algorithm",
    ),
    "groups with and without names go together": ("parameters without names get one, group0.0", "test_names_are_given"),
    "complex parameters raise at construction; torch's Muon raises in step, AdamW takes them": (
        "a mistake is told before anything is built",
        "test_errors",
    ),
    "a matrix of three dims is a stack; torch's Muon takes two dims alone": (
        "experts are stored so",
        "test_groups_have_rates_of_their_own",
    ),
    "no foreach, fused, differentiable, capturable or maximize": (
        "there is one implementation for each device, and no flag is ignored",
        "test_switches_of_torch_and_keys_that_nobody_reads_are_refused",
    ),
    "loaded state is copied; torch shares it with the state dict": (
        "the next step would write into the state dict",
        "test_what_is_loaded_is_not_shared_with_what_it_was_loaded_from",
    ),
    "loaded momentum keeps `state_dtype`; torch casts to the parameter's dtype": (
        "bf16 momentum loses small gradients",
        "test_states_load_across_dtypes_of_parameters",
    ),
    "a matrix with a zero gradient is not decayed": (
        "it is left alone as one without a gradient, such as an expert without tokens",
        "test_matrices_with_zero_gradient_are_left_alone_momentum_and_decay_included",
    ),
    "the betas of AdamW are `adamw_betas`, so schedulers that cycle momentum cycle Muon's alone": (
        "one optimizer hosts both, and momentum is Muon's",
        "test_what_cycles_momentum_cycles_muons",
    ),
}
"""What `Muon` does otherwise, why, and the test that shows it."""


def test_deviations_from_torch_are_shown() -> None:
    written = "".join(path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py"))
    assert [test for _, test in DEVIATIONS.values() if f"def {test}(" not in written] == []


def test_names_are_given() -> None:
    optimizer = mm.Muon([{"params": [weight()]}, {"params": [("mine", weight())]}])
    assert [g["param_names"] for g in optimizer.param_groups] == [["group0.0"], ["mine"]]


@pytest.fixture(autouse=True)
def _no_hooks_left() -> Iterator[None]:
    yield
    assert not _global_optimizer_pre_hooks
    assert not _global_optimizer_post_hooks


def test_an_optimizer_for_each_parameter_that_steps_in_the_backward_pass() -> None:
    """torch keeps them in an attribute of the parameter, by which FSDP1 and DDP know of them."""
    model = nn.Sequential(nn.Linear(6, 10, bias=False), nn.Tanh(), nn.Linear(10, 4, bias=False))
    twin, x = copy.deepcopy(model), torch.randn(3, 6)
    _apply_optimizer_in_backward(mm.Muon, model.parameters(), {"lr": 0.1})
    model(x).square().mean().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    plain = mm.Muon(twin.parameters(), lr=0.1)
    twin(x).square().mean().backward()
    plain.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


def test_tags_by_which_others_choose_their_muon_change_nothing() -> None:
    """DeepSpeed's ``use_muon``; Megatron's ``is_qkv`` and ``expert_tp``, which its own Muon reads."""
    models = [nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4)) for _ in range(3)]
    for model, tag in zip(models[1:], (True, False), strict=True):
        for parameter in model.parameters():
            for name in ("use_muon", "is_qkv", "expert_tp"):
                setattr(parameter, name, tag)
    splits = [[(g["name"], g["param_names"], g.get("matrices")) for g in mm.split_params(model)] for model in models]
    assert splits[1] == splits[0]
    assert splits[2] == splits[0]


# ------------------------------------------------------------------ one tensor as the learning rate of several groups


def by_from_model(model: nn.Module, lr: Tensor) -> torch.optim.Optimizer:
    return mm.from_model(model, lr=lr)


def by_two_calls(model: nn.Module, lr: Tensor) -> torch.optim.Optimizer:
    first, *rest = mm.split_params(model)
    optimizer = mm.Muon([first], lr=lr)
    for group in rest:
        optimizer.add_param_group({**group, "lr": lr})
    return optimizer


def by_deepcopy(model: nn.Module, lr: Tensor) -> torch.optim.Optimizer:
    return copy.deepcopy(mm.from_model(model, lr=lr))


def by_loading(model: nn.Module, lr: Tensor) -> torch.optim.Optimizer:
    optimizer = mm.from_model(model, lr=0.5)
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        group["lr"] = lr
    optimizer.load_state_dict(saved)
    return optimizer


@pytest.mark.parametrize("make", [by_from_model, by_two_calls, by_deepcopy, by_loading])
def test_a_schedule_in_place_counts_once_for_each_group(make: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    rates = []
    for optimizer in (make(model, torch.tensor(1e-3)), torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3))):
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        for _ in range(3):
            plateau.step(1.0)
        for group in optimizer.param_groups:
            group["lr"].mul_(0.1)
        optimizer.step()
        rates.append({round(float(group["lr"]), 9) for group in optimizer.param_groups})
    assert rates == [{2.5e-5}, {2.5e-5}]


def test_a_tensor_that_groups_have_copies_of_says_so_when_it_is_written() -> None:
    model, lr = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), torch.tensor(1e-3)
    optimizer = mm.from_model(model, lr=lr)
    optimizer.step()
    lr.fill_(1e-2)
    with pytest.raises(ValueError, match=r"lr: found a change in place of a tensor.* group\[\"lr\"\]\.fill_"):
        optimizer.step()
    optimizer.step()  # said once

    weight, lr = nn.Parameter(torch.ones(3, 3)), torch.tensor(0.0)
    single = mm.Muon([weight], lr=lr)  # one group has the tensor itself, as in torch
    lr.fill_(0.1)
    weight.grad = torch.ones(3, 3)
    single.step()
    assert bool((weight < 1).all())
