"""Rules: what NorMuon and cautious decay compute, against fp64 references; who may become a rule."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import muonmesh as mm
from muonmesh.numerics.coefficients import coefficient_schedule
from muonmesh.numerics.rules import RULES, MuonRule, Rule, parts, register_rule
from muonmesh.numerics.rules.dynmuon import power_at
from muonmesh.numerics.rules.normuon import NorMuonRule
from muonmesh.numerics.scale import StepSize
from muonmesh.step import muon_step
from muonmesh.step.parameters import ReadyParameters
from muonmesh.step.runtime import Driver
from muonmesh.testing import prove_rule
from tests.support import reference
from tests.support.problem import PARAMETERS
from tests.support.tensors import give_random, random_fp64, random_step, weights_and_state

COVERS = (
    "numerics.rules.adamuon.AdaMuonRule",
    "numerics.rules.adamw.AdamWRule",
    "numerics.rules.dynmuon.power_at",
    "numerics.rules.elementwise.ElementwiseRule",
    "numerics.rules.even.frobenius",
    "numerics.rules.hyperball.HyperballRule",
    "numerics.rules.muon.MuonRule",
    "numerics.rules.muon_plus.MuonPlusRule",
    "numerics.rules.muoneq.MuonEqRule",
    "numerics.rules.normuon.NorMuonRule",
    "numerics.rules.parts.change_whole",
    "numerics.rules.registry.register_rule",
    "numerics.rules.rule.Rule",
    "numerics.rules.scion.ScionRule",
    "numerics.rules.scion_row_norm.ScionRowNormRule",
    "numerics.rules.scion_sign.ScionSignRule",
    "numerics.rules.soap.SoapRule",
    "step.muon_step.Profiled",
)

FP32: dict[str, Any] = {"compute_dtype": torch.float32}
COEFFICIENTS = [tuple(step) for step in coefficient_schedule("polar_express", 5)]


def random_weights(
    rule: str, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, **settings: Any
) -> tuple[list[nn.Parameter], mm.Muon]:
    """Random weights, and an optimizer that steps them by a rule."""
    weights = [nn.Parameter(random_fp64(*shape, seed=n).to(dtype)) for n, shape in enumerate(shapes)]
    return weights, mm.Muon([{"params": weights, "algorithm": rule}], **settings)


MATRICES = [name for name, (_, spec) in PARAMETERS.items() if spec != "adamw"]
NORMUON, ADAMUON = ({f"{rule}_beta2": 0.8, f"{rule}_eps": 1e-6} for rule in ("normuon", "adamuon"))
MOMENTS = {"beta2": 0.8, "eps": 1e-6}
CAUTIOUS = {"decay_mode": "cautious", "weight_decay": 5.0}
# Settings of a group; options of the oracle beside those that have the same names.
RULED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *(
        (
            {"algorithm": "normuon", "normuon_side": side, **NORMUON},
            {"normuon": {"longer": side == "longer", **MOMENTS}},
        )
        for side in ("rows", "longer")
    ),
    *(({"algorithm": "adamuon", "nesterov": nesterov, **ADAMUON}, {"adamuon": MOMENTS}) for nesterov in (True, False)),
    ({"algorithm": "hyperball", "extra_scale_factor": 2.0}, {"hyperball": True}),
    *(({"algorithm": "muoneq", "muoneq_sides": sides}, {"muoneq": sides}) for sides in ("rows", "cols", "both")),
    *(({"algorithm": "muon_plus", "muon_plus_sides": sides}, {"muon_plus": sides}) for sides in ("row", "col_row")),
    *(({"algorithm": "dynmuon", "dynmuon_power": power}, {"dynmuon": power}) for power in (0.25, -0.25, 0.0)),
    *(
        ({"algorithm": f"scion_{rule}", "scion_layer": layer, "scale_mode": "unit_rms_norm"}, {"scion": (kind, layer)})
        for rule, kind in (("sign", "sign"), ("row_norm", "rows"))
        for layer in ("head", "embedding")
    ),
    (CAUTIOUS, {"cautious": True}),
    ({"algorithm": "adamw", **CAUTIOUS}, {"cautious": True}),
]


@pytest.mark.parametrize(("settings", "options"), RULED, ids=lambda value: "-".join(map(str, value.values())))
def test_rules_agree_with_the_oracle(settings: dict[str, Any], options: dict[str, Any]) -> None:
    """In fp64, with gradients that are zero in turns: such a matrix keeps all that its rule keeps."""
    adamw = settings.get("algorithm") == "adamw"
    names = [name for name in PARAMETERS if (name not in MATRICES) == adamw]
    same_names = {key: settings[key] for key in ("nesterov", "extra_scale_factor", "weight_decay") if key in settings}
    options = {"lr": 0.02, "weight_decay": 0.1, **same_names, **options, "algorithm": "adamw"}
    hyperparameters = {name: options for name in names}
    group = {"param_names": names, **settings}
    if not adamw:
        group["matrices"] = [PARAMETERS[name][1] for name in names]
        muon = {"algorithm": "muon", "coefficients": COEFFICIENTS, "momentum": 0.9}
        hyperparameters = {name: {**options, **muon, "matrices": PARAMETERS[name][1]} for name in names}
    values = {name: random_fp64(*PARAMETERS[name][0], seed=n) for n, name in enumerate(names)}
    tensors = {name: nn.Parameter(value.clone()) for name, value in values.items()}
    fp64 = {"compute_dtype": torch.float64, "state_dtype": torch.float64}
    optimizer = mm.Muon([{"params": list(tensors.values()), **group}], lr=0.02, momentum=0.9, **fp64)
    state: dict[str, Any] = {}
    for step in range(5):
        grads = {name: random_fp64(*PARAMETERS[name][0], seed=100 * step + n) for n, name in enumerate(names)}
        for n, (name, tensor) in enumerate(tensors.items()):
            grads[name] *= adamw or (n + step) % 4 != 3
            tensor.grad = grads[name].clone()
        optimizer.step()
        values, state = reference.reference_step(values, grads, state, hyperparameters)
    for name, tensor in tensors.items():
        assert float((tensor - values[name]).abs().max()) < 1e-8, name


def test_cautious_decay_decays_what_the_step_moves_towards_zero() -> None:
    """The convention: the step is −lr·u, so u and p of one sign move p towards zero, as the decay does."""
    rule = MuonRule(1.0, 0.5, "cautious", "none", 1.0, "polar_express", 5, "auto", 0.9, True)
    weights = torch.tensor([2.0, 2.0, -2.0, -2.0, 2.0, 0.0, 1e-30, 1e-30])
    update = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0, 1.0, 1e-30, -1e-30])
    expected = torch.where(update * weights.sign() >= 0, weights * 0.5, weights)
    rule.decay(weights, update)
    assert torch.equal(weights, expected)
    assert weights[-2] < weights[-1]  # their products with the update both vanish in fp32


@pytest.mark.parametrize("mode", ["full", "cautious"])
def test_no_decay_is_no_decay(mode: str) -> None:
    rule = MuonRule(1.0, 0.0, mode, "none", 1.0, "polar_express", 5, "auto", 0.9, True)  # type: ignore[arg-type]
    weights = random_fp64(5).float()
    before = weights.clone()
    rule.decay(weights, before)
    assert torch.equal(weights, before)


MATRIX_RULES = [name for name in RULES if RULES[name].__module__.startswith("muonmesh.") and name != "adamw"]


@pytest.mark.parametrize("rule", MATRIX_RULES)
def test_no_rule_depends_on_the_scale_of_gradients_unless_it_says_so(rule: str) -> None:
    results, same = [], RULES[rule].scale_invariant
    for scale in (1.0, 2.0**-60, 2.0**60):
        (weight,), optimizer = random_weights(rule, (12, 20), lr=0.1)
        for seed in range(3):
            random_step(optimizer, seed, scale)
        results.append(weight.detach())
    assert torch.equal(results[0], results[1]) == same
    assert torch.equal(results[0], results[2]) == same
    assert same or rule == "dynmuon"
    assert all(bool(result.isfinite().all()) for result in results)


@pytest.mark.parametrize("power", [0.25, -0.25])
def test_a_step_of_dynmuon_is_as_large_as_a_power_of_the_gradients_scale(power: float) -> None:
    steps = []
    for scale in (1.0, 2.0**-40, 2.0**40):
        (weight,), optimizer = random_weights("dynmuon", (12, 20), lr=0.1, weight_decay=0.0, **FP32)
        optimizer.param_groups[0]["dynmuon_power"] = power
        weight.data.zero_()
        random_step(optimizer, 1, scale)
        steps.append(weight.detach() * scale**-power)
    torch.testing.assert_close(steps[1], steps[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(steps[2], steps[0], rtol=1e-5, atol=0)


def test_the_power_of_dynmuon_falls_as_its_authors_set_it() -> None:
    assert power_at(0.04) == pytest.approx(0.0)
    assert power_at(1.0) == pytest.approx(-0.25, abs=1e-9)
    assert power_at(0.0) == pytest.approx(-0.25 + 0.5 / (1 + math.exp(-1)))


def test_an_update_of_zeros_stays_one_under_normuon() -> None:
    rule = NorMuonRule(1.0, 0.0, "full", "none", 1.0, "polar_express", 5, "auto", 0.9, True)
    update = torch.zeros(10, 16)
    parts.change_whole(rule.whole, update, {"row_second_moment": torch.zeros(1, 10, 1)}, rows=10, cols=16)
    assert not update.any()


def hyperball(weight: nn.Parameter, lr: float = 0.1, **settings: Any) -> mm.Muon:
    group = {"params": [weight], "param_names": ["w"], "matrices": ["whole"], "algorithm": "hyperball", **settings}
    return mm.Muon([group], lr=lr, weight_decay=0.3)


def test_weights_without_a_norm_take_a_plain_step_and_then_keep_its_norm() -> None:
    """A peer multiplies them by their norm, zero, for ever."""
    weight, plain = nn.Parameter(torch.zeros(8, 12)), nn.Parameter(torch.zeros(8, 12))
    optimizer, muon = hyperball(weight), mm.Muon([plain], lr=0.1)
    for of in (optimizer, muon):
        give_random(of, 1)
    with pytest.warns(UserWarning, match='^w: found weights that are all zero.*write overrides={"w": "normuon"}'):
        optimizer.step()
    muon.step()
    assert torch.equal(weight, plain)
    norm = float(weight.detach().norm())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        for seed in range(3):
            random_step(optimizer, seed)
    assert not torch.equal(weight, plain)
    assert float(weight.detach().norm()) == pytest.approx(norm, rel=1e-6)
    assert float(optimizer.state[weight]["initial_norm"]) == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_hyperball_does_not_drift(dtype: torch.dtype) -> None:
    """Each step of 0.03 lengthens the weights by less than bf16 can say; all of them together would by a tenth."""
    weight = nn.Parameter(random_fp64(12, 20).to(dtype))
    before = float(weight.detach().float().norm())
    optimizer = hyperball(weight, lr=0.03, ns_steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rounding
        for seed in range(200):
            random_step(optimizer, seed)
    bound = 1e-6 if dtype == torch.float32 else 2e-3
    assert float(weight.detach().float().norm()) == pytest.approx(before, rel=bound)
    assert not torch.equal(weight, random_fp64(12, 20).to(dtype))


@pytest.mark.parametrize("rule", ["scion_sign", "scion_row_norm"])
def test_scions_steps_have_the_rms_of_the_others(rule: str) -> None:
    """One learning rate serves them all; rows without a gradient stay, and explain() tells the same."""
    weight = nn.Parameter(torch.zeros(24, 40))
    optimizer = mm.Muon([{"params": [weight], "param_names": ["w"], "algorithm": rule}], lr=0.5, weight_decay=0.0)
    weight.grad = random_fp64(24, 40, seed=1).float()
    weight.grad[5] = 0
    optimizer.step()
    assert not weight[5].any()
    rest = weight.detach()[torch.arange(24) != 5]
    assert float(rest.square().mean().sqrt()) == pytest.approx(0.2 * 0.5, rel=1e-2)  # bf16
    assert optimizer.explain().rows[0].rms == pytest.approx(0.1)
    with pytest.raises(
        ValueError, match=r"scale_mode: found 'spectral'; needed one of .* for a step that is not orthogonal"
    ):
        mm.Muon([{"params": [weight], "algorithm": rule}], scale_mode="spectral")


def test_explain_and_metrics_tell_the_rms_of_adamuon_s_step() -> None:
    """Peers take a convolution's size from its kernel."""
    weight = nn.Parameter(torch.zeros(24, 8, 5, 1))
    group = {"params": [weight], "param_names": ["weight"], "matrices": ["flatten"], "algorithm": "adamuon"}
    optimizer = mm.Muon([{**group, "name": "muon"}], lr=0.5, weight_decay=0.0)
    weight.grad = random_fp64(24, 8, 5, 1, seed=1).float()
    optimizer.metrics()
    for _ in range(2):
        before = weight.detach().clone()
        optimizer.step()
        assert float((before - weight.detach()).square().mean().sqrt()) == pytest.approx(0.1, rel=1e-6)
        assert optimizer.metrics()["muon/update_rms"] == pytest.approx(0.1, rel=1e-6)
        assert optimizer.explain().rows[0].rms == pytest.approx(0.1, rel=1e-6)


