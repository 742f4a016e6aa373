"""Steps in which nothing has moved use again what the last step has looked at, and whatever has moved is looked at."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import muonmesh as mm
from muonmesh.comm import views
from muonmesh.numerics.rules import RULES
from muonmesh.settings import reading
from muonmesh.settings.checks import check_group
from muonmesh.step import parameters, replicas
from tests.support.on_ranks import on_ranks
from tests.support.tensors import random_step, weights_and_state

COVERS = (
    "step.parameters.ReadyParameters",
    "step.parameters.steady",
    "step.parameters.Snapshot",
    "comm.storage.any_is_freed",
    "settings.reading.GroupRead",
    "comm.views.Elements",
    "step.replicas.said_of_settings",
)


def weights_and_optimizer() -> tuple[list[nn.Parameter], mm.Muon]:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(*shape)) for shape in ((6, 9), (9, 6), (6, 6), (5,))]
    groups = [
        {"params": weights[:3], "matrices": [None, None, ("rows", 2, 4)], "name": "muon"},
        {"params": weights[3:], "algorithm": "adamw", "name": "adamw"},
    ]
    return weights, mm.Muon(groups, lr=0.1)


def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the parameters whose state a step checks."""
    names: list[str] = []
    check = parameters.check_parameter

    def counted(entry: Any) -> None:
        names.append(entry.member.name)
        check(entry)

    monkeypatch.setattr(parameters, "check_parameter", counted)
    return names


def test_a_steady_step_looks_at_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    names, (_, optimizer) = looked_at(monkeypatch), weights_and_optimizer()
    random_step(optimizer, 0)
    assert len(names) == 4
    for number in range(1, 4):
        random_step(optimizer, number)
    assert len(names) == 4


def test_a_steady_step_makes_no_view_of_memory_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[object] = []
    in_buffer = views.in_buffer
    monkeypatch.setattr(views, "in_buffer", lambda buffer, row: rows.append(row) or in_buffer(buffer, row))
    optimizer = mm.Muon([nn.Parameter(torch.randn(6, 9))], lr=0.1)  # one batch, which is always on this thread
    random_step(optimizer, 0)
    first = len(rows)
    assert first > 0
    random_step(optimizer, 1)
    assert len(rows) == first


@on_ranks(2)
def test_a_steady_step_tells_settings_only_if_they_have_changed() -> None:
    rules: list[object] = []
    text_of_rule = replicas._text_of_rule
    _, optimizer = weights_and_optimizer()
    optimizer.process_group = "world"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "_text_of_rule", lambda rule: rules.append(rule) or text_of_rule(rule))
        random_step(optimizer, 0)
        random_step(optimizer, 1)
        before = len(rules)
        random_step(optimizer, 2)
        assert len(rules) == before > 0
        optimizer.param_groups[0]["lr"] = 0.1 + 0.1 * dist.get_rank()
        with pytest.raises(mm.PlanError, match="lr"):
            random_step(optimizer, 3)
        assert len(rules) > before


def test_a_steady_step_reads_only_groups_that_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer = weights_and_optimizer()
    for number in range(3):
        random_step(optimizer, number)
    read, names = [], looked_at(monkeypatch)

    def checked(label: str, group: Any, **options: Any) -> Any:
        read.append(label)
        return check_group(label, group, **options)

    monkeypatch.setattr(reading, "check_group", checked)
    for rate in (None, 0.05, 0.02):
        if rate is not None:
            optimizer.param_groups[1]["lr"] = rate  # as schedules do
        random_step(optimizer, 3)
    assert read == ["group 'adamw'"] * 2
    assert names == []


def momentum_of(weights: list[nn.Parameter], optimizer: mm.Muon) -> Any:
    return optimizer.state[weights[0]]


def clone_weight(weights: list[nn.Parameter], optimizer: mm.Muon) -> None:
    weights[0].data = weights[0].data.clone()


