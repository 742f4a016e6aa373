"""convert_settings and checkpoint.convert against the packages themselves: our steps end where peer_weights do.

All of them compute in bf16, and so do we here, so two steps of the same formula differ by about a percent; a setting
that is read wrongly differs by five or more. The formulas are compared to 1e-5 in `tests/tools/test_migration.py`.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator

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


PACKAGES = {"keller_jordan": "muon", "deepspeed": "deepspeed.runtime.zero.muon.original_muon"}
"""Which module each package's optimizer is in; both have the class under one name."""
NAMES = ("wide", "tall", "table")


def package_s(name: str, weights: Weights) -> Optimizer:
    matrices = {"params": [weights["wide"], weights["tall"]], "use_muon": True, "momentum": 0.9}
    rest = {"params": [weights["table"]], "use_muon": False, "lr": 0.002, "betas": (0.8, 0.9), "weight_decay": 0.2}
    kind = importlib.import_module(PACKAGES[name]).SingleDeviceMuonWithAuxAdam
    optimizer: Optimizer = kind([{**matrices, "lr": 0.03, "weight_decay": 0.4}, rest])
    return optimizer


def give(weights: Weights, seed: int) -> None:
    for number, name in enumerate(NAMES):
        weights[name].grad = random(*SHAPES[name], seed=10 * seed + number)


@pytest.mark.parametrize("before", [None, "optimizer", "state dict"])
@pytest.mark.parametrize("package", PACKAGES)
def test_our_next_steps_end_where_the_package_s_do(package: str, before: str | None) -> None:
    """Three steps from the start; or one after three of the package, with its state by `checkpoint.convert`."""
    peer_weights = {name: nn.Parameter(random(*SHAPES[name], seed=seed)) for seed, name in enumerate(NAMES)}
    peer = package_s(package, peer_weights)
    for seed in (1, 2, 3) if before else ():
        give(peer_weights, seed)
        peer.step()
    start = {name: weight.detach().clone() for name, weight in peer_weights.items()}
    weights = {name: nn.Parameter(value.clone()) for name, value in start.items()}
    settings = mm.convert_settings(peer)
    groups = [[(name, weights[name]) for name in names] for names in (NAMES[:2], NAMES[2:])]
    rest = {"params": groups[1], "algorithm": "adamw", **settings.pop("adamw")}
    optimizer = mm.Muon([{"params": groups[0]}, rest], **settings)
    if before:
        source = (peer, None) if before == "optimizer" else (peer.state_dict(), package)
        order = [[name for name, _ in group] for group in groups]
        state = checkpoint.convert(source[0], optimizer, package=source[1], params=order)  # type: ignore[arg-type]
        optimizer.load_state_dict(state)
    for seed in (4,) if before else (1, 2, 3):
        give(weights, seed)
        give(peer_weights, seed)
        optimizer.step()
        peer.step()
    with torch.no_grad():
        apart = {n: float((weights[n] - peer_weights[n]).norm() / (peer_weights[n] - start[n]).norm()) for n in NAMES}
    assert apart.pop("table") < 1e-4
    assert max(apart.values()) < 0.03, apart


def test_heads_that_deepspeed_orthogonalizes_by_themselves_are_refused() -> None:
    """`per_head_muon` in its configuration writes their number on the weights alone."""
    weights = {name: nn.Parameter(random(*SHAPES[name])) for name in NAMES}
    assert mm.convert_settings(package_s("deepspeed", weights))["lr"] == 0.03
    vars(weights["wide"])["muon_num_heads"] = 4
    with pytest.raises(
        ValueError, match=r"per_head_muon: found True, which muonmesh has no counterpart for; needed .*heads"
    ):
        mm.convert_settings(package_s("deepspeed", weights))


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
