"""convert_settings and checkpoint.convert against the packages themselves: our steps end where theirs do.

All of them compute in bf16, and so do we here, so two steps of the same formula differ by about a percent; a setting
that is read wrongly differs by five or more. The formulas are compared to 1e-5 in `tests/tools/test_migration.py`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import muonmesh as mm
from muonmesh import checkpoint
from tests.support.tensors import random

SHAPES = {"wide": (24, 40), "tall": (40, 24), "table": (10, 24)}
Weights = dict[str, nn.Parameter]


@pytest.fixture(autouse=True)
def _operations_one_by_one() -> Iterator[None]:
    """Several packages compile their steps; the same operations, without a minute of compiling."""
    with torch.compiler.set_stance("force_eager"):
        yield


def groups(weights: Weights, matrices: dict[str, Any], rest: dict[str, Any]) -> list[dict[str, Any]]:
    chosen = [weights["wide"], weights["tall"]]
    return [{"params": chosen, **matrices}, {"params": [weights["table"]], **rest}]


def keller_jordan(weights: Weights) -> Optimizer:
    from muon import SingleDeviceMuonWithAuxAdam

    matrices = {"use_muon": True, "lr": 0.03, "momentum": 0.9, "weight_decay": 0.4}
    rest = {"use_muon": False, "lr": 0.002, "betas": (0.8, 0.9), "weight_decay": 0.2}
    optimizer: Optimizer = SingleDeviceMuonWithAuxAdam(groups(weights, matrices, rest))
    return optimizer


def deepspeed(weights: Weights) -> Optimizer:
    from deepspeed.runtime.zero.muon.original_muon import SingleDeviceMuonWithAuxAdam

    matrices = {"use_muon": True, "lr": 0.03, "momentum": 0.9, "weight_decay": 0.4}
    rest = {"use_muon": False, "lr": 0.002, "betas": (0.8, 0.9), "weight_decay": 0.2}
    optimizer: Optimizer = SingleDeviceMuonWithAuxAdam(groups(weights, matrices, rest))
    return optimizer


def ends(package: Callable[[Weights], Optimizer], names: tuple[str, ...]) -> dict[str, float]:
    """How far our three steps end from theirs, relative to the way."""
    start = {name: random(*SHAPES[name], seed=seed) for seed, name in enumerate(names)}
    their_weights = {name: nn.Parameter(value.clone()) for name, value in start.items()}
    peer = package(their_weights)
    settings = mm.convert_settings(peer)
    rest = settings.pop("adamw")
    weights = {name: nn.Parameter(value.clone()) for name, value in start.items()}
    matrices = [weight for name, weight in weights.items() if name != "table"]
    optimizer = mm.Muon(
        [{"params": matrices}, {"params": [weights["table"]], "algorithm": "adamw", **rest}], **settings
    )
    for seed in (1, 2, 3):
        for name, weight in weights.items():
            weight.grad = random(*SHAPES[name], seed=10 * seed)
            their_weights[name].grad = weight.grad.clone()
        optimizer.step()
        peer.step()
    with torch.no_grad():
        return {
            name: float((weights[name] - their_weights[name]).norm() / (their_weights[name] - start[name]).norm())
            for name in names
        }


@pytest.mark.parametrize("package", [keller_jordan, deepspeed], ids=lambda package: package.__name__)
def test_our_steps_end_where_the_package_s_do(package: Callable[[Weights], Optimizer]) -> None:
    names = ("wide", "tall", "table")
    apart = ends(package, names)
    assert apart.pop("table") < 1e-4
    assert max(apart.values()) < 0.03, apart


@pytest.mark.parametrize("live", [True, False], ids=["optimizer", "state dict"])
@pytest.mark.parametrize("package", [keller_jordan, deepspeed], ids=lambda package: package.__name__)
def test_our_next_step_ends_where_the_package_s_does(package: Callable[[Weights], Optimizer], live: bool) -> None:
    """Three steps by the package, its state taken along by `checkpoint.convert`, and one more step by each."""
    names = ("wide", "tall", "table")
    their_weights = {name: nn.Parameter(random(*SHAPES[name], seed=seed)) for seed, name in enumerate(names)}
    peer = package(their_weights)

    def give(weights: Weights, seed: int) -> None:
        for name, weight in weights.items():
            weight.grad = random(*SHAPES[name], seed=10 * seed + names.index(name))

    for seed in (1, 2, 3):
        give(their_weights, seed)
        peer.step()
    start = {name: weight.detach().clone() for name, weight in their_weights.items()}
    weights = {name: nn.Parameter(value.clone()) for name, value in start.items()}
    settings = mm.convert_settings(peer)
    rest = settings.pop("adamw")
    groups = [
        [(name, weight) for name, weight in weights.items() if (name == "table") == last] for last in (False, True)
    ]
    optimizer = mm.Muon([{"params": groups[0]}, {"params": groups[1], "algorithm": "adamw", **rest}], **settings)
    order = [[name for name, _ in group] for group in groups]
    source = (peer, None) if live else (peer.state_dict(), package.__name__)
    state = checkpoint.convert(source[0], optimizer, package=source[1], params=order)  # type: ignore[arg-type]
    optimizer.load_state_dict(state)
    for weight_set in (weights, their_weights):
        give(weight_set, 4)
    optimizer.step()
    peer.step()
    with torch.no_grad():
        apart = {
            name: float((weights[name] - their_weights[name]).norm() / (their_weights[name] - start[name]).norm())
            for name in names
        }
    assert apart.pop("table") < 1e-4
    assert max(apart.values()) < 0.03, apart


def test_the_defaults_are_the_package_s() -> None:
    from muonmesh.tools.migration.package import WITHOUT
    from muonmesh.tools.migration.packages import PACKAGES

    classes = {"torch": torch.optim.Muon, "adamw": torch.optim.AdamW}
    if sys.version_info >= (3, 12):  # what Emerging-Optimizers needs
        from emerging_optimizers.orthogonalized_optimizers import Muon as EmergingMuon

        classes["emerging_optimizers"] = EmergingMuon
    for name, optimizer in classes.items():
        arguments = inspect.signature(optimizer.__init__).parameters
        package = PACKAGES[name]
        assert {key: package.defaults[key] for key in package.defaults if key in arguments} == {
            key: arguments[key].default for key in package.defaults if key in arguments
        }
        assert arguments.keys() - {"self", "params"} <= {*package.defaults, *WITHOUT, *package.beside}