@pytest.mark.parametrize("rule", MATRIX_RULES)
def test_explain_tells_the_spectral_norm_of_a_step_or_leaves_it_out(rule: str) -> None:
    """Rows of the gradient differ in size. NorMuon, AdaMuon and Muon+ made steps of 1.2 to 2.7 times what was told."""
    weight = nn.Parameter(0.02 * random_fp64(96, 48, seed=1).float())
    optimizer = mm.Muon([{"params": [weight], "algorithm": rule}], lr=0.01, weight_decay=0.0, **FP32)
    (row,) = optimizer.explain().rows
    for seed in range(3):
        before = weight.detach().double().clone()
        weight.grad = (random_fp64(96, 48, seed=2 + seed) * torch.logspace(-3, 0, 96)[:, None]).float()
        optimizer.step()
        largest = float(torch.linalg.matrix_norm(before - weight.detach().double(), 2))
        assert math.isnan(row.spectral) or largest == pytest.approx(row.spectral, rel=0.15), (rule, seed)


@pytest.mark.parametrize("mode", ["original", "spectral", "unit_rms_norm", "none"])
def test_adamuon_scales_as_muon_does(mode: Any) -> None:
    """Its update has the Frobenius norm of an orthogonal matrix before it is scaled, so no mode is ignored."""
    settings = {"lr": 0.5, "weight_decay": 0.0, "scale_mode": mode, "extra_scale_factor": 3.0}
    (weight,), optimizer = random_weights("adamuon", (24, 40), **settings)
    before = weight.detach().clone()
    random_step(optimizer, 1)
    expected = 0.5 * 3.0 * reference.SCALES[mode](24, 40) * 24**0.5
    assert float((weight.detach() - before).norm()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_adamuon_does_not_hide_a_gradient_that_is_not_finite(bad: float) -> None:
    """The sign of an infinity, and torch's sign of a NaN, are finite."""
    (weight,), optimizer = random_weights("adamuon", (6, 8), lr=0.1)
    give_random(optimizer, 1)
    weight.grad[2, 3] = bad
    optimizer.step()
    assert bool(weight.isnan().all())


def test_sums_are_taken_over_masters_where_there_are_any() -> None:
    """A parameter in bf16 with a master is stepped as the master would be."""

    @dataclass(frozen=True)
    class Grows(MuonRule):
        def summands(self, weights: Tensor, update: Tensor, size: Any, state: Any) -> tuple[Tensor, ...]:
            return (weights.double().square(),)

        def apply(self, weights: Tensor, update: Tensor, size: Any, state: Any, sums: Any = ()) -> None:
            weights.sub_(update.mul_(size * sums[0].sqrt()))

    start = random_fp64(8, 12).bfloat16()
    weights = [nn.Parameter(start.clone()), nn.Parameter(start.float())]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RULES, "grows", Grows)
        optimizer = mm.Muon([{"params": weights, "algorithm": "grows"}], lr=0.01, master_dtype=torch.float32)
        for step in range(3):
            for weight in weights:
                weight.grad = random_fp64(8, 12, seed=step + 1).to(weight.dtype).bfloat16().to(weight.dtype)
            optimizer.step()
    assert torch.equal(optimizer.state[weights[0]]["master"], weights[1])
    assert not torch.equal(weights[0].float(), weights[1])