def clone_momentum(weights: list[nn.Parameter], optimizer: mm.Muon) -> None:
    state = momentum_of(weights, optimizer)
    state["momentum_buffer"] = state["momentum_buffer"].clone()


def move_momentum(weights: list[nn.Parameter], optimizer: mm.Muon) -> None:
    momentum = momentum_of(weights, optimizer)["momentum_buffer"]
    momentum.data = momentum.data.clone()


def load_itself(weights: list[nn.Parameter], optimizer: mm.Muon) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def spread_weight(weights: list[nn.Parameter], optimizer: mm.Muon) -> None:
    weights[0].data = torch.empty(9, 6).t().copy_(weights[0].data)


def widen(weights: list[nn.Parameter], optimizer: mm.Muon) -> None:
    state = momentum_of(weights, optimizer)
    state["momentum_buffer"] = state["momentum_buffer"].double()


def transpose_in_place(weights: list[nn.Parameter], optimizer: mm.Muon) -> None:
    """A square matrix keeps its address, dtype and shape; it is written back transposed, so its values stay."""
    square = weights[2]
    values = square.data.clone()
    square.data = square.data.t()
    square.data.copy_(values)


def clone_vector(weights: list[nn.Parameter], optimizer: mm.Muon) -> None:
    weights[3].data = weights[3].data.clone()


def clone_moment(weights: list[nn.Parameter], optimizer: mm.Muon) -> None:
    state = optimizer.state[weights[3]]
    state["exp_avg"] = state["exp_avg"].clone()


def move_moment(weights: list[nn.Parameter], optimizer: mm.Muon) -> None:
    moment = optimizer.state[weights[3]]["exp_avg_sq"]
    moment.data = moment.data.clone()


def set_another_source(weights: list[nn.Parameter], optimizer: mm.Muon) -> None:
    """Another source of gradients, which counts what it is asked for."""

    class Source(mm.GradientSource):
        def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
            return parameter.grad

    optimizer.gradients = Source()


def train_alone(weights: list[nn.Parameter], optimizer: mm.Muon) -> None:
    optimizer.process_group = "local"


CHANGES = [transpose_in_place, clone_weight, clone_momentum, move_momentum, load_itself, spread_weight, widen]
CHANGES += [clone_vector, clone_moment, move_moment, set_another_source, train_alone]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_has_moved_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[list[nn.Parameter], mm.Muon], None]
) -> None:
    """And the step computes on it: with the bits of an optimizer in which nothing moved."""
    (weights, optimizer), (_, other) = weights_and_optimizer(), weights_and_optimizer()
    for number in range(2):
        random_step(optimizer, number)
        random_step(other, number)
    names = looked_at(monkeypatch)
    change(weights, optimizer)
    before = [weight.detach().clone() for weight in weights]
    for number in range(2, 5):
        random_step(optimizer, number)
    assert names
    names.clear()
    for number in range(2, 5):
        random_step(other, number)
    assert names == []
    assert all(map(torch.equal, weights_and_state(optimizer), weights_and_state(other)))
    assert not any(map(torch.equal, weights, before))


