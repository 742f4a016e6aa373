"""Points of the pull requests in docs/internals/references.md that no other test shows; one process is enough.

Also that pages name tests that are there.
"""

from __future__ import annotations

import inspect
import re
import typing
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import ParamsT

import muonmesh as mm
from muonmesh.comm.exchange import Exchange
from muonmesh.settings import SETTINGS
from tests.support.tensors import random

ROOT = Path(__file__).parents[2]
MODES = typing.get_args(typing.get_type_hints(mm.update_scale)["mode"])


@pytest.mark.parametrize(("page", "least"), [("how-we-know.md", 60), ("internals/hosts-decide-by.md", 36)])
def test_every_test_that_the_page_names_is_in_the_file_it_names(page: str, least: int) -> None:
    text = (ROOT / "docs" / page).read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", text)
    assert len(named) > least
    wrong = [f"{file}::{name}" for file, name in named if f"\ndef {name}(" not in (ROOT / file).read_text()]
    assert wrong == []
    named += [("", name) for name in re.findall(r"`(test_\w+)", text)]
    assert all(file for file, _ in named), "write tests/path.py::test_name"


# ------------------------------------------------------------------ the public face


@pytest.mark.parametrize("public", [mm.Muon, mm.from_model, mm.orthogonalize, mm.split_params, mm.update_scale])
def test_every_argument_is_described(public: Any) -> None:
    described = re.search(r"Args:\n(.*?)(\n\n|\Z)", inspect.getdoc(public) or "", re.DOTALL)
    assert described is not None
    rare = re.search(r"Other Parameters:\n(.*?)(\n\n|\Z)", inspect.getdoc(public) or "", re.DOTALL)
    sections = described[1] + "\n" + (rare[1] if rare else "")
    entries = set(re.findall(r"^ {4}(\w+): ", sections, re.MULTILINE))
    arguments = set(inspect.signature(public).parameters)
    if public is mm.from_model:  # which describes its own, and hands those of Muon on
        arguments = arguments - SETTINGS.keys() | {"settings"}
        assert "`Muon`" in described[1]
    assert entries == arguments


def test_parameters_are_taken_as_torch_takes_them() -> None:
    annotated = typing.get_type_hints(mm.Muon.__init__)["params"]
    assert set(typing.get_args(annotated)) == set(typing.get_args(ParamsT))
    layer = nn.Linear(6, 4, bias=False)
    for params in (
        [layer.weight],
        layer.parameters(),  # gone after one pass
        layer.named_parameters(),
        [{"params": layer.parameters()}],
        ({"params": layer.named_parameters()} for _ in range(1)),
    ):
        (group,) = mm.Muon(params).param_groups
        assert group["params"][0] is layer.weight
        assert len(group["param_names"]) == 1


def test_a_usual_step_warns_of_nothing_and_returns_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4))
        optimizer = mm.from_model(model, lr=0.01)
        for _ in range(2):
            model(random(3, 6)).square().mean().backward()
            optimizer.clip_grad_norm_(1.0)
            assert optimizer.step() is None
            optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())


# ------------------------------------------------------------------ one step


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_a_step_is_what_the_public_functions_make(shape: tuple[int, int], nesterov: bool) -> None:
    """Whoever wants an optimizer of their own gets the same bits from `orthogonalize` and `update_scale`."""
    weight = nn.Parameter(random(*shape))
    start, gradient = weight.detach().clone(), random(*shape, seed=1)
    optimizer = mm.Muon([weight], lr=0.5, nesterov=nesterov, momentum=0.9, weight_decay=0.1, extra_scale_factor=0.7)
    weight.grad = gradient.clone()
    optimizer.step()
    momentum = torch.zeros(shape).lerp_(gradient, 1 - 0.9)
    direction = torch.lerp(gradient, momentum, 0.9) if nesterov else momentum
    update = mm.orthogonalize(direction.bfloat16(), dtype=torch.bfloat16).float()
    expected = start * (1 - 0.5 * 0.1) - update * (0.5 * (0.7 * mm.update_scale(*shape, "match_rms_adamw")))
    assert torch.equal(weight, expected)


