"""The figures of `Muon.metrics` are what the weights show, also of steps that change some matrices or none."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import muonmesh as mm
from muonmesh.step.runtime import Driver
from tests.support.workers import Pool

COVERS = ("report.metrics.measure", "step.elementwise_step.step_elementwise", "numerics.rules.parts.apply")

RATE = 0.01


def model_and_optimizer(rule: str, *, waits: bool) -> tuple[nn.Module, mm.Muon]:
    """Return a model and its optimizer, which steps as on a CPU or, if it never waits, as on a device."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 8))
    optimizer = mm.from_model(model, lr=RATE, rule=rule, weight_decay=0.0)
    optimizer._runtime.driver = Driver(waits)
    for _ in range(2):  # updates are recorded from the second call on
        backward(model, optimizer)
        optimizer.step()
        optimizer.metrics()
    return model, optimizer


def backward(model: nn.Module, optimizer: mm.Muon, factor: float = 1.0) -> None:
    optimizer.zero_grad()
    (factor * model(torch.randn(4, 16)).square().sum()).backward()


def updates(optimizer: mm.Muon) -> dict[str, float]:
    return {name: float(value) for name, value in optimizer.metrics().items() if "/update" in name}


def rms_of(differences: list[Tensor]) -> float:
    return math.sqrt(torch.cat([d.double().flatten() for d in differences]).square().mean())


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("rule", ["muon", "adamuon"])
def test_a_skipped_step_has_no_update(rule: str, waits: bool) -> None:
    """On a device it had that of the writes that were masked, which was NaN; on a CPU, that of the step before."""
    model, optimizer = model_and_optimizer(rule, waits=waits)
    assert len(updates(optimizer)) == 6
    backward(model, optimizer, math.nan)
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    assert optimizer.skipped
    assert updates(optimizer) == dict.fromkeys(updates(optimizer), 0.0)
    assert len(updates(optimizer)) == 6


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("rule", ["muon", "adamuon"])
def test_a_matrix_that_is_left_alone_has_no_update(rule: str, waits: bool) -> None:
    """A device counted the update that it had masked."""
    model, optimizer = model_and_optimizer(rule, waits=waits)
    backward(model, optimizer)
    weights = [model[0].weight, model[1].weight]
    weights[1].grad.zero_()
    before = [weight.detach().clone() for weight in weights]
    optimizer.step()
    assert torch.equal(weights[1], before[1])
    measured = rms_of([weight.detach() - old for weight, old in zip(weights, before, strict=True)])
    assert updates(optimizer)["muon/update_rms"] == pytest.approx(measured, rel=1e-3)


@pytest.mark.parametrize("waits", [True, False])
def test_a_parameter_without_a_gradient_so_far_has_a_momentum_of_zero(waits: bool) -> None:
    """A device keeps state of zeros for it, which counted; on a CPU the figure was √2 times too large."""
    layers = [nn.Linear(32, 32, bias=False) for _ in range(2)]
    optimizer = mm.Muon([layer.weight for layer in layers], lr=RATE)
    optimizer._runtime.driver = Driver(waits)
    layers[0].weight.grad = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    momentum = optimizer.state[layers[0].weight]["momentum_buffer"]
    measured = rms_of([momentum, torch.zeros_like(momentum)])
    assert float(optimizer.metrics()["group0/momentum_rms"]) == pytest.approx(measured, rel=1e-6)


def test_gradients_that_a_scaler_has_scaled_are_told_without_the_scale() -> None:
    """They were 1024 times too large, and jumped whenever the scaler changed its scale."""
    model, optimizer = model_and_optimizer("muon", waits=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    optimizer.zero_grad()
    scaler.scale(model(torch.randn(4, 16)).square().sum()).backward()
    gradients = [model[0].weight.grad, model[1].weight.grad]
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2048.0
    measured = rms_of([gradient / 1024 for gradient in gradients])
    assert optimizer.metrics()["muon/gradient_rms"] == pytest.approx(measured, rel=1e-6)
    optimizer.zero_grad()
    scaler.scale(model(torch.randn(4, 16)).square().sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    measured = rms_of([model[0].weight.grad, model[1].weight.grad])
    assert optimizer.metrics()["muon/gradient_rms"] == pytest.approx(measured, rel=1e-6)


def experts_of_which_one_has_no_tokens() -> list[dict[str, float]]:
    """Return the figures of a stack of two experts on two ranks, and in one process."""
    random = torch.Generator().manual_seed(0)
    start, gradient = (torch.randn(2, 8, 12, generator=random) for _ in range(2))
    gradient[1] = 0
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    figures = []
    for sharded in (True, False):

        def placed(value: Tensor, sharded: bool = sharded) -> Tensor:
            return distribute_tensor(value.clone(), mesh, [Shard(0)], src_data_rank=None) if sharded else value.clone()

        experts = nn.Parameter(placed(start))
        group: dict[str, Any] = {"name": "experts", "params": [experts], "matrices": ["stack"], "algorithm": "muon"}
        optimizer = mm.Muon([group], lr=RATE, process_group=None if sharded else "local")
        for _ in range(2):
            experts.grad = placed(gradient)
            optimizer.step()
            measured = optimizer.metrics()
        figures.append(measured)
    return figures


def test_experts_without_tokens_count_whichever_rank_stores_them(workers: Any) -> None:
    """The rank that has no other matrix left its weights out, so that the figures were √2 times too large."""
    pool: Pool = workers(2)
    for sharded, alone in pool.run(experts_of_which_one_has_no_tokens):
        assert sharded.keys() == alone.keys()
        assert sharded == pytest.approx(alone, rel=1e-12)