@pytest.mark.parametrize("kind", ["missing", "transposed", "another dtype", "freed"])
def test_a_gradient_of_another_form_is_looked_at(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, optimizer = weights_and_optimizer()
    for number in range(2):
        random_step(optimizer, number)
    names = looked_at(monkeypatch)
    momentum = momentum_of(weights, optimizer)["momentum_buffer"]
    before = momentum.clone()
    for weight in weights[1:]:
        weight.grad = torch.zeros_like(weight)
    gradient = torch.randn(6, 9)
    if kind == "missing":
        weights[0].grad = None
    elif kind == "transposed":
        weights[0].grad = torch.empty(9, 6).t().copy_(gradient)
    elif kind == "another dtype":
        weights[0] = weights[0]
        weights[0].grad = None
        weights[0].data = weights[0].data.bfloat16()
        weights[0].grad = gradient.bfloat16()
    else:
        weights[0].grad = gradient
        weights[0].grad.untyped_storage().resize_(0)
    if kind == "freed":
        with pytest.raises(TypeError, match="a gradient whose memory was freed"):
            optimizer.step()
        assert torch.equal(momentum, before)
    else:
        optimizer.step()
        assert torch.equal(momentum, before) == (kind == "missing")
    assert len(names) == (4 if kind == "another dtype" else 0)  # which needs another plan; else no state has moved


def snapshot_of_two() -> tuple[list[nn.Parameter], dict[torch.Tensor, dict[str, Any]], parameters.Snapshot]:
    weights = [nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 6))]
    state: dict[torch.Tensor, dict[str, Any]] = {
        weight: {"momentum_buffer": torch.ones_like(weight)} for weight in weights
    }
    return weights, state, parameters.Snapshot(weights, [*state.values()], state)


STATE_CHANGES: dict[str, Callable[[list[nn.Parameter], dict[torch.Tensor, dict[str, Any]]], object]] = {
    "another key": lambda weights, state: state[weights[1]].update(other=torch.ones(1)),
    "a key by another name": lambda w, state: state[w[0]].update(other=state[w[0]].pop("momentum_buffer")),
    "no key": lambda weights, state: state[weights[0]].clear(),
    "another entry": lambda weights, state: state.update({weights[0]: {**state[weights[0]]}}),
    "an entry of another parameter": lambda w, state: state.update({nn.Parameter(torch.ones(2)): state.pop(w[1])}),
    "an entry more": lambda weights, state: state.update({nn.Parameter(torch.ones(2)): {}}),
    "entries in another order": lambda w, state: state.update({w[0]: state[w[1]], w[1]: state[w[0]]}),
    "another momentum": lambda w, state: state[w[0]].update(momentum_buffer=state[w[0]]["momentum_buffer"].clone()),
    "momentum of fewer rows": lambda w, state: setattr(m := state[w[1]]["momentum_buffer"], "data", m.data[:3]),
    "momentum of another dtype": lambda w, s: setattr(m := s[w[1]]["momentum_buffer"], "data", m.view(torch.int32)),
    "a weight of another shape": lambda weights, state: setattr(weights[1], "data", weights[1].data.view(6, 4)),
    "a weight of fewer rows": lambda weights, state: setattr(weights[1], "data", weights[1].data[:3]),
    "a transposed weight": lambda weights, state: setattr(weights[0], "data", weights[0].data.t()),
    "a weight elsewhere": lambda weights, state: setattr(weights[0], "data", weights[0].data.clone()),
}


@pytest.mark.parametrize("change", STATE_CHANGES)
def test_a_snapshot_sees_what_has_changed_of_weights_and_state(change: str) -> None:
    weights, state, snapshot = snapshot_of_two()
    assert snapshot.is_current(state)
    STATE_CHANGES[change](weights, state)
    assert not snapshot.is_current(state)


def test_a_snapshot_sees_which_gradients_have_moved_and_which_were_freed() -> None:
    """Gradients may lie in one flat buffer, of which a part is freed."""
    weights, _, snapshot = snapshot_of_two()
    versions = []
    for _ in range(2):
        flat = torch.randn(16 + 24)
        weights[0].grad, weights[1].grad = flat[:16].view(4, 4), flat[16:].view(4, 6)
        for _ in range(2):
            gradients = snapshot.gradients()
            assert gradients is not None
            assert [gradient.data_ptr() for gradient in gradients] == snapshot.version
            versions.append(snapshot.version)
    first, second, third, fourth = versions
    assert first is second is not third is fourth
    for freed in (1, 24, 40):
        flat = torch.randn(16 + 24)
        weights[0].grad, weights[1].grad = flat[:16].view(4, 4), flat[16:].view(4, 6)
        flat.untyped_storage().resize_(4 * (40 - freed))
        assert snapshot.gradients() is None
    empty = nn.Parameter(torch.empty(0, 4))
    empty.grad = torch.ones(8, 4)[8:]
    empty.grad.untyped_storage().resize_(0)
    assert parameters.Snapshot([empty], [], {}).gradients() is not None


