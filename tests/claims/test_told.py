"""Told: settings by torch's names, complex weights, and files and names that want to be more than they are."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save as torch_save
from torch.distributed.fsdp import fully_shard

import muonmesh as mm
from muonmesh.errors import FileError, explain_error
from muonmesh.tools.cli.diagnosis import diagnose
from tests.support import gathered
from tests.support.folders import forge
from tests.support.in_copies import work_in_copies
from tests.support.tensors import same_bits

COVERS = (
    "build.from_model",
    "groups.param_groups.ParamGroups",
    "errors.explain_error",
)

FORGED = "\x1b]0;title\x07\u202e\nwhole: yes"


class Spectral(nn.Module):
    """A matrix, and complex weights as in a Fourier neural operator."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(4, 4, 3, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.randn(5, dtype=torch.complex128))
        self.mix = nn.Linear(4, 4)


@pytest.mark.parametrize(
    "settings", [{"betas": (0.8, 0.9), "eps": 1e-6}, {"adamw_betas": (0.8, 0.9), "adamw_eps": 1e-6}]
)
def test_torchs_names_of_adamws_settings_are_taken_everywhere(settings: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    table = [model[0].weight]
    for optimizer in (
        mm.from_model(model, **settings),
        mm.from_model(model, adamw=settings),
        mm.from_model(model, overrides={"0.weight": {"algorithm": "adamw", **settings}}),
        mm.Muon([{"params": table, "algorithm": "adamw", **settings}]),
    ):
        (group,) = (group for group in optimizer.param_groups if any(p is table[0] for p in group["params"]))
        assert (group["adamw_betas"], group["adamw_eps"]) == ((0.8, 0.9), 1e-6)
    with pytest.raises(ValueError, match=r"betas=\(0.8, 0.9\) and adamw_betas=\(0.7, 0.9\); needed one of them"):
        mm.from_model(model, adamw={"betas": (0.8, 0.9), "adamw_betas": (0.7, 0.9)})


def test_errors_name_the_function_that_was_called_and_what_was_meant() -> None:
    model = nn.Linear(8, 8)
    wrong: list[tuple[Any, str]] = [
        (lambda: mm.from_model(model, muon=3), "^from_model: "),  # type: ignore[arg-type]
        (lambda: mm.split_params(model, muon=3), "^split_params: "),  # type: ignore[arg-type]
        (lambda: mm.from_model(model, wrong=3), "^from_model: .*muonmesh.from_model"),  # type: ignore[call-arg]
        (lambda: mm.Muon([model.weight], maximize=True), "negate the loss"),  # type: ignore[call-arg]
        (lambda: mm.Muon([model.weight], state_dtype="bf16"), "Write state_dtype=torch.bfloat16"),  # type: ignore[arg-type]
        (lambda: mm.Muon([model.weight], master_dtype="float16"), "Write master_dtype=torch.float16"),  # type: ignore[arg-type]
        (lambda: mm.Muon([model.weight], lr=10**400), "lr: found 1000.* needed a number"),
        (lambda: mm.Muon([model.weight], ns_steps=10**9), "ns_steps: found 1000000000; needed .* from 1 to 100"),
        (lambda: mm.orthogonalize(torch.ones(2, 2), steps=10**9), "at most 100"),
    ]
    for call, message in wrong:
        with pytest.raises((TypeError, ValueError), match=message):
            call()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"master_dtype": torch.float64},
        {"state_dtype": "int8"},
        {"state_dtype": torch.bfloat16, "state_device": "cpu"},
        {"stochastic_rounding": 1},
    ],
    ids=["plain", "masters", "int8", "offload", "rounding"],
)
def test_complex_weights_are_stepped_as_torch_steps_them(settings: dict[str, Any]) -> None:
    """The state of AdamW has the dtype of its weights; masters are weights of a wider dtype."""
    torch.manual_seed(0)
    model = Spectral()
    optimizer = mm.from_model(model, lr=1e-2, **settings)
    if "state_device" in settings:
        work_in_copies(optimizer)  # this CPU's state goes through the copies that a device works on
    wide = torch.complex128 if "master_dtype" in settings else torch.complex64
    pairs = [(model.weights, model.weights.detach().to(wide)), (model.scale, model.scale.detach().clone())]
    decays = [{"params": [twin], "weight_decay": decay} for (_, twin), decay in zip(pairs, (0.1, 0.0), strict=True)]
    reference = torch.optim.AdamW(decays, lr=1e-2, betas=(0.9, 0.95))
    for step in range(3):
        for weight in model.parameters():
            weight.grad = torch.randn_like(weight) + step
        for weight, twin in pairs:
            twin.grad = weight.grad.to(twin.dtype)
        norm = torch.nn.utils.get_total_norm([weight.grad.to(torch.complex128) for weight in model.parameters()])
        assert float(optimizer.clip_grad_norm_(1e9)) == pytest.approx(float(norm), rel=1e-6)
        optimizer.step()
        reference.step()
    for weight, twin in pairs:
        assert torch.equal(weight, twin.to(weight.dtype))
        for key, value in reference.state[twin].items():
            assert same_bits(optimizer.state[weight][key], value)


