"""torch.compile around the optimizer: the step itself runs as it is, with the same bits."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import muonmesh as mm

Step = Callable[[Tensor], Any]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 4))


def whole(net: nn.Module, optimizer: mm.Muon) -> Step:
    def step(x: Tensor) -> Any:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.clip_grad_norm_(0.5)
        return optimizer.step()

    return step


def whole_compiled(net: nn.Module, optimizer: mm.Muon) -> Step:
    compiled: Step = torch.compile(whole(net, optimizer), backend="aot_eager")
    return compiled


def only_step(net: nn.Module, optimizer: mm.Muon) -> Step:
    compiled = torch.compile(optimizer.step, backend="aot_eager")

    def step(x: Tensor) -> Any:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.clip_grad_norm_(0.5)
        return compiled()

    return step


def with_closure(net: nn.Module, optimizer: mm.Muon) -> Step:
    compiled = torch.compile(optimizer.step, backend="aot_eager")

    def step(x: Tensor) -> Any:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = net(x).square().mean()
            loss.backward()
            optimizer.clip_grad_norm_(0.5)
            return loss

        return compiled(closure)

    return step


def compiled_clipping(net: nn.Module, optimizer: mm.Muon) -> Step:
    clip = torch.compile(lambda: optimizer.clip_grad_norm_(0.5), backend="aot_eager")

    def step(x: Tensor) -> Any:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        clip()
        return optimizer.step()

    return step


def around_backward(net: nn.Module, optimizer: mm.Muon) -> Step:
    @torch.compile(backend="aot_eager")
    def finish() -> None:
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()

    def step(x: Tensor) -> Any:
        net(x).square().mean().backward()
        finish()

    return step


@pytest.mark.parametrize("how", [whole_compiled, only_step, with_closure, compiled_clipping, around_backward])
@pytest.mark.parametrize("lr", [0.05, torch.tensor(0.05, dtype=torch.float64)], ids=["number", "tensor"])
def test_three_compiled_steps_are_those_of_an_uncompiled_optimizer(how: Any, lr: Any) -> None:
    net = model()
    twin = copy.deepcopy(net)
    optimizer, other = mm.from_model(net, lr=lr), mm.from_model(twin, lr=lr)
    plain, compiled = whole(net, optimizer), how(twin, other)
    for number in range(3):
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(number))
        plain(x)
        compiled(x)
        for a, b in zip(net.parameters(), twin.parameters(), strict=True):
            assert torch.equal(a, b)
            for key, value in optimizer.state[a].items():
                assert torch.equal(value, other.state[b][key]), key


@pytest.mark.slow
def test_the_default_backend_takes_it_too() -> None:
    net = model()
    twin = copy.deepcopy(net)
    optimizer, other = mm.from_model(net, lr=0.05), mm.from_model(twin, lr=0.05)
    compiled = torch.compile(other.step)
    for number in range(3):
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(number))
        for module, step in ((net, optimizer.step), (twin, compiled)):
            module.zero_grad()
            module(x).square().mean().backward()
            step()
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("how", [only_step, whole_compiled])
def test_fullgraph_says_that_the_step_is_no_graph(how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    net = model()
    before = copy.deepcopy(net)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, fullgraph=True))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="optimizer"):
        how(net, mm.from_model(net, lr=0.05))(torch.randn(8, 12))
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), before.parameters(), strict=True))