@pytest.mark.parametrize("threads", [1, 3])
def test_sums_have_the_same_bits_in_parts_and_on_threads(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    results, before = [], torch.get_num_threads()
    for cached, count in ((100, threads), (1 << 19, 1)):
        monkeypatch.setattr(parts, "_CACHED", cached)
        torch.set_num_threads(count)
        try:
            _, optimizer = random_weights("adamuon", *[(40, 60)] * 5, lr=0.1)
            for seed in range(2):
                random_step(optimizer, seed)
        finally:
            torch.set_num_threads(before)
        results.append(weights_and_state(optimizer))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    ("key", "value", "needed"),
    [
        ("normuon_beta2", 1.0, "a number in"),
        ("normuon_eps", -1.0, "at least 0"),
        ("normuon_side", "cols", "longer"),
        ("adamuon_beta2", 1.0, "a number in"),
        ("adamuon_eps", -1.0, "at least 0"),
        ("muoneq_sides", "row", "cols"),
        ("muon_plus_sides", "rows", "col_row"),
        ("scion_layer", "tied", "embedding"),
        ("dynmuon_power", "0.25", "from -1 to 1"),
        ("soap_beta2", 1.0, "a number in"),
        ("soap_every", 0, "at least 1"),
    ],
)
def test_settings_of_a_rule_are_checked(key: str, value: Any, needed: str) -> None:
    weight = nn.Parameter(torch.zeros(4, 4))
    algorithm = next(name for name in RULES if key in RULES[name].settings())
    with pytest.raises(ValueError, match=f"{key}: found .*; needed .*{needed}"):
        mm.Muon([{"params": [weight], "algorithm": algorithm, key: value}])
    with pytest.raises(ValueError, match="which this group does not read"):  # and are refused where nobody reads them
        mm.Muon([{"params": [weight], "algorithm": "muon", key: value}])
    with pytest.raises(ValueError, match="'full', 'cautious'"):
        mm.Muon([{"params": [weight], "decay_mode": "half"}])


