"""convert_settings: our step with the settings it returns is the other package's step.

The other packages' steps are restated in fp64 in `tests/support/peers.py`; torch's own run here too, those of the
others in `tests/hosts/test_migrating.py`.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import muonmesh as mm
from tests.support import peers
from tests.support.tensors import random_fp64

COVERS = (
    "tools.migration.package.Package",
    "tools.migration.packages.convert_settings",
)

SHAPES = ((12, 20), (20, 12))
EXACT = {"compute_dtype": torch.float64, "state_dtype": torch.float64}


def moved_apart(weight: Tensor, other: Tensor, start: Tensor) -> float:
    """The distance of two ends, relative to the way from the start."""
    return float((weight - other).norm() / (other - start).norm())


def steps_apart(step: peers.Step, settings: dict[str, Any], shape: tuple[int, int], algorithm: str = "muon") -> float:
    """How far our three steps end from theirs; the gradients are those of no particular scale."""
    start = random_fp64(*shape)
    weight, other, state = nn.Parameter(start.clone()), start.clone(), {}
    optimizer = mm.Muon([{"params": [weight], "algorithm": algorithm, **settings}], **EXACT)
    for seed in (1, 2, 3):
        weight.grad = random_fp64(*shape, seed=seed)
        other = step(other, weight.grad, state)
        optimizer.step()
    return moved_apart(weight.detach(), other, start)


JORDAN = {"lr": 0.05, "weight_decay": 0.3, "momentum": 0.9}
TORCH = {"lr": 0.01, "weight_decay": 0.1, "momentum": 0.9, "nesterov": True}
OTHERS = {"weight_decay": 0.4, "momentum": 0.8, "nesterov": False, "ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 3}
DION = {"lr": 0.01, "mu": 0.9, "weight_decay": 0.3, "nesterov": False, "cautious_wd": False}
EMERGING = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.3, "nesterov": False, "scale_mode": "spectral"}
EMERGING |= {"coefficient_type": "quintic", "num_ns_steps": 6, "extra_scale_factor": 0.2}
ELSE = {"nesterov": True, "scale_mode": "unit_rms_norm", "coefficient_type": "simple", "num_ns_steps": 5}
MUON: list[tuple[Any, Any, dict[str, Any]]] = [
    # Each setting has a value that is neither side's default in one of the rows.
    (peers.torch_muon, "torch", {**TORCH, "lr": 0.02, "momentum": 0.95}),
    (peers.torch_muon, "torch", {**TORCH, **OTHERS, "adjust_lr_fn": "match_rms_adamw"}),
    (peers.torch_muon, "torch", {**TORCH, "adjust_lr_fn": "spectral_unclamped"}),
    (peers.keller_jordan, "keller_jordan", JORDAN),
    (peers.keller_jordan, "deepspeed", JORDAN),
    (peers.dion, "dion", {**DION, "adjust_lr": "spectral_norm", "use_polar_express": True}),
    (
        *(peers.dion, "dion"),
        {**DION, "nesterov": True, "adjust_lr": "rms_norm", "cautious_wd": True, "use_polar_express": False},
    ),
    (peers.emerging_optimizers, "emerging_optimizers", EMERGING),
    (peers.emerging_optimizers, "emerging_optimizers", {**EMERGING, **ELSE, "extra_scale_factor": 1.0}),
]


@pytest.mark.parametrize(("peer", "name", "settings"), MUON, ids=[f"{row[1]}{i}" for i, row in enumerate(MUON)])
def test_our_steps_are_theirs(peer: Any, name: Any, settings: dict[str, Any]) -> None:
    converted = mm.convert_settings(name, **settings)
    converted.pop("adamw", None)
    for shape in SHAPES:
        assert steps_apart(peer(**settings), converted, shape) < 1e-5


@pytest.mark.parametrize(("cautious", "mode"), [(True, "cautious"), (False, "full")])
def test_dion_s_adamw_decays_as_its_muon_does(cautious: bool, mode: str) -> None:
    settings = mm.convert_settings("dion", weight_decay=0.1, cautious_wd=cautious)
    assert (settings["decay_mode"], settings["adamw"]["decay_mode"]) == (mode, mode)


def test_momentum_that_is_a_sum_goes_the_same_way() -> None:
    """dion adds gradients up, we average them: only what is stored differs, by 1 − μ."""
    g, sum_state, mean_state = random_fp64(4, 6), {}, {}
    for momentum, nesterov in ((0.9, True), (0.5, False)):
        added, averaged = (
            peers.total(g, sum_state, momentum, nesterov),
            peers.average(g, mean_state, momentum, nesterov),
        )
        assert torch.allclose(added * (1 - momentum), averaged)
        sum_state, mean_state = {}, {}


# ------------------------------------------------------------------ torch itself


def test_settings_of_a_muon_alone_are_warned_of() -> None:
    """from_model would give AdamW's half the rate of Muon, which is many times as large."""
    muon = torch.optim.Muon([nn.Parameter(torch.randn(4, 6))], lr=0.02)
    with pytest.warns(UserWarning, match=r"^Muon: .* Write convert_settings\(muon, adamw\)"):
        settings = mm.convert_settings(muon)
    rates = {
        g["algorithm"]: g["lr"] for g in mm.from_model(nn.Sequential(*[nn.Linear(4, 4)] * 2), **settings).param_groups
    }
    assert rates == {"muon": 0.02, "adamw": 0.02}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mm.convert_settings(muon, torch.optim.AdamW([nn.Parameter(torch.randn(4))], lr=3e-4))
        by_name = mm.convert_settings("torch", lr=0.02)  # a half by its name, as groups of one half are made
    model = nn.Sequential(*[nn.Linear(4, 4)] * 2)
    for adamw, rate in (({}, 0.02), ({"adamw": {"lr": 3e-4}}, 3e-4)):  # docs/learning-rates.md
        groups = mm.from_model(model, **by_name, **adamw).param_groups
        assert {group["algorithm"]: group["lr"] for group in groups} == {"muon": 0.02, "adamw": rate}


