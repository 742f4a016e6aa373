"""Whatever is set, moved, replaced or loaded between two steps: a step that raises has changed nothing."""

from __future__ import annotations

import contextlib
import copy
import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import muonmesh as mm
from muonmesh.numerics.rules import RULES
from muonmesh.settings import GROUP_SETTINGS
from muonmesh.settings.reading import StepSettings, read_groups

COVERS = (
    "settings.reading.read_groups",
    "step.parameters.Snapshot",
    "checkpoint.state.widen_state",
)

NUMBERS: list[Any] = [
    *(0, 1, -1, 0.5, 1 - 2**-53, 1e-320, 1e-30, 1e8, 1e9, 1.1e9, 1e20, 1e38, 3.5e38, 1e308),
    *(math.inf, -math.inf, math.nan),
    *(10**400, Fraction(1, 3), Fraction(10**400), np.float32(0.1), np.float64(1e-3), np.int64(1), np.float16(0.1)),
    *(np.longdouble("1e400"), np.array(0.1), np.bool_(True), True, None, "0.1", 1j, [], {}, 2**64, 10**5000),
]
TENSORS: list[Callable[[], Any]] = [
    *(
        lambda value=value, dtype=dtype: torch.tensor(value, dtype=dtype)
        for value in (0.0, 0.1, -1.0, 1e38, 1e300, math.nan)
        for dtype in (torch.float32, torch.float64)
    ),
    lambda: torch.tensor([[0.1]], dtype=torch.bfloat16),
    lambda: torch.tensor([0.1, 0.2]),
    lambda: torch.tensor(1),
    lambda: torch.tensor(True),
    lambda: torch.tensor(0.1j),
    lambda: torch.tensor(0.1, device="meta"),
    lambda: torch.tensor(0.1, requires_grad=True),
    lambda: torch.tensor([0.1]).to_sparse(),
]
POLYNOMIALS: list[Callable[[], Any]] = [
    lambda value=value, count=count: ((value, 1.0, value),) * count
    for value in (1.0, 1e9, 1.1e9, 1e39, 1e308, 10**400)
    for count in (1, 3, 101)
]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float8_e4m3fn]
DTYPES += [torch.complex64, torch.int8, torch.int64, torch.bool]


