"""The public face: names, signatures, what is printed, and defaults that depend on other settings."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import math
import re
import runpy
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import muonmesh as mm
from muonmesh.clip.limits import GradNorms
from muonmesh.comm.gradients import ParameterGrad
from muonmesh.numerics.coefficients import COEFFICIENT_SETS, coefficient_schedule
from muonmesh.settings import FIRST
from tests.support.reference import reference_step
from tests.support.tensors import random

COVERS = (
    "numerics.setting.Setting",
    "table.aligned",
    "settings.shows_settings",
)

ROOT = Path(__file__).parents[2]
JORDAN = (3.4445, -4.7750, 2.0315)
MINE = [JORDAN, (2.0, -1.5, 0.5), (1.875, -1.25, 0.375)]


# ------------------------------------------------------------------ names


def test_what_annotations_and_values_need_can_be_imported() -> None:
    for name in ("GradNorms", "ParamGroups", "Explanation", "GradientSource"):
        assert inspect.isclass(getattr(mm, name))
    for name in (
        "ClipPolicy",
        "ScaleMode",
        "Algorithm",
        "KernelName",
        "CoefficientName",
        "Method",
        "DecayMode",
    ):
        assert typing.get_args(getattr(mm, name))
    assert set(mm.__all__) <= set(dir(mm))
    assert mm.__all__ == sorted(mm.__all__)
    assert all(hasattr(mm, name) for name in mm.__all__)
    with pytest.raises(AttributeError, match="Muun"):
        _ = mm.Muun  # type: ignore[attr-defined]
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    groups = mm.split_params(model)
    optimizer = mm.Muon(groups)
    assert isinstance(groups, mm.ParamGroups)
    assert isinstance(optimizer.clip_grad_norm_(1.0), mm.GradNorms)
    assert isinstance(optimizer.explain(), mm.Explanation)


# ------------------------------------------------------------------ signatures


def test_from_model_has_the_arguments_of_muon_with_their_defaults() -> None:
    arguments_of_from_model = dict(inspect.signature(mm.from_model).parameters)
    arguments_of_muon = dict(inspect.signature(mm.Muon).parameters)
    del arguments_of_muon["params"]
    for name in ("model", "muon", "adamw", "overrides", "rule", "example", "watch"):
        del arguments_of_from_model[name]
    assert list(arguments_of_from_model.values()) == list(
        arguments_of_muon.values()
    )  # names, kinds, defaults, annotations, order


def made_by(make: str, **arguments: Any) -> mm.Muon:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    return mm.Muon(mm.split_params(model), **arguments) if make == "Muon" else mm.from_model(model, **arguments)


@pytest.mark.parametrize("make", ["Muon", "from_model"])
def test_betas_and_eps_are_adamws_as_torch_has_them(make: str) -> None:
    """AdamW's half steps as torch.optim.AdamW with these very arguments."""
    arguments: dict[str, Any] = {"lr": 0.1, "betas": (0.5, 0.75), "eps": 1e-2, "weight_decay": 0.0}
    optimizer = made_by(make, **arguments)
    half = [p for group in optimizer.param_groups if group["algorithm"] == "adamw" for p in group["params"]]
    twins = [p.detach().clone().requires_grad_() for p in half]
    peer = torch.optim.AdamW(twins, fused=False, foreach=False, **arguments)
    for step in range(3):
        for parameter, twin in zip(half, twins, strict=True):
            parameter.grad = torch.full_like(parameter, 0.1 * step)
            twin.grad = parameter.grad.clone()
        optimizer.step()
        peer.step()
    torch.testing.assert_close(half, twins, rtol=1e-6, atol=0)  # torch multiplies in another order
    assert not {"betas", "eps"} & optimizer.param_groups[0].keys()