# ------------------------------------------------------------------ rules of one's own


@pytest.mark.parametrize("kind", ["weight", "row", "Momentum", None, 1, "rows×", "rows×0", "rows×row", "rows×rows×1"])
def test_a_kind_of_state_that_does_not_exist_is_refused_before_anything_is_kept(kind: Any) -> None:
    """Where the rule is registered; if `keeps` depends on a setting without a default, where a group names the rule."""

    @dataclass(frozen=True)
    class KeepsSomething(MuonRule):
        by: Any = kind

        def keeps(self) -> Any:
            return {**MuonRule.keeps(self), "something": self.by}

    @dataclass(frozen=True, kw_only=True)
    class KeepsWhatItIsTold(MuonRule):
        by: Any

        def keeps(self) -> Any:
            return {**MuonRule.keeps(self), "something": self.by}

    message = r"KeepsSomething\.keeps: found 'something' kept as .*; needed .*two sizes"
    with pytest.raises(ValueError, match=message):
        register_rule("keeps-something")(KeepsSomething)
    assert "keeps-something" not in RULES
    register_rule("keeps-what-it-is-told")(KeepsWhatItIsTold)
    weight = nn.Parameter(torch.ones(6, 8))
    with pytest.raises(ValueError, match=r"group .*KeepsWhatItIsTold\.keeps: found 'something' kept as"):
        mm.Muon([{"params": [weight], "algorithm": "keeps-what-it-is-told", "by": kind}])
    optimizer = mm.Muon([{"params": [weight], "algorithm": "keeps-what-it-is-told", "by": "rows"}])
    random_step(optimizer, 1)
    before = weights_and_state(optimizer)
    assert optimizer.state[weight]["something"].shape == (6, 1)
    optimizer.param_groups[0]["by"] = kind
    with pytest.raises(ValueError, match=r"KeepsWhatItIsTold\.keeps"):
        optimizer.step()
    assert all(map(torch.equal, before, weights_and_state(optimizer)))
    del RULES["keeps-what-it-is-told"]


def nothing(self: Any, weights: Tensor, update: Tensor, size: Any, state: Any) -> None: ...


@pytest.mark.parametrize(
    ("base", "parts_of_its_own", "message"),
    [
        (MuonRule, {"summands": nothing}, "found summands of Own without apply;"),
        (RULES["hyperball"], {"apply_with": nothing}, r"found Own\.apply_with; .* Rename it to apply"),
        (MuonRule, {"apply": nothing}, r"found Own\.apply\(self.* Write def apply\(.*, sums=\(\)\)"),
        (
            mm.ElementwiseRule,
            {},
            r"^register_rule\('own'\): found Own without an update of its own; needed one, .* Write def update",
        ),
        (MuonRule, {"wole": nothing}, r"found Own.wole; needed a part that a step calls, such as 'whole'"),
    ],
)
def test_a_class_that_is_no_rule_is_refused(base: type, parts_of_its_own: dict[str, Any], message: str) -> None:
    rule = rule_with(base, **parts_of_its_own)
    with pytest.raises(TypeError, match=message):
        register_rule("own")(rule)
    with pytest.raises(TypeError, match="needed a dataclass"):
        register_rule("bare")(type("Bare", (base,), parts_of_its_own))
    assert not {"own", "bare"} & RULES.keys()


def test_a_rule_says_its_name_once() -> None:
    with pytest.raises(ValueError, match="a rule of muonmesh"):
        register_rule("muon")(MuonRule)
    with pytest.raises(ValueError, match=r"algorithm='unheard of'; needed \"muon\" or .*\"normuon\""):
        mm.Muon([{"params": [nn.Parameter(torch.zeros(2, 2))], "algorithm": "unheard of"}])


def test_overrides_give_rules_to_the_other_half() -> None:
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 9))
    overrides = {"0.weight": {"algorithm": "scion_row_norm", "scion_layer": "embedding"}, "2.weight": "scion_sign"}
    optimizer = mm.from_model(model, rule="hyperball", overrides=overrides)
    algorithms = {n: g["algorithm"] for g in optimizer.param_groups for n in g["param_names"] if n.endswith("weight")}
    assert algorithms == {"1.weight": "hyperball", "0.weight": "scion_row_norm", "2.weight": "scion_sign"}
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.arange(9)).sum().backward()
    optimizer.step()
    assert not any(map(torch.equal, before, model.parameters()))
    with pytest.raises(ValueError, match=r"overrides\['2.weight'\]: found the algorithm 'scion'; needed .*scion_sign"):
        mm.split_params(model, overrides={"2.weight": "scion"})