def test_groups_step_with_their_own_settings() -> None:
    settings: list[dict[str, Any]] = [
        {"lr": 0.1, "momentum": 0.9, "scale_mode": "spectral"},
        {"lr": 0.02, "nesterov": False, "weight_decay": 0.0, "ns_coefficients": "quintic"},
        {"lr": 0.02, "ns_steps": 8, "extra_scale_factor": 0.3, "ns_method": "standard"},
    ]
    in_groups = [nn.Parameter(random(12, 20)) for _ in settings]
    apart = [nn.Parameter(random(12, 20)) for _ in settings]
    optimizers = [
        mm.Muon([{"params": [p], **group_settings} for p, group_settings in zip(in_groups, settings, strict=True)])
    ]
    optimizers += [mm.Muon([p], **group_settings) for p, group_settings in zip(apart, settings, strict=True)]
    for step in range(3):
        for p in (*in_groups, *apart):
            p.grad = random(12, 20, seed=step)
        for optimizer in optimizers:
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(in_groups, apart, strict=True))
    assert len({p.detach().norm().item() for p in in_groups}) == len(settings)


# ------------------------------------------------------------------ divisions


def test_no_epsilon_is_asked_for_and_nothing_is_divided_by_zero() -> None:
    """A gradient that is zero in the first step, where the norm of the momentum is zero too."""
    assert not {"eps", "ns_eps"} & {
        *inspect.signature(mm.Muon).parameters,
        *inspect.signature(mm.orthogonalize).parameters,
    }
    with pytest.raises(ValueError, match="found the key 'eps'"):
        mm.Muon([{"params": [nn.Parameter(torch.ones(4, 4))], "eps": 0.0}])
    for shape in ((6, 9), (1, 1), (3, 4, 5)):
        weight = nn.Parameter(random(*shape))
        start = weight.detach().clone()
        optimizer = mm.Muon([weight], lr=0.1)
        for _ in range(2):
            weight.grad = torch.zeros(shape)
            optimizer.step()
        assert torch.equal(weight, start)
        assert not optimizer.state[weight]["momentum_buffer"].any()
        weight.grad = random(*shape)
        optimizer.step()
        assert weight.isfinite().all()
        assert not torch.equal(weight, start)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_an_empty_dim_is_refused_in_every_scale_mode(shape: tuple[int, int], mode: Any) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        mm.update_scale(*shape, mode)
    with pytest.raises(ValueError, match=r"w: .*at least 1"):
        mm.Muon([("w", nn.Parameter(torch.zeros(shape)))], scale_mode=mode)


# ------------------------------------------------------------------ clipping


def halves() -> tuple[nn.Parameter, nn.Parameter, mm.Muon]:
    matrix, vector = nn.Parameter(torch.zeros(24, 40)), nn.Parameter(torch.ones(5))
    groups = [{"params": [matrix]}, {"params": [vector], "algorithm": "adamw"}]
    return matrix, vector, mm.Muon(groups, lr=1.0, scale_mode="none", weight_decay=0.0)


@pytest.mark.parametrize("policy", ["adamw_only", "all", "separate"])
def test_no_policy_crushes_a_matrix_below_a_floor(policy: Any) -> None:
    """A huge norm elsewhere makes the coefficient about 1e-20; the matrix still moves at full strength."""
    matrix, vector, optimizer = halves()
    matrix.grad, vector.grad = random(24, 40) * 1e-3, torch.full((5,), 1e17)
    optimizer.clip_grad_norm_(1e-3, policy=policy)
    optimizer.step()
    assert 0.9 < torch.linalg.svdvals(matrix.detach().double()).mean() < 1.1


def test_the_norm_of_the_matrices_clips_nothing_of_adamw() -> None:
    """AdamW's half would be crushed below its own epsilon by a norm that is not its own."""
    matrix, vector, optimizer = halves()
    matrix.grad, vector.grad = random(24, 40) * 1e11, torch.full((5,), 0.1)
    norms = optimizer.clip_grad_norm_(1.0)
    assert torch.equal(vector.grad, torch.full((5,), 0.1))
    assert float(norms) == pytest.approx(float(random(24, 40).double().norm()) * 1e11, rel=1e-6)  # told nevertheless


def test_what_is_not_clipped_is_not_measured_if_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    sums: list[int] = []
    reduce_sums = Exchange.reduce_sums
    monkeypatch.setattr(Exchange, "reduce_sums", lambda self, x: (sums.append(x.numel()), reduce_sums(self, x))[1])
    matrix = nn.Parameter(torch.zeros(24, 40))
    optimizer = mm.Muon([matrix])
    matrix.grad = random(24, 40)
    optimizer.clip_grad_norm_(1.0, norms=False)
    assert sums == []  # a Muon-only optimizer has nothing to clip
    optimizer.clip_grad_norm_(1.0)
    assert len(sums) == 1