@pytest.mark.parametrize("make", ["Muon", "from_model"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"betas": (0.9, 0.99), "adamw_betas": (0.9, 0.95)}, "found betas=.* and adamw_betas=.*Remove betas"),
        ({"eps": 1e-6, "adamw_eps": 1e-8}, "found eps=.* and adamw_eps=.*Remove eps"),
        ({"betas": 0.9}, "adamw_betas: found 0.9; needed two numbers"),
        ({"fused": True}, "found fused=True; .*Leave fused out"),
        ({"foreach": True}, "found foreach=True; .*Leave foreach out"),
        ({"amsgrad": True}, "found amsgrad=True; .*Leave amsgrad out"),
        ({"momentun": 0.9}, "found the argument 'momentun'; .*Write momentum="),
        ({"learning_rate": 0.9}, "found the argument 'learning_rate'; .*Write lr="),
        ({"cautious": True}, "found the argument 'cautious'; .*Write decay_mode="),
        ({"overides": {}}, "^Muon: .* 'overides'; .*Give overrides= to|^from_model: .* 'overides'; .*Write overrides="),
        ({"adamw_lr": 0.9}, r"found the argument 'adamw_lr'; .*Write adamw=\{\"lr\": \.\.\.\}"),
        ({"algorithm": "adamw"}, "found the argument 'algorithm'; .*"),
        ({"lr_scale": 1.0}, "found the argument 'lr_scale'; .*"),
    ],
    ids=str,
)
def test_other_arguments_of_torchs_optimizers_are_refused(make: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        made_by(make, **arguments)
    assert made_by(make, fused=False, foreach=None)  # which asks for nothing


def test_from_model_hands_every_argument_on() -> None:
    arguments: dict[str, Any] = {
        "lr": 0.07,
        "momentum": 0.8,
        "nesterov": False,
        "weight_decay": 0.3,
        "decay_mode": "cautious",
        "scale_mode": "spectral",
        "extra_scale_factor": 0.7,
        "ns_coefficients": "quintic",
        "ns_steps": 4,
        "ns_method": "standard",
        "adamw_betas": (0.8, 0.9),
        "adamw_eps": 1e-5,
        "compute_dtype": torch.float64,
        "kernels": "torch",
        "state_dtype": torch.float64,
        "state_device": "cpu",
        "master_dtype": torch.float64,
        "process_group": "local",
        "layouts": {"0.weight": "somewhere"},
        "shard_state": True,
        "memory_budget_mb": 48.0,
        "gradients": ParameterGrad(),
    }
    signature = inspect.signature(mm.from_model)
    other_names = {"model", "muon", "adamw", "overrides", "rule", "example", "watch", "stochastic_rounding"}
    assert mm.from_model(nn.Linear(2, 3), stochastic_rounding=4).defaults["stochastic_rounding"] == 4  # without masters
    assert arguments.keys() == signature.parameters.keys() - other_names
    assert not [name for name in arguments if arguments[name] == signature.parameters[name].default]
    optimizer = mm.from_model(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)), **arguments)
    settings = {
        **optimizer.defaults,
        **vars(optimizer._runtime),
        **optimizer._runtime.requested._asdict(),
        "gradients": optimizer.gradients,
        "compute_dtype": optimizer._runtime.precision.compute,
        "kernels": optimizer._runtime.precision.kernels,
        "state_dtype": optimizer._runtime.precision.state,
        "state_device": "cpu" if optimizer._runtime.precision.on_host else None,
        "master_dtype": optimizer._runtime.precision.master,
    }
    assert {name: settings[name] for name in arguments} == arguments


# ------------------------------------------------------------------ what is printed


def test_an_optimizer_prints_a_line_for_each_group() -> None:
    model = nn.Sequential(nn.Embedding(50, 16), *(nn.Linear(16, 16) for _ in range(60)), nn.Linear(16, 50))
    optimizer = mm.from_model(model, lr=3e-4, muon={"lr": torch.tensor(0.02)})
    assert repr(optimizer) == (
        "Muon (\n"
        "    muon:              muon   60 parameters  15,360 elements  lr 0.02\n"
        "    adamw.embeddings:  adamw    1 parameter     800 elements  lr 0.0003\n"
        "    adamw.head:        adamw    1 parameter     800 elements  lr 0.0003\n"
        "    adamw.vectors:     adamw  61 parameters   1,010 elements  lr 0.0003, weight_decay 0.0\n"
        ")"
    )


def test_an_optimizer_prints_settings_of_its_rules_and_no_others() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    optimizer = mm.from_model(model, lr=3e-4, rule="normuon", muon={"normuon_beta2": 0.9}, ns_steps=4)
    muon, adamw = repr(optimizer).splitlines()[1:3]
    assert muon.endswith("lr 0.0003, normuon_beta2 0.9, ns_steps 4")
    assert adamw.endswith("lr 0.0003, weight_decay 0.0")


@pytest.mark.parametrize("lr", [None, "high", float("nan"), torch.ones(3)])
def test_printing_never_raises(lr: Any) -> None:
    optimizer = mm.Muon([nn.Parameter(random(3, 4))])
    optimizer.param_groups[0]["lr"] = lr
    assert "1 parameter " in repr(optimizer)


def test_norms_are_formatted_as_numbers() -> None:
    norms = GradNorms(torch.tensor(1.23456, dtype=torch.float64), None, None, torch.tensor(False))
    assert f"{norms:.2f} {norms:8.1e} {norms}" == "1.23  1.2e+00 1.23456"
    optimizer = mm.from_model(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)))
    unknown = optimizer.clip_grad_norm_(1.0, norms=False)
    assert unknown.total is None
    assert f"{unknown:.2f}" == "nan"
    assert math.isnan(float(unknown))