def test_complex_weights_and_their_state_are_saved_and_loaded(tmp_path: Path) -> None:
    model, loaded = Spectral(), Spectral()
    optimizer, again = mm.from_model(model), mm.from_model(loaded)
    for weight in model.parameters():
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    mm.checkpoint.save(tmp_path / "saved", model, optimizer)
    mm.checkpoint.load(tmp_path / "saved", loaded, again)
    assert torch.equal(loaded.weights, model.weights)
    assert torch.equal(again.state[loaded.weights]["exp_avg_sq"], optimizer.state[model.weights]["exp_avg_sq"])
    again.load_state_dict(optimizer.state_dict())
    assert torch.equal(again.state[loaded.scale]["exp_avg"], optimizer.state[model.scale]["exp_avg"])
    with pytest.raises(TypeError, match=r"torch\.view_as_real"):
        mm.from_model(Spectral(), overrides={"weights": {"algorithm": "muon", "matrices": "stack"}})


def test_torchs_scaler_takes_no_complex_gradients_whatever_the_optimizer() -> None:
    for make in (mm.from_model, lambda model: torch.optim.AdamW(model.parameters())):
        model = Spectral()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        scaler, optimizer = torch.amp.grad_scaler.GradScaler("cpu"), make(model)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        scaler.scale(torch.zeros(()))
        with pytest.raises(NotImplementedError, match="not implemented for 'Complex"):
            scaler.step(optimizer)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_healthy_checkpoint_of_torch_is_not_to_be_removed(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    torch_save({"model": model.state_dict()}, checkpoint_id=tmp_path / "torchs")
    with pytest.raises(FileError, match=r"a checkpoint of torch\.distributed\.checkpoint.*set_state_dict") as error:
        mm.checkpoint.load(tmp_path / "torchs", model, mm.from_model(model))
    assert "emove" not in str(error.value)


def test_names_cannot_command_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(8, 8)
    optimizer = mm.from_model(model)
    mm.checkpoint.save(tmp_path / "saved", model, optimizer)
    path = tmp_path / "saved" / "manifest.json"
    content = json.loads(path.read_text())
    content["files"][FORGED] = content["files"]["settings.json"]
    path.write_text(json.dumps(content))
    from muonmesh.tools.cli.doctor import print_diagnosis

    print_diagnosis(diagnose(tmp_path / "saved"))
    printed = capsys.readouterr().out
    texts = [printed, str(FileError(FORGED)), explain_error(FORGED, FORGED, FORGED)]

    class Odd(nn.Module):
        pass

    def named(*sizes: int) -> nn.Module:
        odd = Odd()
        for number, size in enumerate(sizes):
            odd.register_module(f"{number}{FORGED}", nn.Linear(size, size))
        return odd

    odd = named(8, 8, 8)
    odd.get_submodule(f"0{FORGED}").requires_grad_(False)  # named among what is left out
    groups = mm.split_params(odd)
    texts += [
        str(groups),
        str(mm.Muon(groups).explain()),
    ]

    def step(closure: Any = None) -> None:
        raise ValueError(FORGED)

    failing = mm.Muon(groups)
    failing.step = step  # type: ignore[assignment]
    report = mm.audit(failing, odd)
    texts += [str(replace(report, guesses=(FORGED,))), str(replace(report, raised=f"{FORGED}: error"))]
    for text in texts:
        assert "whole: yes" in text
        assert "\nwhole: yes" not in text
        assert not {*text} & {*"\x1b\x07\u202e"}


BOUNDS: list[tuple[str, str, str]] = [
    ("lr", "1e38", "a number of at least 0, at most 1e\\+09"),
    ("lr", "1" + "0" * 400, "needed"),
    ("lr", "-1.0", "a number of at least 0"),
    ("lr", "NaN", "needed"),
    ("weight_decay", "1e30", "at most 1e\\+09"),
    ("extra_scale_factor", "1e300", "at most 1e\\+09"),
    ("momentum", "1.0", r"a number in \[0, 1\)"),
    ("ns_steps", "1000000000", "a whole number from 1 to 100"),
    ("ns_steps", "1e9", "a whole number from 1 to 100"),
    ("adamw_betas", "[0.9, 1.0]", "adamw_betas"),
    ("adamw_eps", "1e39", "at most 1e\\+09"),
    ("stochastic_rounding", "1" + "0" * 5000, "4300 digits"),
    ("ns_coefficients", "[[1e39, 1.0, 1.0]]", "at most 1e\\+09 in size"),
    ("ns_coefficients", json.dumps([[3.4445, -4.775, 2.0315]] * 101), "at most 100"),
]


@pytest.mark.parametrize(("key", "value", "needed"), BOUNDS, ids=lambda value: value[:20])
def test_settings_of_a_file_have_the_bounds_of_settings(key: str, value: str, needed: str, tmp_path: Path) -> None:
    """A forged settings.json costs no time and changes nothing, and the next good step is as without it."""

    def model_and_optimizer() -> tuple[nn.Module, mm.Muon]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
        return model, mm.from_model(model, lr=0.01)

    def stepped(model: nn.Module, optimizer: mm.Muon) -> list[torch.Tensor]:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    (model, optimizer), (twin, other) = model_and_optimizer(), model_and_optimizer()
    for pair in ((model, optimizer), (twin, other)):
        stepped(*pair)
    mm.checkpoint.save(tmp_path / "saved", model, optimizer)
    path = tmp_path / "saved" / "settings.json"
    content = json.loads(path.read_text())
    for group in content["groups"]:
        group["settings"][key] = "forged"
    path.write_text(json.dumps(content).replace('"forged"', value))
    forge(path.parent)
    began = time.monotonic()
    with pytest.raises((mm.StateError, FileError), match=needed):
        mm.checkpoint.load(tmp_path / "saved", model, optimizer)
    assert time.monotonic() - began < 5
    assert all(map(torch.equal, stepped(model, optimizer), stepped(twin, other)))


@pytest.mark.parametrize("name", ["n" * 300, "a/" * 3000, os.fsdecode(b"\xff"), "loop"])
def test_doctor_has_a_sentence_for_every_path(name: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    diagnosis = diagnose(tmp_path / name)
    assert not diagnosis.kind
    assert len(diagnosis.faults) == 1
    assert "needed a folder or a file" in diagnosis.faults[0]


# ------------------------------------------------------------------ complex weights under FSDP2


class Operator(nn.Module):
    """Weights as of a Fourier neural operator; rows that two ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(7, 5, dtype=torch.complex64))
        self.bias = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self) -> Tensor:
        loss = (self.weights * self.weights.conj() * (1 + 2j)).imag.sum() + self.weights.real.square().sum()
        return loss + (self.bias**3).real.sum()


class WithOperator(nn.Module):
    """These weights, beside a matrix that Muon steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.spectral, self.mix = Operator(), nn.Linear(4, 4)

    def forward(self) -> Tensor:
        loss: Tensor = self.spectral() + self.mix(torch.ones(2, 4)).square().sum()
        return loss


def trained_by_fsdp2(settings: dict[str, Any]) -> dict[str, Tensor]:
    """Weights and moments after three steps under FSDP2, whole; the state in CPU memory goes through the copies."""
    net = WithOperator()
    fully_shard(net.spectral)  # one dtype for each call, as FSDP2 asks
    fully_shard(net)
    optimizer = mm.from_model(net, lr=1e-2, **settings)
    if "state_device" in settings:
        work_in_copies(optimizer)
    for _ in range(3):
        net().backward()
        optimizer.step()
        optimizer.zero_grad()
    names = {parameter: name for name, parameter in net.named_parameters()}
    moments = {
        f"{names[p]} {key}": optimizer.state[p][key]
        for p in names
        for key in ("exp_avg", "exp_avg_sq")
        if "spectral" in names[p]
    }
    return gathered.whole({**dict(net.named_parameters()), **moments})


@pytest.mark.parametrize(
    "settings",
    [{}, {"master_dtype": torch.float32}, {"state_dtype": "int8"}, {"state_device": "cpu"}],
    ids=["plain", "masters", "int8", "offload"],
)
def test_complex_weights_under_fsdp2_are_stepped_as_torch_steps_them(workers: Any, settings: dict[str, Any]) -> None:
    net = WithOperator()
    weights = dict(net.spectral.named_parameters())
    decays = [{"params": [weights["weights"]], "weight_decay": 0.1}, {"params": [weights["bias"]], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(decays, lr=1e-2, betas=(0.9, 0.95))
    for _ in range(3):
        net().backward()
        reference.step()
        net.zero_grad()
    for tensors in workers(2).run(trained_by_fsdp2, settings):
        for name, weight in weights.items():
            for key, value in {"": weight, **reference.state[weight]}.items():
                if key != "step":
                    assert torch.equal(tensors[f"spectral.{name} {key}".strip()], value), (name, key)