def inference(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


def with_storage_of_zero(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def overlapping(tensor: Tensor) -> Tensor:
    return torch.zeros(64, dtype=tensor.dtype).as_strided(tensor.shape, [1] * tensor.ndim)


VARIANTS: dict[str, Callable[[Tensor], Any]] = {
    **{f"to {dtype}": (lambda tensor, dtype=dtype: tensor.to(dtype)) for dtype in DTYPES},
    "meta": lambda tensor: tensor.to("meta"),
    "larger": lambda tensor: torch.randn(*(size + 1 for size in tensor.shape)).to(tensor.dtype),
    "one dim more": lambda tensor: tensor[None].clone(),
    "flat": lambda tensor: tensor.reshape(-1).clone(),
    "empty": lambda tensor: tensor.new_empty((0,) * tensor.ndim),
    "one number": lambda tensor: tensor.new_ones(()),
    "transposed": lambda tensor: tensor.mT.clone().mT if tensor.ndim > 1 else tensor.clone(),
    "every other": lambda tensor: torch.stack([tensor, tensor], -1)[..., 0],
    "expanded": lambda tensor: tensor.reshape(-1)[0].clone().expand(tensor.shape),
    "overlapping": overlapping,
    "sparse": lambda tensor: tensor.to_sparse(),
    "inference": inference,
    "freed": with_storage_of_zero,
    "requires grad": lambda tensor: tensor.clone().requires_grad_(),
    "NaN": lambda tensor: torch.full(tensor.shape, math.nan).to(tensor.dtype),
    "infinite": lambda tensor: torch.full(tensor.shape, math.inf).to(tensor.dtype),
    "zero": torch.zeros_like,
    "huge": lambda tensor: torch.full(tensor.shape, 3e38).to(tensor.dtype),
    "none": lambda tensor: None,
    "number": lambda tensor: 3,
    "text": lambda tensor: "x",
    "numpy": lambda tensor: tensor.float().numpy(),
}


def shapes(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator)
        for name, shape in {"a": (6, 4), "b": (3, 8), "c": (2, 3, 4), "v": (5,), "e": (4, 3)}.items()
    }


class Training:
    """Some matrices and vectors, and the optimizer that trains them."""

    def __init__(self, rule: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
        self.options = options
        self.weights = {name: nn.Parameter(value.to(dtype)) for name, value in shapes(0).items()}
        names = ("a", "b", "c"), ("v", "e")
        groups = [
            {
                "params": [(name, self.weights[name]) for name in members],
                "algorithm": algorithm,
                "name": algorithm,
            }
            for members, algorithm in zip(names, (rule, "adamw"), strict=True)
        ]
        self.optimizer = mm.Muon(groups, **{"lr": 0.01, **options})
        self.steps = 0
        self.keys: list[str] = []  # of what was set

    def gradients(self) -> None:
        self.steps += 1
        for name, value in shapes(self.steps).items():
            self.weights[name].grad = value.to(self.weights[name].dtype)

    def step(self) -> None:
        self.gradients()
        self.optimizer.step()


def bits(value: Any) -> Any:
    """What a value is, to be compared: tensors by their bits."""
    if isinstance(value, Tensor):
        tensor = value.detach()
        properties = (tensor.dtype, tuple(tensor.shape), tensor.device.type, tensor.layout)
        if tensor.is_meta or tensor.layout is not torch.strided or tensor.untyped_storage().nbytes() < tensor.nbytes:
            return properties
        return *properties, tensor.clone().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(entry) for key, entry in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value).__name__, [bits(entry) for entry in value]
    return type(value).__name__, "" if isinstance(value, int) else str(value)[:99]


def all_of(training: Training) -> Any:
    """All that a step may write, by bits."""
    optimizer = training.optimizer
    weights = {name: bits(weight) for name, weight in training.weights.items()}
    state = {name: bits(optimizer.state.get(weight, {})) for name, weight in training.weights.items()}
    groups = [{key: bits(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return weights, state, groups


Undo = Callable[[], object]


def set_a_setting(draw: Any, training: Training) -> Undo:
    group = draw(st.sampled_from(training.optimizer.param_groups))
    kinds = [kind for name, kind in RULES.items() if name is group.get("algorithm")]  # it may be set to anything before
    keys = [key for kind in kinds for key in kind.settings()]
    keys += [*GROUP_SETTINGS, "lr", "lr", "weight_decay", "algorithm", "matrices"]
    keys += ["param_names", "name", "params", "steps_taken", "unknown"]
    key = draw(st.sampled_from(keys))
    before, had = group.get(key), key in group
    training.keys += [key] * (had and key != "params")
    values = [*map(lambda value: lambda: value, NUMBERS), *TENSORS, *POLYNOMIALS]
    value = draw(st.sampled_from(values))()
    if draw(st.booleans()) and isinstance(before, (tuple, list)):
        value = [value] * len(before)
    if draw(st.integers(0, 9)) == 0 and had:
        del group[key]
    else:
        group[key] = value
    return lambda: group.update({key: before}) if had else group.pop(key, None)


def replace_a_weight(draw: Any, training: Training) -> Undo:
    weight = training.weights[draw(st.sampled_from(sorted(training.weights)))]
    values, gradient = weight.data, weight.grad

    def undo() -> None:
        weight.grad = None
        weight.data = values
        weight.grad = gradient

    value = draw(st.sampled_from(sorted(VARIANTS)))
    weight.grad = None
    try:
        weight.data = VARIANTS[value](values)
        weight.grad = torch.ones_like(weight) if weight.is_floating_point() else None
    except (RuntimeError, TypeError):  # torch's own: such data it does not take
        undo()
    return undo


def move_all(draw: Any, training: Training) -> Undo:
    model, values = nn.ParameterDict(training.weights), {name: weight.data for name, weight in training.weights.items()}
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.float16, "meta"]))
    model.to(dtype)
    state = {weight: dict(training.optimizer.state[weight]) for weight in training.weights.values()}

    def undo() -> None:
        for name, weight in training.weights.items():
            weight.grad = None
            weight.data = values[name]
            training.optimizer.state[weight] = state[weight]

    return undo


def replace_a_gradient(draw: Any, training: Training) -> Undo:
    weight = training.weights[draw(st.sampled_from(sorted(training.weights)))]
    with contextlib.suppress(RuntimeError, TypeError):  # torch's own: such a gradient it does not take
        weight.grad = VARIANTS[draw(st.sampled_from(sorted(VARIANTS)))](weight.data)
    return lambda: None


def replace_state(draw: Any, training: Training) -> Undo:
    weight = training.weights[draw(st.sampled_from(sorted(training.weights)))]
    state = training.optimizer.state
    before = dict(state[weight])
    key = draw(
        st.sampled_from([*sorted(before), "master", "step", "momentum_buffer", "exp_avg", "unknown", "all", "of all"])
    )
    value = VARIANTS[draw(st.sampled_from(sorted(VARIANTS)))](before.get(key, torch.zeros(weight.shape)))
    if key == "all":
        state[weight] = value
    elif key == "of all":
        training.optimizer.state = {}
    elif draw(st.integers(0, 9)):
        state[weight][key] = value
    else:
        state[weight].pop(key, None)

    def undo() -> None:
        training.optimizer.state = state
        state[weight] = before

    return undo


def load_spoilt_state(draw: Any, training: Training) -> Undo:
    good = copy.deepcopy(training.optimizer.state_dict())
    bad = copy.deepcopy(good)
    group = draw(st.sampled_from(bad["param_groups"]))
    if draw(st.booleans()) or not bad["state"]:
        key = draw(st.sampled_from(sorted(group)))
        group[key] = draw(st.sampled_from([*map(lambda v: lambda: v, NUMBERS), *TENSORS]))()
    else:
        number = draw(st.sampled_from(sorted(bad["state"])))
        key = draw(st.sampled_from(sorted(bad["state"][number])))
        bad["state"][number][key] = VARIANTS[draw(st.sampled_from(sorted(VARIANTS)))](bad["state"][number][key])
    before = all_of(training)
    try:
        training.optimizer.load_state_dict(bad)
    except (mm.StateError, ValueError, TypeError) as error:
        refused = error
    else:
        return lambda: training.optimizer.load_state_dict(good)
    assert all_of(training) == before
    assert names(refused, key), (key, refused)
    return lambda: None


def names(error: Exception, key: str) -> bool:
    """Whether a message names what is wrong: the field, or what has to fit with it."""
    fits = ("param_names", "momentum_buffer", "exp_avg", "matrices", "4300 digits")  # of a number Python will not print
    return any(name in str(error) for name in (key.removeprefix("adamw_"), *fits))


ACTIONS = [
    set_a_setting,
    set_a_setting,
    replace_a_weight,
    replace_a_gradient,
    replace_state,
    move_all,
    load_spoilt_state,
]


@st.composite
def trainings(draw: Any) -> Callable[[], Training]:
    rule = draw(
        st.sampled_from([*(name for name in RULES if name != "adamw" and not name.startswith("test")), "muon", "muon"])
    )
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    options: dict[str, Any] = {
        "state_dtype": draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64, "int8"]))
    }
    options["compute_dtype"] = draw(st.sampled_from([torch.bfloat16, torch.float32]))
    if dtype != torch.float64 and draw(st.booleans()):
        options["master_dtype"] = torch.float32
    elif draw(st.integers(0, 3)) == 0:
        options["stochastic_rounding"] = 1
    if draw(st.booleans()):
        options["decay_mode"] = "cautious"
    if draw(st.integers(0, 3)) == 0:
        options["lr"] = torch.tensor(0.01, dtype=torch.float64)
    return lambda: Training(rule, dtype, copy.deepcopy(options))