def test_a_first_gradient_after_steps_without_one_creates_state(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, optimizer = weights_and_optimizer()
    for _ in range(3):
        for weight in weights[1:3]:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
    names = looked_at(monkeypatch)
    assert "momentum_buffer" not in optimizer.state[weights[0]]
    random_step(optimizer, 3)
    assert names == []
    assert optimizer.state[weights[0]]["momentum_buffer"].any()
    assert optimizer.state[weights[3]]["exp_avg"].any()


def test_a_step_keeps_no_gradient() -> None:
    """After zero_grad the gradients are freed, also after a step that changed nothing."""
    weights, optimizer = weights_and_optimizer()
    for skipped in (False, False, True):
        for weight in weights:
            weight.grad = torch.full_like(weight, torch.nan) if skipped else torch.randn_like(weight)
        if skipped:
            optimizer.clip_grad_norm_(1.0, skip_above=1e9)
        gradients = [weakref.ref(weight.grad) for weight in weights]
        optimizer.step()
        assert optimizer.skipped == skipped
        optimizer.zero_grad()
        assert [gradient() for gradient in gradients] == [None] * 4


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_step_keeps_no_gradient_and_no_copy_of_a_weight_that_it_cannot_use_again(number: int) -> None:
    weights, optimizer = weights_and_optimizer()
    weights[number].data = weights[number].data.t().contiguous().t()  # stepped by a contiguous copy
    for seed in range(2):
        random_step(optimizer, seed)
        gradients = [weakref.ref(weight.grad) for weight in weights]
        optimizer.zero_grad()
        assert [gradient() for gradient in gradients] == [None] * 4
        assert optimizer._runtime.planned.collected is None  # whose parameters have the copy


def test_loading_frees_the_state_before() -> None:
    weights, optimizer = weights_and_optimizer()
    for number in range(2):
        random_step(optimizer, number)
    saved = {"state": {}, **optimizer.state_dict()}
    saved["state"] = {number: {k: v.clone() for k, v in entries.items()} for number, entries in saved["state"].items()}
    before = [weakref.ref(next(iter(optimizer.state[weight].values()))) for weight in weights]
    optimizer.load_state_dict(saved)
    assert [momentum() for momentum in before] == [None] * 4


def test_another_rule_by_the_same_name_is_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, optimizer = weights_and_optimizer()
    for number in range(3):
        random_step(optimizer, number)

    @dataclass(frozen=True, slots=True)
    class Still(mm.MuonRule):
        def scale(self, rows: int, cols: int) -> float:
            return 0.0

    monkeypatch.setitem(RULES, "muon", Still)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    random_step(optimizer, 3)
    before = weights[0].detach().clone()
    monkeypatch.undo()
    random_step(optimizer, 4)
    assert not torch.equal(weights[0], before)
    monkeypatch.setitem(RULES, "muon", Still)
    before = weights[0].detach().clone()
    random_step(optimizer, 5)
    assert torch.equal(weights[0], before)


def test_rounding_that_does_not_fit_a_parameter_is_refused_between_steps() -> None:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(6, 9)), nn.Parameter(torch.randn(5).bfloat16())]
    groups = [{"params": [weight], "algorithm": rule} for weight, rule in zip(weights, ("muon", "adamw"), strict=True)]
    optimizer = mm.Muon(groups, lr=0.1, master_dtype=torch.float32)
    for number in range(3):
        random_step(optimizer, number)
    before = [weight.detach().clone() for weight in weights]
    optimizer.param_groups[1]["stochastic_rounding"] = 1
    with pytest.raises(ValueError, match="stochastic_rounding with masters; needed weights in bf16 without masters"):
        random_step(optimizer, 3)
    assert all(map(torch.equal, weights, before))