def test_a_rule_without_parts_orthogonalizes_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Plain(Rule):
        pass

    monkeypatch.setitem(RULES, "plain", Plain)
    weight = nn.Parameter(random_fp64(6, 9).float())
    start, gradient = weight.detach().clone(), random_fp64(6, 9, seed=1).float()
    optimizer = mm.Muon([{"params": [weight], "algorithm": "plain"}], lr=0.5, scale_mode="none", weight_decay=0.0)
    weight.grad = gradient.clone()
    optimizer.step()
    update = mm.orthogonalize(gradient.bfloat16(), dtype=torch.bfloat16).float()
    assert torch.equal(weight, start - update * 0.5)
    assert optimizer.state[weight] == {}


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("count", [1, 3])
def test_whole_matrices_are_changed_on_one_thread(
    monkeypatch: pytest.MonkeyPatch, compute: torch.dtype, count: int
) -> None:
    """Sums round otherwise on another number of threads, and a matrix may be alone or one of many."""
    thread_counts: list[int] = []

    @dataclass(frozen=True)
    class Counts(MuonRule):
        def whole(self, update: Tensor, state: Any) -> Tensor:
            thread_counts.append(torch.get_num_threads())
            return update

    monkeypatch.setitem(RULES, "counts", Counts)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        _, optimizer = random_weights("counts", *[(40, 60)] * count, compute_dtype=compute)
        random_step(optimizer, 1)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert thread_counts == [1] * count


def test_a_group_may_change_its_rule_and_keeps_its_momentum() -> None:
    (weight,), optimizer = random_weights("muon", (6, 8), lr=0.1)
    random_step(optimizer, 1)
    momentum = optimizer.state[weight]["momentum_buffer"]
    optimizer.param_groups[0]["algorithm"] = "normuon"
    optimizer.step()
    assert optimizer.state[weight]["momentum_buffer"] is momentum
    assert bool(optimizer.state[weight]["row_second_moment"].all())


def rule_with(base: type[mm.Rule], **parts_of_its_own: Any) -> type[Any]:
    """Return a rule that has these parts of its own."""
    return dataclass(frozen=True)(type("Own", (base,), parts_of_its_own))


KEEPS = {"momentum_buffer": "momentum", "total": "momentum", "before": "weights", "pace": "rows", "norm": "matrix"}
KeepsAllKinds = rule_with(MuonRule, keeps=lambda self: KEEPS)


def fold_and_total(self: Any, gradient: Tensor, state: Any) -> None:
    MuonRule.fold(self, gradient, state)
    state["total"].add_(gradient)


def whole_paced(self: Any, update: Tensor, state: Any) -> Tensor:
    state["pace"].add_(1)
    return update / state["pace"]


def decay_by_sign(self: Any, weights: Tensor, update: Tensor) -> None:
    weights.sub_(weights.sign() * (self.lr * self.weight_decay))


def apply_and_remember(self: Any, weights: Tensor, update: Tensor, size: Any, state: Any, sums: Any = ()) -> None:
    state["before"].copy_(weights)
    MuonRule.apply(self, weights, update, size, state)


def ones_of(self: Any, weights: Tensor, update: Tensor, size: Any, state: Any) -> tuple[Tensor, ...]:
    return (torch.ones_like(update),)


def squares_of(self: Any, weights: Tensor, update: Tensor, size: Any, state: Any) -> tuple[Tensor, ...]:
    return (weights.double().square() * 99,)


def apply_sums(self: Any, weights: Tensor, update: Tensor, size: Any, state: Any, sums: Any = ()) -> None:
    MuonRule.apply(self, weights, update, size / (sums[0] + state["norm"]).sqrt(), state)


def apply_twice(self: Any, weights: Tensor, update: Tensor, size: Any, state: Any, sums: Any = ()) -> None:
    MuonRule.apply(self, weights, update, size * 2, state)


def keep_sums(self: Any, state: Any, sums: Any) -> None:
    state["norm"].add_(sums[0])


Sums = rule_with(KeepsAllKinds, summands=ones_of, apply=apply_sums)
OWN_PARTS: dict[str, type[Any]] = {
    "fold": rule_with(KeepsAllKinds, fold=fold_and_total),
    "direction": rule_with(KeepsAllKinds, direction=lambda self, gradient, state: gradient.sign()),
    "balance": rule_with(KeepsAllKinds, balance=lambda self, direction, state: direction.tril()),
    "whole": rule_with(KeepsAllKinds, whole=whole_paced),
    "decay": rule_with(KeepsAllKinds, decay=decay_by_sign),
    "apply": rule_with(KeepsAllKinds, apply=apply_and_remember),
    "scale": rule_with(KeepsAllKinds, scale=lambda self, rows, cols: 3.0 / rows),
    "summands": rule_with(Sums, summands=squares_of),
    "apply, of sums": rule_with(Sums, apply=apply_twice),
    "keep": rule_with(Sums, keep=keep_sums),
}
"""A rule for each part that may be overridden and changes numbers, which overrides it and no other."""


def test_every_part_that_changes_numbers_is_overridden_by_a_rule_here() -> None:
    public = {name for kind in Rule.__mro__ for name, part in vars(kind).items() if callable(part) and name[0] != "_"}
    others = {
        "keeps",
        "check",
        "unsuited",
        "count_of_sums",
        "step_size",
        "flops",
        "is_due",
    }  # what they say is read, or only told
    assert public - others == {part.partition(",")[0] for part in OWN_PARTS}