def check_step(data: st.DataObject) -> None:
    make, steps_before = data.draw(trainings()), data.draw(st.integers(0, 2))
    training, twin = make(), make()
    for trained in (training, twin):
        for _ in range(steps_before):
            trained.step()
        trained.gradients()
    several = data.draw(st.integers(0, 3))
    actions = [set_a_setting] * several or [data.draw(st.sampled_from(ACTIONS), label="action")]
    undone = [action(data.draw, training) for action in actions]
    undone.reverse()
    before = all_of(training)
    raised = None
    try:
        training.optimizer.step()
    except Exception as error:  # any, by the property
        raised = error
    after = all_of(training)
    for undo in undone:
        undo()
    if raised is not None:
        assert after == before, str(raised)
        assert several != 1 or all(names(raised, key) for key in training.keys), (training.keys, raised)
        for trained in (training, twin):
            trained.step()
        assert all_of(training) == all_of(twin)
        return
    with contextlib.suppress(mm.StateError):  # of a step with weights of another shape
        training.step()
        return
    training.optimizer.state.clear()  # as the error says
    training.step()


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_step_that_raises_has_changed_nothing(data: st.DataObject) -> None:
    check_step(data)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
@settings(max_examples=4000, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_step_that_raises_has_changed_nothing_in_many_cases(data: st.DataObject) -> None:
    check_step(data)


# ------------------------------------------------------------------ rules that raise

BEFORE_A_WRITE = ("check", "keeps")
IN_A_STEP = ("fold", "direction", "balance", "whole", "summands", "keep", "apply", "unsuited")


class Spoiled(Exception):
    """What a method of a rule raises."""


def spoiled(kind: type[Any], methods: Sequence[str], spoils: list[str]) -> type[Any]:
    """A rule whose methods raise while ``spoils`` has their name."""

    def of(method: str) -> Callable[..., Any]:
        def call(self: Any, *arguments: Any, **named: Any) -> Any:
            if method in spoils and (
                method != "summands" or arguments[0].numel()
            ):  # a plan asks it how many sums there are
                raise Spoiled(method)
            return getattr(super(rule, self), method)(*arguments, **named)

        call.__code__ = call.__code__.replace(co_name=method)
        return call

    rule = dataclass(frozen=True)(type("Fragile", (kind,), {method: of(method) for method in methods}))
    return rule


@dataclass(frozen=True)
class Summing(mm.MuonRule):
    """A rule that uses every part."""

    def keeps(self) -> Any:
        return {**mm.MuonRule.keeps(self), "count": "matrix"}

    def summands(self, weights: Tensor, update: Tensor, size: Any, state: Any) -> tuple[Tensor, ...]:
        return (update.double().square(),)

    def apply(self, weights: Tensor, update: Tensor, size: Any, state: Any, sums: Any = ()) -> None:
        super().apply(weights, update, size, state)

    def keep(self, state: Any, sums: tuple[Tensor, ...]) -> None:
        state["count"].add_(sums[0])


@dataclass(frozen=True)
class Signs(mm.ElementwiseRule):
    """A rule for single elements."""

    def keeps(self) -> tuple[str, ...]:
        return ("mean",)

    def update(self, gradient: Tensor, state: Any, count: Tensor) -> Tensor:
        return state["mean"].lerp_(gradient, 0.5).sign()


@pytest.mark.parametrize("method", [*BEFORE_A_WRITE, *IN_A_STEP, "update"])
def test_a_rule_that_raises_is_named_and_no_step_follows_until_state_is_loaded(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is written, a step that raises has changed nothing. Later, only a checkpoint helps."""
    spoils: list[str] = []
    kind, methods = (
        (Signs, ("update", *BEFORE_A_WRITE)) if method == "update" else (Summing, BEFORE_A_WRITE + IN_A_STEP)
    )
    monkeypatch.setitem(RULES, "fragile", spoiled(kind, methods, spoils))
    training, twin = (Training("fragile" if method != "update" else "muon", torch.float32, {}) for _ in range(2))
    for trained in (training, twin):
        if method == "update":
            trained.optimizer.param_groups[1]["algorithm"] = "fragile"
        trained.step()
    for trained in (training, twin):
        for group in trained.optimizer.param_groups:
            group["lr"] = 0.02  # a rule is checked again when a setting of its group has changed
    saved, weights = copy.deepcopy(training.optimizer.state_dict()), copy.deepcopy(training.weights)
    training.gradients()
    before = all_of(training)
    spoils.append(method)
    with pytest.raises(Spoiled) as error:
        training.optimizer.step()
    report = "".join(traceback.format_exception(error.value))
    spoils.clear()
    if method in BEFORE_A_WRITE:
        assert all_of(training) == before
    else:
        assert "muonmesh: This error was raised after the step had begun to write" in report
        assert f"in {method}\n" in report
        for call in (training.optimizer.step, training.optimizer.state_dict):
            with pytest.raises(mm.StateError, match=r"interrupted while it wrote.*load_state_dict"):
                call()
        for name, weight in weights.items():
            training.weights[name].data.copy_(weight)
        training.optimizer.load_state_dict(saved)
    for trained in (training, twin):
        trained.steps = 1
        trained.step()
    assert all_of(training) == all_of(twin)


def test_a_freed_tensor_in_place_of_a_state_is_not_read() -> None:
    """Python would end: torch reads the memory to print a tensor."""
    training = Training("muon", torch.float32, {})
    training.step()
    weight = training.weights["a"]
    before, state = all_of(training), training.optimizer.state[weight]
    training.gradients()
    training.optimizer.state[weight] = with_storage_of_zero(torch.ones(3000))  # type: ignore[assignment]
    with pytest.raises(mm.StateError, match="a: found a Tensor as its state; needed a dict"):
        training.optimizer.step()
    training.optimizer.state[weight] = state
    assert all_of(training) == before


# ------------------------------------------------------------------ what is set is seen at once


def fill_rate(draw: Any, groups: list[dict[str, Any]]) -> None:
    """Set the learning rate of all groups, in place if it is a tensor, and so that torch's version does not tell."""
    value = draw(st.sampled_from([0.0, -0.0, 0.02, 0.5, -1.0, math.nan]))
    how = draw(st.sampled_from(["fill_", "numpy", "data", "number"]))
    for group in groups:
        rate = group["lr"]
        if not isinstance(rate, Tensor) or how == "number":
            group["lr"] = value
        elif how == "fill_":
            rate.fill_(value)
        elif how == "numpy":
            rate.numpy()[...] = value
        else:
            rate.data = torch.full_like(rate, value)


def change_a_list(draw: Any, groups: list[dict[str, Any]]) -> None:
    """Change an entry of a list, or of a list in a list, in place."""
    group = draw(st.sampled_from(groups))
    lists = [value for key, value in group.items() if isinstance(value, list) and value and key != "params"]
    changed = draw(st.sampled_from(lists))
    if isinstance(changed[0], list) and changed[0] and draw(st.booleans()):
        changed = changed[0]
    value = draw(
        st.sampled_from([0.5, 0.25, True, 1, -1.0, math.nan, "whole", None, "new", ["rows", 3, 3], np.float32(0.5)])
    )
    changed[draw(st.integers(0, len(changed) - 1))] = value


def set_a_number(draw: Any, groups: list[dict[str, Any]]) -> None:
    group = draw(st.sampled_from(groups))
    keys = ["weight_decay", "momentum", "extra_scale_factor", "ns_steps", "nesterov", "adamw_eps", "steps_taken"]
    keys += ["stochastic_rounding"]
    values: list[Any] = [0, 0.0, -0.0, 1, 1.0, True, False, 2, 0.5, np.float64(0.5), Fraction(1, 2), None, math.nan]
    group[draw(st.sampled_from(keys))] = draw(st.sampled_from(values))


def set_a_key(draw: Any, groups: list[dict[str, Any]]) -> None:
    """Add a key, that of a framework, of another rule, of torch, or of nobody; or remove one."""
    group = draw(st.sampled_from(groups))
    if draw(st.booleans()):
        group.pop(draw(st.sampled_from(sorted(group))))
        return
    key = draw(
        st.sampled_from(["initial_lr", "default_config", "fused", "maximize", "betas", "unknown", "normuon_beta2"])
    )
    group[key] = draw(st.sampled_from([None, False, True, 0.5, {}, [1.0]]))


def set_algorithm(draw: Any, groups: list[dict[str, Any]]) -> None:
    draw(st.sampled_from(groups))["algorithm"] = draw(st.sampled_from(["muon", "adamw", "normuon", "no such", 3]))


def move_groups(draw: Any, groups: list[dict[str, Any]]) -> None:
    how = draw(st.sampled_from(["reverse", "copy", "drop", "parameters", "key order"]))
    if how == "reverse":
        groups.reverse()
    elif how == "copy":
        groups[:] = [dict(group) for group in groups]
    elif how == "drop":
        groups.pop()
    elif how == "parameters":
        groups[0]["params"].reverse()
    else:
        groups[0]["lr"] = groups[0].pop("lr")


CHANGES = [fill_rate, fill_rate, change_a_list, change_a_list, set_a_number, set_a_key, set_algorithm, move_groups]
LISTS: dict[str, Callable[[], Any]] = {
    "adamw_betas": lambda: [0.9, 0.95],
    "ns_coefficients": lambda: [[3.4445, -4.775, 2.0315], [3.0, -4.0, 2.0]],
    "norm_means": lambda: [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]],
}


def anew(training: Training) -> Training:
    """The same weights, gradients, state and groups in an optimizer that has not stepped."""
    twin = copy.copy(training)
    twin.weights = {name: nn.Parameter(weight.detach().clone()) for name, weight in training.weights.items()}
    twin_weights = {id(weight): twin.weights[name] for name, weight in training.weights.items()}
    for name, weight in training.weights.items():
        twin.weights[name].grad = weight.grad
    twin.optimizer = mm.Muon([{"params": list(twin.weights.values()), "algorithm": "adamw"}], **training.options)
    twin.optimizer.param_groups = [
        {
            key: [twin_weights[id(weight_of_group)] for weight_of_group in value]
            if key == "params"
            else copy.deepcopy(value)
            for key, value in group.items()
        }
        for group in training.optimizer.param_groups
    ]
    for name, weight in training.weights.items():
        twin.optimizer.state[twin.weights[name]] = copy.deepcopy(training.optimizer.state[weight])
    return twin


def outcome_of_step(training: Training) -> Any:
    try:
        training.optimizer.step()
    except Exception:  # a first step may say of the same mistake what its plan lacks
        return "raised"
    return all_of(training)


def comparable(reading: StepSettings) -> Any:
    rules = [
        rule and (type(rule), [bits(getattr(rule, field.name)) for field in fields(rule)]) for rule in reading.rules
    ]
    return str(reading.error), reading.at_rest, reading.counting, rules, reading.terms


def check_reading(data: st.DataObject) -> None:
    rule, tensor = data.draw(st.sampled_from(["muon", "muon", "normuon", "soap"])), data.draw(st.booleans())
    dtype, master = data.draw(st.sampled_from([torch.float32, torch.float32, torch.float16])), data.draw(st.booleans())
    options = {
        "lr": torch.tensor(0.01) if tensor else 0.01,
        "master_dtype": torch.float32 if master else None,
        "adamw_eps": 1e-4,
    }
    training = Training(rule, dtype, options)
    for group in training.optimizer.param_groups:
        for key in data.draw(st.sets(st.sampled_from(sorted(LISTS)))):
            group[key] = LISTS[key]()
    for _ in range(3):
        training.step()
    training.gradients()
    groups, before = training.optimizer.param_groups, training.optimizer._runtime.last.settings
    for change in data.draw(st.lists(st.sampled_from(CHANGES), min_size=1, max_size=2), label="changes"):
        with contextlib.suppress(KeyError, TypeError):  # of a key that a change before it has removed or set
            change(data.draw, groups)
    assert comparable(read_groups(groups, {}, before)) == comparable(read_groups(groups, {}))
    fresh = anew(training)
    assert outcome_of_step(training) == outcome_of_step(fresh)


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_steady_step_sees_what_is_set_as_a_first_step_does(data: st.DataObject) -> None:
    """Whatever has been set, by whatever means: the same bits, or the same error."""
    check_reading(data)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
@settings(max_examples=10000, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_steady_step_sees_what_is_set_as_a_first_step_does_in_many_cases(data: st.DataObject) -> None:
    check_reading(data)
