"""A step on one GPU: what the fp64 oracle says, and a host that never waits for the device."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

import muonmesh as mm
from tests.gpu import DEVICE, pytestmark  # noqa: F401, the mark is read by pytest
from tests.gpu.ranks import on
from tests.support import problem


def after_steps(count: int, dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[nn.Module, mm.Muon]:
    """The problem's parameters on the device after so many steps."""

    def gradients(step: int) -> dict[str, Any]:
        return on(DEVICE, problem.gradients(step))

    values = on(DEVICE, {name: value.to(dtype) for name, value in problem.initial().items()})
    *_, last = problem.steps("local", count, values, gradients, **settings)
    return last


# Relative to the parameter and to what the steps changed of it.
@pytest.mark.parametrize(
    ("dtype", "of_parameter", "of_update"), [(torch.float32, 1e-5, 1e-3), (torch.bfloat16, 2e-2, 1e-1)]
)
def test_one_process_is_the_oracle(dtype: torch.dtype, of_parameter: float, of_update: float) -> None:
    expected, _ = problem.by_the_oracle(5)
    model, _ = after_steps(5, compute_dtype=dtype)
    for name, start in problem.initial().items():
        weight = model.get_parameter(name).detach().cpu().double()
        error = (weight - expected[name]).norm()
        assert error <= of_parameter * expected[name].norm(), name
        assert error <= of_update * (expected[name] - start.double()).norm(), name


def warm(dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[nn.Module, mm.Muon]:
    """A model whose first steps, which make state and plan, are done; gradients are set."""
    model, optimizer = after_steps(3, dtype, **settings)
    torch.cuda.synchronize()
    return model, optimizer


@pytest.mark.parametrize(
    "settings",
    [{}, {"dtype": torch.bfloat16, "master_dtype": torch.float32}],
    ids=["fp32", "bf16 with masters"],
)
def test_a_step_does_not_synchronise(settings: dict[str, Any]) -> None:
    model, optimizer = warm(**settings)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    moved = [n for n, p in model.named_parameters() if not torch.equal(p.detach(), before[n])]
    assert moved == list(before)  # it was a step


def test_the_host_returns_while_the_device_is_busy() -> None:
    _, optimizer = warm()
    optimizer.step()
    torch.cuda.synchronize()
    finished = torch.cuda.Event()  # type: ignore[no-untyped-call]
    torch.cuda._sleep(4_000_000_000)  # type: ignore[no-untyped-call]  # clock cycles: over a second
    begin = time.perf_counter()
    optimizer.step()
    took = time.perf_counter() - begin
    finished.record()
    assert not finished.query()  # type: ignore[no-untyped-call]
    assert took < 1.0
    torch.cuda.synchronize()


def test_a_matrix_without_a_gradient_is_left_alone_without_asking_the_device() -> None:
    model, optimizer = warm()
    for name in ("square", "experts"):
        gradient = model.get_parameter(name).grad
        assert gradient is not None
        (gradient if name == "square" else gradient[2]).zero_()
    alone = {"square": model.get_parameter("square"), "expert": model.get_parameter("experts")}
    momentum = {key: optimizer.state[parameter]["momentum_buffer"] for key, parameter in alone.items()}
    before = {key: (parameter.detach().clone(), momentum[key].clone()) for key, parameter in alone.items()}
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for tensor, start in zip((alone["square"], momentum["square"]), before["square"], strict=True):
        assert torch.equal(tensor, start)
    for tensor, start in zip((alone["expert"], momentum["expert"]), before["expert"], strict=True):
        assert torch.equal(tensor[2], start[2])
        for other in (0, 1, 3, 4):
            assert not torch.equal(tensor[other], start[other])


def test_state_is_on_the_device_and_gradients_are_not_written() -> None:
    model, optimizer = warm()
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, before[name]), name
        for key, value in optimizer.state[parameter].items():
            assert value.device == parameter.device, (name, key)
