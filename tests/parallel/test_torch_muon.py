"""A torch.optim.Muon that muonmesh executes: torch's step in one process, and the same bits in every layout."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

import muonmesh as mm
from tests import gathered, layouts, problem
from tests.meshes import mesh_of

STEPS = 4
SETTINGS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
MATRICES = [name for name, (_, spec) in problem.PARAMETERS.items() if spec == "whole"]


def values() -> dict[str, Tensor]:
    return {name: value for name, value in problem.initial().items() if name in MATRICES}


def gradients(step: int) -> dict[str, Tensor]:
    return {name: value for name, value in problem.gradients(step).items() if name in MATRICES}


def named(model: nn.Module, dtype: torch.dtype = torch.float32, **settings: Any) -> torch.optim.Muon:
    return torch.optim.Muon(list(model.to(dtype).named_parameters()), **{**SETTINGS, **settings})


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> dict[str, Tensor]:
    for step in range(steps):
        for name, gradient in gradients(step).items():
            parameter = model.get_parameter(name)
            parameter.grad = problem.placed_like(parameter, gradient)
        optimizer.step()
    return problem.result(model, optimizer)


def alone(dtype: torch.dtype = torch.float32, **settings: Any) -> dict[str, Tensor]:
    model = problem.Bag(values())
    return stepped(model, mm.execute(named(model, dtype, **settings), process_group="local"))


# ------------------------------------------------------------------ one process


@pytest.mark.parametrize("adjust_lr_fn", [None, "match_rms_adamw"])
@pytest.mark.parametrize(
    ("dtype", "nesterov"),
    [(torch.float32, True), (torch.float32, False), (torch.float64, True), (torch.bfloat16, True)],
)
def test_it_is_torchs_step(dtype: torch.dtype, nesterov: bool, adjust_lr_fn: str | None) -> None:
    """Its momentum bit for bit. Torch adds the update to weights by one rounding, which depends on the layout.

    Left out is bf16 without Nesterov: torch 2.13 normalizes the momentum itself there, in place.
    """
    settings = {"nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn, "ns_steps": 4}
    model = problem.Bag(values())
    theirs = stepped(model, named(model, dtype, **settings))
    ours = alone(dtype, **settings)
    for name in MATRICES:
        key = f"{name}.momentum_buffer"
        assert ours[key].dtype == dtype
        assert torch.equal(ours[key], theirs[key]), name
        step = (theirs[name] - values()[name].to(dtype)).abs().max()
        allowed = 2 * STEPS * torch.finfo(dtype).eps * theirs[name].abs().max()
        assert allowed < step / 3 or dtype == torch.bfloat16
        assert (ours[name] - theirs[name]).abs().max() <= allowed, name


def test_everything_of_torchs_goes_on() -> None:
    """Hooks, a closure, a schedule, a state dict there and back, a copy, a pickle, a group that comes later."""
    model = problem.Bag(values())
    optimizer = named(model)
    assert mm.execute(optimizer) is optimizer
    assert isinstance(optimizer, torch.optim.Muon)
    assert mm.convert_settings(optimizer) == mm.convert_settings(named(model))
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def closure() -> float:
        assert torch.is_grad_enabled()
        for name, gradient in gradients(0).items():
            model.get_parameter(name).grad = gradient
        return 3.0

    assert optimizer.step(closure) == 3.0
    assert called == ["before", "after"]
    schedule.step()
    other = problem.Bag({name: p.detach() for name, p in model.named_parameters()})
    stock = named(other, lr=1.0)
    stock.load_state_dict(optimizer.state_dict())
    for made in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        copied = [parameter for group in made.param_groups for parameter in group["params"]]
        for parameter, name in zip(copied, MATRICES, strict=True):
            parameter.grad = gradients(1)[name]
        made.step()
        for parameter, expected in zip(copied, stepped_once(other, stock), strict=True):
            assert torch.allclose(parameter, expected, rtol=0, atol=1e-6)
        stock.load_state_dict(optimizer.state_dict())
    assert stock.param_groups[0]["lr"] == 0.01
    late = nn.Parameter(torch.eye(4))
    optimizer.add_param_group({"params": [("late", late)]})
    late.grad = torch.eye(4)
    optimizer.step()
    assert not torch.equal(late, torch.eye(4))


def stepped_once(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    twin, other = copy.deepcopy((model, optimizer))
    for name, gradient in gradients(1).items():
        twin.get_parameter(name).grad = gradient
    other.step()
    return list(twin.parameters())


def test_clipping_is_by_one_norm() -> None:
    model = problem.Bag(values())
    optimizer = mm.execute(named(model))
    for name, gradient in gradients(2).items():
        model.get_parameter(name).grad = gradient
    expected = sum(float(gradient.double().square().sum()) for gradient in gradients(2).values()) ** 0.5
    assert float(optimizer.clip_grad_norm_(1.0, policy="all")) == pytest.approx(expected, rel=1e-12)
    assert not optimizer.clip_grad_norm_(1.0, skip_above=1e9).skipped


def test_what_is_not_torchs_muon_is_refused() -> None:
    layer = nn.Linear(3, 3)
    with pytest.raises(TypeError, match=r"found a AdamW; needed a torch\.optim\.Muon\. Write muonmesh\.from_model"):
        mm.execute(torch.optim.AdamW(layer.parameters()))
    optimizer = torch.optim.Muon([layer.weight])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(TypeError, match="Call execute before you make them"):
        mm.execute(optimizer)
    del schedule
    half = nn.Parameter(torch.eye(3, dtype=torch.bfloat16))
    mixed = mm.execute(torch.optim.Muon([layer.weight, half]))
    with pytest.raises(TypeError, match=r"found parameters of torch\.bfloat16 and torch\.float32; needed one dtype"):
        mixed.step()


# ------------------------------------------------------------------ ranks


def held(layout: str, dtype: torch.dtype) -> list[str]:
    model, group = problem.hold(layout, {name: value.to(dtype) for name, value in values().items()})
    optimizer = mm.execute(named(model, dtype), process_group=group or "auto")
    return problem.differing(stepped(model, optimizer), alone(dtype))


@pytest.mark.parametrize("layout", problem.LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_on_three_ranks(workers, layout: str, dtype: torch.dtype) -> None:
    assert workers(3).run(held, layout, dtype) == [[]] * 3


def on_mesh(name: str) -> list[str]:
    sizes, place = layouts.MESHES[name]
    there = layouts.dtensors(problem.PARAMETERS, values(), mesh_of(sizes), lambda _, shape: place(len(shape)))
    optimizer = mm.execute(torch.optim.Muon(list(there.tensors.items()), **SETTINGS))
    for step in range(STEPS):
        there.give(gradients(step))
        optimizer.step()
    return problem.differing(there.whole(optimizer), alone())


@pytest.mark.parametrize("name", ["hsdp", "rows by cols", "fsdp over colwise", "fsdp over rowwise", "three axes"])
def test_the_same_bits_on_meshes(workers, name: str) -> None:
    assert workers(4).run(on_mesh, name) == [[]] * 4


def resumed() -> list[str]:
    """Torch's own checkpoint functions take its state from one layout to another."""
    model, _ = problem.hold("fsdp", values())
    optimizer = mm.execute(named(model))
    stepped(model, optimizer, 2)
    saved = get_optimizer_state_dict(model, optimizer)
    fresh = problem.Bag(gathered.whole(dict(model.named_parameters())))
    whole = mm.execute(named(fresh), process_group="world")
    state = {
        number: {key: problem.whole(value) for key, value in saved["state"][name].items()}
        for number, name in enumerate(MATRICES)
    }
    whole.load_state_dict({"state": state, "param_groups": whole.state_dict()["param_groups"]})
    set_optimizer_state_dict(model, optimizer, saved)
    return problem.differing(stepped(fresh, whole, 2), stepped(model, optimizer, 2))


def test_its_state_moves_between_layouts(workers) -> None:
    assert workers(2).run(resumed) == [[]] * 2


def under_ddp(overflows: bool) -> tuple[bool, float, list[str]]:
    """DDP is found, and an overflow on one rank stops all."""
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False))
    for number, parameter in enumerate(model.parameters()):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
    wrapped = DistributedDataParallel(model)
    optimizer = mm.execute(torch.optim.Muon(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(wrapped(torch.eye(8)).square().sum()).backward()
    if overflows and dist.get_rank() == 1:
        next(model.parameters()).grad[0, 0] = float("inf")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    scaler.step(optimizer)
    scaler.update()
    moved = [parameter.detach() for parameter in model.parameters()]
    same = all(torch.equal(one, other) for one, other in zip(moved, before, strict=True))
    return same, float(sum(one.double().sum() for one in moved)), sorted(optimizer.state_dict())


@pytest.mark.parametrize("overflows", [False, True])
def test_under_ddp_and_a_gradient_scaler(workers, overflows: bool) -> None:
    (same, total, _), (other, also, _) = workers(2).run(under_ddp, overflows)
    assert same == other == overflows
    assert total == also