# ------------------------------------------------------------------ ns_steps=None


@pytest.mark.parametrize(
    ("coefficients", "steps"),
    [
        *((name, {"deepseekv4": 10, "deflated": 3}.get(name, 5)) for name in COEFFICIENT_SETS),
        (MINE, 3),
        ([JORDAN] * 7, 7),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_without_steps_a_set_runs_what_it_is_made_for(coefficients: Any, steps: int) -> None:
    assert coefficient_schedule(coefficients) == coefficient_schedule(coefficients, steps)
    assert len(coefficient_schedule(coefficients)) == steps
    x = random(24, 40)
    result = mm.orthogonalize(x, coefficients=coefficients, dtype=torch.float32)
    assert torch.equal(result, mm.orthogonalize(x, coefficients=coefficients, steps=steps, dtype=torch.float32))
    weights = [nn.Parameter(x.clone()) for _ in range(2)]
    optimizers = [
        mm.Muon([weights[0]], ns_coefficients=coefficients),
        mm.Muon([{"params": [weights[1]], "ns_coefficients": coefficients, "ns_steps": steps}]),
    ]
    for _ in range(2):
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = random(24, 40, seed=1)
            optimizer.step()
    assert torch.equal(*weights)
    assert [o.explain().flops for o in optimizers] == [optimizers[0].explain().flops] * 2
    first, second = (o._runtime.planned.plan.parameters[0].settings for o in optimizers)
    assert first == second  # ranks that say the same in other words agree


def test_three_polynomials_of_one_s_own_are_three_steps_of_the_oracle() -> None:
    start, gradient = random(12, 20), random(12, 20, seed=1)
    weight = nn.Parameter(start.clone())
    options = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
    optimizer = mm.Muon([{"params": [("w", weight)]}], ns_coefficients=MINE, compute_dtype=torch.float32, **options)
    weight.grad = gradient
    optimizer.step()
    rule = {"w": {"algorithm": "muon", "matrices": "whole", "coefficients": MINE, **options}}
    expected, _ = reference_step({"w": start.double()}, {"w": gradient}, {}, rule)
    assert float((weight.detach().double() - expected["w"]).norm() / expected["w"].norm()) < 1e-6


def test_the_method_is_chosen_for_the_steps_that_are_taken() -> None:
    from muonmesh.numerics.newton_schulz import resolve_method

    assert resolve_method(768, 3072, coefficients="deepseekv4") == "gram"
    assert resolve_method(768, 3072, coefficients="deepseekv4", steps=5) == "standard"
    assert resolve_method(768, 3072) == "gram"


def test_the_version_is_that_of_the_installed_package() -> None:
    assert mm.__version__ == importlib.metadata.version("muonmesh")


# ------------------------------------------------------------------ what people see


def test_the_public_api_is_what_the_reference_lists() -> None:
    """Every name, argument and default, so that none changes without being seen."""
    api = runpy.run_path(str(ROOT / "docs" / "site" / "api.py"))
    write = (
        "If the public API is meant to change, write: PYTHONPATH=src python docs/site/api.py, and say so in CHANGELOG"
    )
    assert api["stub"]() == api["STUB"].read_text(), write


def test_the_settings_that_people_set_first_come_first_and_all_are_described() -> None:
    names = [name for name in inspect.signature(mm.Muon).parameters if name not in ("params", "lr")]
    count = sum(FIRST)
    assert count == 12
    first, _, rare = (inspect.getdoc(mm.Muon) or "").partition("Args:\n")[2].partition("Other Parameters:\n")
    described = re.findall(r"^    (\w+): ", first, re.MULTILINE)
    assert described == ["params", "lr", *names[:count]]
    assert re.findall(r"^    (\w+): ", rare.partition("Raises:")[0], re.MULTILINE) == names[count:]


def test_every_alias_says_what_it_is() -> None:
    for name in mm.__all__:
        alias = getattr(mm, name)
        if callable(alias) and not typing.get_args(alias):
            assert inspect.getdoc(alias), name
            continue
        home = importlib.import_module(
            f"muonmesh.{next(part for part, names in mm._HOMES.items() if name in names.split())}"
        )
        files = [Path(home.__file__ or ""), *Path(home.__file__ or "").parent.glob("*.py")]
        assert any(
            re.search(rf'^{name}\b[^"]*= (?:[^"]|"(?!""))*\n"""[A-Z]', file.read_text(), re.MULTILINE) for file in files
        ), name