def test_from_adamw_its_half_is_the_same_and_matrices_step_as_far() -> None:
    """AdamW's updates have an RMS of about 0.2 to 0.4 of the learning rate once moments have settled (2502.16982)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 24), nn.Linear(24, 40, bias=False), nn.Linear(40, 10))
    table, matrix = model[0].weight, model[1].weight
    twins = [nn.Parameter(table.detach().clone()), nn.Parameter(matrix.detach().clone())]
    adamw = torch.optim.AdamW(twins, lr=0.002, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.3)
    muonmesh = mm.from_model(model, **mm.convert_settings(adamw))
    for seed in range(40):
        table.grad, matrix.grad = random_fp64(10, 24, seed=seed).float(), random_fp64(40, 24, seed=seed + 100).float()
        twins[0].grad, twins[1].grad = table.grad.clone(), matrix.grad.clone()
        before = [matrix.detach().clone(), twins[1].detach().clone()]
        muonmesh.step()
        adamw.step()
    assert torch.equal(table, twins[0])
    steps = [after.detach() - old * (1 - 0.002 * 0.3) for after, old in zip((matrix, twins[1]), before, strict=True)]
    rms = [float(step.square().mean().sqrt()) / 0.002 for step in steps]
    assert rms[0] == pytest.approx(0.2 * math.sqrt(24 / 24), rel=0.05)  # 24 singular values of about 1 in 40 × 24
    assert 0.5 < rms[1] / rms[0] < 2


# ------------------------------------------------------------------ what it returns


def test_a_configuration_speaks_of_both_halves() -> None:
    config = {"lr": 1e-3, "muon_lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "betas": [0.9, 0.98], "eps": 1e-9}
    settings = mm.convert_settings("deepspeed", **config)
    assert (settings["lr"], settings["momentum"], settings["adamw"]["lr"]) == (0.02, 0.9, 1e-3)
    optimizer = mm.from_model(nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 8), nn.Linear(8, 5)), **settings)
    by_name = {group["name"]: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups}
    assert by_name["muon"] == (0.02, 0.1)
    assert by_name["adamw.embeddings"] == (1e-3, 0.1)
    assert by_name["adamw.vectors"] == (1e-3, 0.0)
    assert optimizer.param_groups[1]["adamw_betas"] == (0.9, 0.98)


def test_megatron_s_configuration() -> None:
    settings = mm.convert_settings(
        "megatron", lr=1e-3, weight_decay=0.1, adam_beta2=0.98, muon_extra_scale_factor=0.2, muon_momentum=0.9
    )
    same = mm.convert_settings(
        "emerging_optimizers", lr=1e-3, weight_decay=0.1, extra_scale_factor=0.2, momentum=0.9, nesterov=False
    )
    rest = settings.pop("adamw")
    assert settings == same
    assert rest == {
        "lr": 1e-3,
        "weight_decay": 0.1,
        "decay_mode": "full",
        "adamw_betas": (0.9, 0.98),
        "adamw_eps": 1e-8,
    }


def test_fields_of_megatron_s_later_configuration() -> None:
    nesterov = mm.convert_settings("megatron", lr=1e-3, muon_nesterov=True, muon_coefficient_type="polar_express")
    assert nesterov["nesterov"] is mm.convert_settings("megatron", lr=1e-3, muon_use_nesterov=True)["nesterov"] is True
    assert nesterov["ns_coefficients"] == "polar_express"
    assert mm.convert_settings("megatron", lr=1e-3, optimizer="dist_muon")["nesterov"] is False
    for wrong in ({"optimizer": "adaptive_muon"}, {"muon_scalar_optimizer": "lion"}, {"muon_coefficient_type": "own"}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}: found .* which muonmesh has no counterpart for"):
            mm.convert_settings("megatron", lr=1e-3, **wrong)


def test_a_scheduler_s_first_rate_is_the_one_that_counts() -> None:
    adamw = torch.optim.AdamW([nn.Parameter(random_fp64(4, 6))], lr=torch.tensor(0.25))
    torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: step / 100)  # warm-up: the rate is 0 now
    assert mm.convert_settings(adamw)["lr"] == 0.25


def test_groups_of_vectors_that_do_not_decay_are_as_ours() -> None:
    matrix, bias = nn.Parameter(random_fp64(4, 6)), nn.Parameter(random_fp64(6))
    adamw = torch.optim.AdamW([{"params": [matrix]}, {"params": [bias], "weight_decay": 0.0}], weight_decay=0.3)
    assert mm.convert_settings(adamw)["weight_decay"] == 0.3


@pytest.mark.parametrize(("key", "value"), [("lr", 0.5), ("betas", (0.5, 0.6)), ("eps", 1e-3)])
def test_vectors_that_do_not_decay_keep_their_other_settings(key: str, value: Any) -> None:
    groups = [
        {"params": [nn.Parameter(random_fp64(4, 6))], "weight_decay": 0.3},
        {"params": [nn.Parameter(random_fp64(6))], "weight_decay": 0.0, key: value},
    ]
    with pytest.raises(ValueError, match=rf"{key} .*; needed one for all of them\. Convert each group by itself"):
        mm.convert_settings(torch.optim.AdamW(groups))


def test_groups_that_differ_are_converted_with_the_name_of_their_own_package() -> None:
    matrices = [nn.Parameter(random_fp64(4, 6)) for _ in range(3)]
    muon = torch.optim.Muon(matrices[:1])
    adamw = torch.optim.AdamW([{"params": matrices[1:2]}, {"params": matrices[2:], "lr": 0.5}])
    with pytest.raises(ValueError, match=r'lr 0\.001 and 0\.5; .* \*\*convert_settings\("adamw", group\)'):
        mm.convert_settings(muon, adamw)
    assert mm.convert_settings("adamw", adamw.param_groups[1])["lr"] == 0.5


def test_each_group_of_many_is_converted_by_itself() -> None:
    """KellerJordan's own example has a rate for head, embedding and scalars each."""
    matrix, head, table = (nn.Parameter(random_fp64(*shape)) for shape in ((6, 6), (4, 6), (4, 6)))
    peer_groups = [
        {"params": [head], "lr": 0.22, "betas": (0.8, 0.95), "eps": 1e-10, "use_muon": False},
        {"params": [table], "lr": 0.6, "betas": (0.8, 0.95), "eps": 1e-10, "use_muon": False},
        {"params": [matrix], "lr": 0.05, "momentum": 0.95, "use_muon": True},
    ]
    with pytest.raises(ValueError, match=r"lr.*0\.22.*0\.6.*; needed .*\. Convert each group by itself"):
        mm.convert_settings("keller_jordan", *peer_groups)
    groups = [
        {
            "params": group["params"],
            "algorithm": "muon" if group["use_muon"] else "adamw",
            **mm.convert_settings("keller_jordan", group),
        }
        for group in peer_groups
    ]
    optimizer = mm.Muon(groups)
    assert [group["lr"] for group in optimizer.param_groups] == [0.22, 0.6, 0.05]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0, 0, 0]
    assert optimizer.param_groups[0]["adamw_eps"] == 1e-10


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("torch", {"momentun": 0.9}, "'momentun'"),
    ("adamw", {"amsgrad": True}, "amsgrad"),
    ("adamw", {"maximize": True}, "maximize"),
    ("dion", {"algorithm": "lion"}, "lion"),
    ("dion", {"use_gram_newton_schulz": True}, "use_gram_newton_schulz"),
    ("dion", {"split_sizes": (4, 4)}, "split_sizes"),
    ("deepspeed", {"per_head_muon": True}, "per_head_muon"),
    ("emerging_optimizers", {"weight_update_hook": "hyperball"}, "weight_update_hook"),
    ("megatron", {"lr": 3e-4, "optimizer": "adam"}, "optimizer"),
    ("megatron", {"lr": 3e-4, "muon_split_qkv": False}, "muon_split_qkv"),
    ("emerging_optimizers", {"weight_decay_method": "l2"}, "weight_decay_method"),
    ("emerging_optimizers", {"coefficient_type": "aol"}, "coefficient_type"),
    ("torch", {"adjust_lr_fn": "new"}, "adjust_lr_fn"),
    ("lion", {}, "'lion'"),
]