@pytest.mark.parametrize("part", OWN_PARTS)
def test_explain_leaves_out_the_size_of_a_step_that_a_part_of_ones_own_may_change(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, explanations = OWN_PARTS[part], []
    says_so = rule_with(base, step_size=lambda self, rows, cols: StepSize(0.5, 2.0))
    for rule in (base, says_so, rule_with(base, orthogonalizes=False)):
        monkeypatch.setitem(RULES, "own", rule)
        explanations.append(
            mm.Muon([{"params": [nn.Parameter(torch.ones(6, 8))], "algorithm": "own"}], lr=0.1).explain()
        )
    sizes = [explanation.rows[0].rms for explanation in explanations]
    unknown = part in ("whole", "scale", "apply", "summands", "apply, of sums", "keep")  # the last three have sums
    assert sizes == pytest.approx([math.nan if unknown else 0.02, 0.5, math.nan], nan_ok=True)
    assert ("2.0e-02" in str(explanations[0])) == (not unknown)


def shrunk(self: mm.Rule, matrix: Tensor, state: Any) -> Tensor:
    return matrix.mean(dim=1, keepdim=True)  # torch would broadcast it


def not_a_summand(self: mm.Rule, weights: Tensor, update: Tensor, size: Any, state: Any) -> tuple[Tensor, ...]:
    return (update.norm(),)


def assigning(self: mm.Rule, update: Tensor, state: Any) -> Tensor:
    state["momentum_buffer"] = update  # would be lost
    return update


def one_number(self: mm.Rule, gradient: Tensor, state: Any) -> Tensor:
    return gradient.new_ones(())  # torch would broadcast it


def assigning_in_keep(self: mm.Rule, state: Any, sums: Any) -> None:
    for key in state:
        state[key] = state[key] + 1  # would be lost


def every_other_step(self: mm.Rule, update: Tensor, state: Any) -> Tensor:
    return update if self.is_due(2) else -update  # without turns, no step is counted


@pytest.mark.parametrize(
    ("part", "function", "error", "message"),
    [
        ("direction", one_number, ValueError, r"one_number: found a result of shape \(\); needed .* arguments, \("),
        ("keep", assigning_in_keep, TypeError, "does not support item assignment"),
        ("whole", every_other_step, TypeError, r"Own\.is_due: found takes_turns = False; needed True"),
        ("whole", shrunk, ValueError, r"shrunk: found a result of shape \(1, 1, 8\); needed .* \(1, 6, 8\)"),
        ("balance", shrunk, ValueError, r"shrunk: found a result of shape \(1, 1, 8\); needed .* \(1, 6, 8\)"),
        ("whole", assigning, TypeError, "does not support item assignment"),
        ("summands", not_a_summand, TypeError, r"Own\.summands: found .*; needed a tuple of tensors of the shape"),
    ],
)
def test_a_part_that_returns_or_assigns_what_it_may_not_is_named(
    part: str, function: Any, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = OWN_PARTS["keep"] if part == "keep" else mm.MuonRule
    monkeypatch.setitem(RULES, "own", rule_with(base, **{part: function}))
    weight = nn.Parameter(torch.ones(6, 8))
    weight.grad = torch.ones(6, 8)
    with pytest.raises(error, match=message):
        mm.Muon([{"params": [weight], "algorithm": "own"}]).step()


@pytest.mark.parametrize("part", OWN_PARTS)
def test_a_rule_is_proved_by_the_operations_of_a_device_in_every_part(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that ran the rule without the part, as it ran those with a `decay` of their own, is found."""
    derived = OWN_PARTS[part]
    monkeypatch.setitem(RULES, "own", derived)
    prove_rule("own", examples=5)
    begun = ReadyParameters.begin

    def ignoring(self: Any, communicator: Any, rules: Any, flags: Any, *others: Any) -> None:
        if isinstance(flags.nonzero, torch.Tensor):  # only a device knows it
            plain = derived.__mro__[1]
            settings = [rule and {f.name: getattr(rule, f.name) for f in fields(rule)} for rule in rules]
            rules = [rule and plain(**rule) for rule in settings]
        begun(self, communicator, rules, flags, *others)

    monkeypatch.setattr(ReadyParameters, "begin", ignoring)
    with pytest.raises(AssertionError, match="differ between the operations of a device and those of a CPU"):
        prove_rule("own", examples=5)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("rule", MATRIX_RULES)
def test_a_step_that_clipping_stops_on_a_device_changes_nothing(rule: str, state_dtype: torch.dtype) -> None:
    """Everything runs there and is masked: what a gradient that is NaN makes may not reach weights or state."""
    (weight,), optimizer = random_weights(rule, (12, 20), lr=0.1, state_dtype=state_dtype)
    optimizer._runtime.driver = Driver(False)
    random_step(optimizer, 1)
    before = weights_and_state(optimizer)
    give_random(optimizer, 2)
    weight.grad[3, 4] = math.nan
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    assert all(map(torch.equal, before, weights_and_state(optimizer)))


def test_groups_of_a_batch_step_on_a_device_each_by_its_own_rate() -> None:
    """Results arrive as steps where nothing else is done to them; equal matrices are orthogonalized together."""
    results = []
    for waits in (True, False):
        weights = [nn.Parameter(random_fp64(12, 20, seed=n).float()) for n in range(3)]
        alone = ({"lr": 0.1}, {"lr": 0.3, "extra_scale_factor": 0.5}, {"lr": 0.2, "decay_mode": "cautious"})
        groups = [{"params": [weight], **settings} for weight, settings in zip(weights, alone, strict=True)]
        optimizer = mm.Muon(groups, weight_decay=0.1, **FP32)
        optimizer._runtime.driver = Driver(waits)
        optimizer.metrics()
        random_step(optimizer, 1)
        sizes = [value for name, value in optimizer.metrics().items() if name.endswith("/update_rms")]
        assert len(sizes) == 3
        results.append([*(weight.detach() for weight in weights), *(torch.as_tensor(size).double() for size in sizes)])
    for result, expected in zip(*results, strict=True):
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("rule", MATRIX_RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_small_matrices_side_by_side_have_the_bits_that_each_has_alone(
    rule: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wide and tall ones, experts, transposed memory, parts of a fused weight; one zero gradient and one missing."""
    shapes = [(9, 20)] * 4 + [(20, 9)] * 3 + [(3, 9, 20), (27, 20)]
    matrices: list[Any] = [*["whole"] * 7, "stack", ("rows", 9, 9, 9), "whole"]
    results, side_by_side = [], muon_step._side_by_side
    joined: list[int] = []

    def counted(tensors: Any) -> Any:
        columns = side_by_side(tensors)
        joined.append(0 if columns is None or len(tensors) == 1 else len(tensors))
        return columns

    monkeypatch.setattr(muon_step, "_side_by_side", counted)
    for small in (muon_step.SMALL, 0):
        monkeypatch.setattr(muon_step, "SMALL", small)
        weights = [nn.Parameter(random_fp64(*shape, seed=n).to(dtype)) for n, shape in enumerate(shapes)]
        weights.append(nn.Parameter(random_fp64(20, 9, seed=20).to(dtype).t()))
        masters = torch.float32 if dtype == torch.bfloat16 else None
        groups = [{"params": weights, "matrices": matrices, "algorithm": rule}]
        optimizer = mm.Muon(groups, lr=0.1, weight_decay=0.1, master_dtype=masters)
        for seed in range(3):
            give_random(optimizer, seed)
            if seed == 1:
                weights[0].grad, weights[7].grad[1] = torch.zeros_like(weights[0]), 0
                weights[5].grad = None
            optimizer.step()
        results.append(weights_and_state(optimizer))
    assert all(map(torch.equal, *results))
    asks = RULES[rule].overrides("summands")  # for what needs a sum over the matrix before anything is written
    assert (sum(joined) == 0) == asks


# ---------------------------------------------------------------- rules for single elements


@register_rule("test-lion")
@dataclass(frozen=True)
class Lion(mm.ElementwiseRule):
    lion_betas: tuple[float, float] = (0.9, 0.99)

    def keeps(self) -> tuple[str, ...]:
        return ("exp_avg",)

    def update(self, gradient: Tensor, state: Any, count: Tensor) -> Tensor:
        update = torch.lerp(state["exp_avg"], gradient, 1 - self.lion_betas[0]).sign()
        state["exp_avg"].lerp_(gradient, 1 - self.lion_betas[1])
        return update


@pytest.mark.parametrize("decay_mode", ["full", "cautious"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_elementwise_rule_is_its_formula(dtype: torch.dtype, decay_mode: str) -> None:
    """Lion's, in fp64: state, decay in both modes, counts, and what metrics tell of the step."""
    numbers = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(7, generator=numbers).to(dtype))
    group = {"params": [weight], "algorithm": "test-lion", "weight_decay": 0.5, "decay_mode": decay_mode}
    optimizer = mm.Muon([group], lr=0.01)
    expected, momentum = weight.detach().double().clone(), torch.zeros(7, dtype=torch.float64)
    for _ in range(4):
        gradient = torch.randn(7, generator=numbers)
        weight.grad = gradient.to(dtype)
        optimizer.metrics()
        optimizer.step()
        update = (0.9 * momentum + 0.1 * gradient.double()).sign()
        momentum = 0.99 * momentum + 0.01 * gradient.double()
        decays = (update * expected >= 0) if decay_mode == "cautious" else torch.ones(7, dtype=torch.bool)
        expected = torch.where(decays, expected * (1 - 0.01 * 0.5), expected) - 0.01 * update
    state = optimizer.state[weight]
    torch.testing.assert_close(weight.detach().double(), expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(state["exp_avg"].double(), momentum, rtol=1e-6, atol=1e-7)
    assert state["exp_avg"].dtype == dtype
    assert state["step"] == 4
    assert optimizer.metrics()["group0/update_rms"] == pytest.approx(0.01, rel=1e-6)


@pytest.mark.parametrize(("step", "described"), [(1.0, "float"), (torch.ones(()), r"shape \(\)")])
def test_an_elementwise_rule_that_returns_another_shape_is_named(
    step: Any, described: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch broadcast it, until `metrics` was called or the decay was cautious."""
    own = rule_with(mm.ElementwiseRule, update=lambda self, gradient, state, count: step)
    monkeypatch.setitem(RULES, "own", own)
    weight = nn.Parameter(torch.ones(7))
    weight.grad = torch.ones(7)
    with pytest.raises(ValueError, match=rf"found a result of {described}; needed .* \(7,\)\. Return such a tensor"):
        mm.Muon([{"params": [weight], "algorithm": "own"}]).step()


def test_an_elementwise_rule_keeps_masters_and_loads_what_it_saved() -> None:
    weight = nn.Parameter(torch.full((3, 5), 0.7, dtype=torch.bfloat16))
    optimizers = [mm.Muon([{"params": [weight], "algorithm": "test-lion"}], lr=1e-4, master_dtype=torch.float32)]
    weight.grad = torch.ones_like(weight)
    optimizers[0].step()
    twin = nn.Parameter(weight.detach().clone())
    optimizers.append(mm.Muon([{"params": [twin], "algorithm": "test-lion"}], lr=1e-4, master_dtype=torch.float32))
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    for optimizer, parameter in zip(optimizers, (weight, twin), strict=True):
        parameter.grad = torch.full_like(parameter, -1.0)
        optimizer.step()
        assert (
            optimizer.state[parameter]["master"].dtype == optimizer.state[parameter]["exp_avg"].dtype == torch.float32
        )
    assert torch.equal(optimizers[0].state[weight]["master"], optimizers[1].state[twin]["master"])
    assert torch.equal(optimizers[0].state[weight]["exp_avg"], optimizers[1].state[twin]["exp_avg"])
    with pytest.raises(mm.StateError, match="found algorithm 'test-lion' in the state; needed 'adamw'"):
        mm.Muon([{"params": [twin], "algorithm": "adamw"}]).load_state_dict(optimizers[1].state_dict())


# ---------------------------------------------------------------- turns


def layered(every: int, layers: int = 10) -> tuple[list[nn.Parameter], mm.Muon]:
    """Two kinds of matrices in each layer."""
    names = [f"model.layers.{layer}.{kind}.weight" for layer in range(layers) for kind in ("attn.q", "mlp.up")]
    weights = [nn.Parameter(random_fp64(6, 6, seed=n).float()) for n in range(len(names))]
    group = {"params": weights, "param_names": names, "algorithm": "soap", "soap_every": every}
    return weights, mm.Muon([group], lr=0.01)


def test_matrices_take_turns_so_that_no_step_does_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turns once in five steps, four of the twenty in each; all have two sides. The first step has another way."""
    weights, optimizer = layered(5)
    decomposed: list[int] = []
    qr = torch.linalg.qr

    def counted(matrix: Tensor) -> Any:
        decomposed[-1] += len(matrix)
        return qr(matrix)

    monkeypatch.setattr(torch.linalg, "qr", counted)
    for seed in range(11):
        decomposed.append(0)
        before = [optimizer.state[weight]["row_basis"].clone() for weight in weights if seed]
        random_step(optimizer, seed)
        turned = [not torch.equal(a, optimizer.state[w]["row_basis"]) for a, w in zip(before, weights, strict=False)]
        assert sum(turned) == decomposed[-1] // 2
    assert decomposed == [0] + [8] * 10
    assert optimizer.param_groups[0]["steps_taken"] == 11


def test_the_count_of_steps_is_saved_and_loaded() -> None:
    """A resumed optimizer takes the turns of the one that was saved; one that began at 0 would take others."""
    (weights, first), (twins, second) = layered(3, layers=2), layered(3, layers=2)
    for seed in range(5):
        if seed == 2:
            second.load_state_dict(first.state_dict())
            for weight, twin in zip(weights, twins, strict=True):
                twin.data.copy_(weight.data)
            assert second.param_groups[0]["steps_taken"] == 2
        for optimizer in (first, second) if seed >= 2 else (first,):
            random_step(optimizer, seed)
    assert all(map(torch.equal, weights_and_state(first), weights_and_state(second)))


def test_torchs_functions_for_state_leave_the_first_step_the_first() -> None:
    """They take a step at learning rate 0 to have state made."""
    (_, plain), (twins, looked_at) = layered(3, layers=1), layered(3, layers=1)
    model = nn.ParameterDict({str(number): twin for number, twin in enumerate(twins)})
    get_optimizer_state_dict(model, looked_at)
    for optimizer in (plain, looked_at):
        random_step(optimizer, 0)
    assert all(map(torch.equal, weights_and_state(plain), weights_and_state(looked_at)))


def test_a_matrix_whose_first_gradient_comes_later_begins_with_unit_bases() -> None:
    (weights, optimizer), (other, _) = layered(5, layers=1), layered(5, layers=1)
    for step in range(3):
        weights[0].grad = random_fp64(6, 6, seed=step).float()
        weights[1].grad = random_fp64(6, 6, seed=9 + step).float() * (step == 2)
        optimizer.step()
    basis = optimizer.state[weights[1]]["row_basis"].view(6, 6)
    state = optimizer.state[weights[1]]
    torch.testing.assert_close(basis @ basis.mT, torch.eye(6))
    assert not state["second_moment"].any()  # its first step has no scaling yet
    assert torch.equal(state["unit"].log2(), state["unit"].log2().round())
    assert bool((weights[1] != other[1]).all())


def test_what_soap_costs_is_told_before_and_after_it_is_there() -> None:
    """By the formulas: bytes of momentum, second moments, two Gram matrices and two bases, and the unit; FLOPs."""
    weight = nn.Parameter(random_fp64(20, 12).float())
    optimizer = mm.Muon([{"params": [weight], "algorithm": "soap", "soap_every": 4}])
    muon = mm.Muon([nn.Parameter(random_fp64(20, 12).float())]).explain()
    explanation = optimizer.explain()
    numbers = 2 * 20 * 12 + 2 * 20 * 20 + 2 * 12 * 12 + 1
    assert explanation.state_bytes == 4 * numbers
    assert explanation.flops[0] - muon.flops[0] == 6 * 20 * 12 * 32 + 14 * (20**3 + 12**3) // 12
    random_step(optimizer, 1)
    assert optimizer.explain().state_bytes == explanation.state_bytes
    assert sum(value.numel() for value in optimizer.state[weight].values()) == numbers


# ------------------------------------------------------------------ mistakes in a rule


def test_a_rule_registered_without_a_name_or_without_its_momentum_is_refused() -> None:
    @dataclass(frozen=True)
    class KeepsNoMomentum(MuonRule):
        def keeps(self) -> Any:
            return {"rows_of_it": "rows"}

    with pytest.raises(TypeError, match=r'found a class; needed a name\. Write @muonmesh\.register_rule\("my-rule"\)'):
        register_rule(KeepsNoMomentum)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"KeepsNoMomentum\.keeps: found no 'momentum_buffer'.*\*\*super\(\)\.keeps\(\)"
    ):
        register_rule("keeps-no-momentum")(KeepsNoMomentum)
    assert "keeps-no-momentum" not in RULES


def test_a_class_in_place_of_its_name_and_a_setting_without_a_value_are_told() -> None:
    @dataclass(frozen=True, kw_only=True)
    class NeedsATilt(MuonRule):
        tilt: float

    register_rule("needs-a-tilt")(NeedsATilt)
    weight = nn.Parameter(torch.ones(6, 8))
    with pytest.raises(ValueError, match=r'found algorithm=<class .*NeedsATilt.*Write "needs-a-tilt"$'):
        mm.Muon([{"params": [weight], "algorithm": NeedsATilt}])
    with pytest.raises(
        TypeError, match=r"a group of NeedsATilt: found no 'tilt'; needed .*Write muon=\{\"tilt\": \.\.\.\}"
    ):
        mm.Muon([{"params": [weight], "algorithm": "needs-a-tilt"}])


def test_a_part_that_returns_nothing_is_named() -> None:
    @dataclass(frozen=True)
    class WritesInPlace(MuonRule):
        def whole(self, update: Tensor, state: Any) -> Any:
            update.mul_(2)

    register_rule("writes-in-place")(WritesInPlace)
    optimizer = mm.Muon([{"params": [nn.Parameter(torch.ones(6, 8))], "algorithm": "writes-in-place"}])
    with pytest.raises(ValueError, match=r"WritesInPlace\.whole: found a result of NoneType; needed a tensor"):
        random_step(optimizer, 1)