@pytest.mark.parametrize(
    ("key", "before", "after"),
    [
        ("weight_decay", 0.0, -0.0),
        ("nesterov", True, 1),
        ("ns_steps", 1, True),
        ("ns_steps", 1, 1.0),
        ("adamw_betas", [0.0, 0.5], [False, 0.5]),
    ],
)
def test_values_that_are_equal_and_not_the_same_are_read_again(key: str, before: Any, after: Any) -> None:
    _, optimizer = weights_and_optimizer()
    groups = optimizer.param_groups
    groups[0][key] = before
    last = reading.read_groups(groups, {})
    assert last.error is None
    assert reading.read_groups(groups, {}, last) is last
    groups[0][key] = after
    again, anew = reading.read_groups(groups, {}, last), reading.read_groups(groups, {})
    assert (str(again.error), repr(again.rules)) == (str(anew.error), repr(anew.rules))
    assert (str(again.error), repr(again.rules)) != (str(last.error), repr(last.rules))


def test_an_entry_that_moves_to_another_list_is_seen() -> None:
    _, optimizer = weights_and_optimizer()
    group = optimizer.param_groups[0]
    group["reasons"] = ["of the first", "of the second", "of the third"]
    last = reading.read_groups(optimizer.param_groups, {})
    keys = [key for key in group if key in ("param_names", "reasons")]
    group[keys[0]].append(group[keys[1]].pop(0))
    again = reading.read_groups(optimizer.param_groups, {}, last)
    assert "found 4 param_names for 3 parameters" in str(again.error)


def test_gradients_of_another_source_are_read_there_in_every_step() -> None:
    """Also if the parameters have gradients of their own."""
    (weights, optimizer), (others, other) = weights_and_optimizer(), weights_and_optimizer()

    class Source(mm.GradientSource):
        def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
            return 2 * parameter.grad if parameter.grad is not None else None

    optimizer.gradients = Source()
    for number in range(4):
        random_step(optimizer, number)
        random_step(other, number, 2.0)
    assert all(map(torch.equal, weights, others))


def test_gradients_are_freed_after_another_plan_was_looked_at() -> None:
    """`explain` of other settings makes a plan, which no step follows once they are set back."""
    weights, optimizer = weights_and_optimizer()
    for number in range(3):
        random_step(optimizer, number)
    optimizer.param_groups[0]["ns_steps"] = 3
    optimizer.explain()
    optimizer.param_groups[0]["ns_steps"] = None
    for number in range(3):
        random_step(optimizer, number)
        gradients = [weakref.ref(weight.grad) for weight in weights]
        optimizer.zero_grad()
        assert [gradient() for gradient in gradients] == [None] * 4


def test_metrics_bear_the_name_that_a_group_has_now() -> None:
    _, optimizer = weights_and_optimizer()
    random_step(optimizer, 0)
    optimizer.metrics()
    optimizer.param_groups[0]["name"] = "renamed"
    random_step(optimizer, 1)
    assert {key.partition("/")[0] for key in optimizer.metrics()} == {"renamed", "adamw"}


@on_ranks(2)
def test_a_missing_gradient_is_missing_in_its_own_step_only() -> None:
    """Whether a step goes on with the step in which rank 1's shard had no gradient, and what is warned of."""
    model = fully_shard(nn.Linear(6, 8, bias=False))
    optimizer = mm.from_model(model, lr=0.01, overrides={"weight": "muon"})
    stale = False
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(104):
            model(torch.ones(2, 6)).square().sum().backward()
            if number == 2 and dist.get_rank() == 1:
                model.weight.grad = None
            optimizer.step()
            last = optimizer._runtime.planned.collected
            stale = stale or (last is not None and bool(last.missing))
            optimizer.zero_grad()
    assert not stale
    assert [str(warning.message) for warning in caught if "no gradient" in str(warning.message)] == []