@pytest.mark.parametrize(("name", "settings", "words"), REFUSED, ids=[f"{row[0]}{i}" for i, row in enumerate(REFUSED)])
def test_what_has_no_counterpart_is_refused(name: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=rf"{words}.*; needed "):
        mm.convert_settings(name, **settings)


class DecoupledAdamW(torch.optim.AdamW):
    """As composer's: the decay is not multiplied by the rate."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1 - group["weight_decay"])
        return None


class NamedAdamW(torch.optim.AdamW):
    """A class of another name alone."""


def test_a_subclass_with_another_step_is_refused() -> None:
    matrix = nn.Parameter(random_fp64(4, 6))
    with pytest.raises(TypeError, match=r"DecoupledAdamW; needed an optimizer .* of a package that is known"):
        mm.convert_settings(DecoupledAdamW([matrix], weight_decay=1e-4))
    assert mm.convert_settings(NamedAdamW([matrix], weight_decay=0.3))["weight_decay"] == 0.3


def test_a_decay_in_a_tensor_is_a_number() -> None:
    """dion takes one, so that a CUDA graph reads it."""
    settings = mm.convert_settings("dion", weight_decay=torch.tensor(0.25), lr=torch.tensor([0.5]))
    assert (settings["weight_decay"], settings["adamw"]["weight_decay"], settings["lr"]) == (0.25, 0.25, 0.5)
    mm.Muon([nn.Parameter(random_fp64(4, 6))], **{key: value for key, value in settings.items() if key != "adamw"})


def test_optimizers_that_do_not_say_how_they_step_are_refused() -> None:
    with pytest.raises(TypeError, match=r"SGD.*; needed .*\. Write convert_settings\("):
        mm.convert_settings(torch.optim.SGD([nn.Parameter(random_fp64(4, 6))], lr=0.1))
    adam = torch.optim.Adam([nn.Parameter(random_fp64(4, 6))], weight_decay=0.1)
    with pytest.raises(ValueError, match="decoupled"):
        mm.convert_settings(adam)
    muon = torch.optim.Muon([nn.Parameter(random_fp64(4, 6))])
    with pytest.raises(ValueError, match="settings beside an optimizer"):
        mm.convert_settings(muon, lr=0.1)
