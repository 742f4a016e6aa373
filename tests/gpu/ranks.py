"""What ranks do together on one device: each function returns what differs from one process on the same device.

A device is "cuda", whose ranks share one GPU and talk over NCCL, or "cpu", whose ranks talk over gloo. The functions
run in the ranks of `tests.support.workers`, with the device as their first argument.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import muonmesh as mm
from tests.support import cases, gathered, layouts, problem
from tests.support.meshes import mesh_of

STEPS = 3
EXACT = {"compute_dtype": torch.bfloat16}
"""Products of bf16 are muonmesh's own, which have the same bits in every batch."""


def on(device: str, tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in tensors.items()}


def by_how_much(alone: dict[str, Tensor], many: dict[str, Tensor]) -> dict[str, float]:
    """By how much tensors differ, relative to their norms, where a bit differs."""
    pairs = {name: (many[name].double(), alone[name].double()) for name in problem.differing(alone, many)}
    return {name: float((a - b).norm() / b.norm().clamp(min=1e-30)) for name, (a, b) in pairs.items()}


# ---------------------------------------------------------------- layouts and settings


def placed_in(device: str, layout: str, values: dict[str, Tensor]) -> layouts.Held:
    """Parameters in a layout of `tests.support.problem` or on a mesh of `tests.support.layouts`."""
    if layout in layouts.MESHES:
        sizes, placements_for = layouts.MESHES[layout]

        def placements(_: str, shape: tuple[int, ...]) -> Any:
            return placements_for(len(shape))

        return layouts.dtensors(problem.PARAMETERS, values, mesh_of(sizes, kind=device), placements)
    return cases.in_module(layout, values)


def with_optimizer(device: str, layout: str, seed: int = 0, **settings: Any) -> tuple[layouts.Held, mm.Muon]:
    placed = placed_in(device, layout, on(device, problem.initial(seed)))
    return placed, mm.Muon(placed.groups, **placed.settings, **{**problem.SETTINGS, **EXACT, **settings})


def advance(device: str, placed: layouts.Held, optimizer: mm.Muon, steps: Iterable[int]) -> None:
    for step in steps:
        placed.give(on(device, problem.gradients(step)))
        optimizer.step()


def stepped(
    device: str,
    layout: str,
    gradients_of: Callable[[int], dict[str, Any]] = problem.gradients,
    steps: int = STEPS,
    rule: str | None = None,
    **settings: Any,
) -> dict[str, Tensor]:
    """Parameters and state, whole, after some steps."""
    holding = placed_in(device, layout, on(device, problem.initial()))
    for group in holding.groups:
        if rule is not None and group["algorithm"] == "muon":
            group["algorithm"] = rule
    optimizer = mm.Muon(holding.groups, **holding.settings, **{**problem.SETTINGS, **EXACT, **settings})
    for step in range(steps):
        holding.give(on(device, gradients_of(step)))
        optimizer.step()
    return holding.whole(optimizer)


def of_layout(device: str, layout: str, rule: str | None = None, **settings: Any) -> dict[str, float]:
    """Some matrices have no gradient, or zeros, from the third step on.

    State of which each rank keeps its own part without saying so (int8's scales, SOAP's bases) is not compared.
    """
    alone = {key: value for key, value in settings.items() if key not in ("shard_state", "memory_budget_mb")}
    alone_result = stepped(device, "local", problem.zeroed, rule=rule, **alone)
    many = stepped(device, layout, problem.zeroed, rule=rule, **settings)
    compared = [key for key in alone_result if key in problem.PARAMETERS or alone_result[key].shape == many[key].shape]
    return by_how_much(*({key: values[key] for key in compared} for values in (alone_result, many)))


# ---------------------------------------------------------------- clipping and loss scales


def clipped(device: str, layout: str, policy: str) -> dict[str, float]:
    """Norms within rounding, since their terms add up in another order; then weights by the same relative amount."""

    def run(layout_name: str) -> tuple[list[float], dict[str, Tensor]]:
        holding, optimizer = with_optimizer(device, layout_name)
        norms = []
        for step in range(STEPS):
            holding.give(on(device, problem.gradients(step)))
            norms.append(float(optimizer.clip_grad_norm_(1.5, policy=policy).total))
            optimizer.step()
        return norms, holding.whole(optimizer)

    (expected, alone), (norms, many) = run("local"), run(layout)
    oracle = [
        math.sqrt(sum(float(value.double().square().sum()) for value in problem.gradients(step).values()))
        for step in range(STEPS)
    ]
    wrong = {
        f"norm {n} {run_name}": norm
        for run_name, run_norms in (("alone", expected), ("on ranks", norms))
        for n, (norm, exact) in enumerate(zip(run_norms, oracle, strict=True))
        if abs(norm - exact) > 1e-5 * exact
    }
    return wrong | {name: error for name, error in by_how_much(alone, many).items() if error > 1e-5}


def overflow(device: str, layout: str) -> dict[str, Any]:
    """The second of three steps overflows on the last rank alone: all ranks skip it, and all halve their scales."""
    holding, optimizer = with_optimizer(device, layout)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=100)
    scaler.scale(torch.ones((), device=device))  # as the loss would be
    scales = []
    for step in range(3):
        holding.give(on(device, {n: g * scaler.get_scale() for n, g in problem.gradients(step).items()}))
        if step == 1 and dist.get_rank() == dist.get_world_size() - 1:
            gradients = [p.grad for p in holding.tensors.values()]
            shards = [g.to_local() if hasattr(g, "to_local") else g for g in gradients if g is not None]
            next(shard for shard in shards if shard.numel()).view(-1)[:1] = math.inf
        scaler.step(optimizer, scaler=scaler)
        scaler.update()
        scales.append(scaler.get_scale())
    alone, optimizer_alone = with_optimizer(device, "local")
    advance(device, alone, optimizer_alone, (0, 2))
    wrong = {} if scales == [2.0**10, 2.0**9, 2.0**9] else {"scales": scales}
    return wrong | by_how_much(alone.whole(optimizer_alone), holding.whole(optimizer))


# ---------------------------------------------------------------- checkpoints


def saved(device: str, layout: str, folder: str) -> None:
    holding, model, optimizer = _for_a_checkpoint(device, layout, 0)
    advance(device, holding, optimizer, range(1))
    mm.checkpoint.save(folder, model, optimizer)


def loaded(device: str, layout: str, folder: str) -> dict[str, float]:
    """Go on from a checkpoint of any layout; what then differs from one process that never stopped."""
    holding, model, optimizer = _for_a_checkpoint(device, layout, 7)
    mm.checkpoint.load(folder, model, optimizer)
    advance(device, holding, optimizer, range(1, STEPS))
    return by_how_much(stepped(device, "local"), holding.whole(optimizer))


def _for_a_checkpoint(device: str, layout: str, seed: int) -> tuple[layouts.Held, nn.Module, mm.Muon]:
    holding, optimizer = with_optimizer(device, layout, seed)
    model = problem.Bag({})
    for name, tensor in holding.tensors.items():
        model.put(name, tensor)
    return holding, model, optimizer


# ---------------------------------------------------------------- real forward and backward passes


class Exact(nn.Module):
    """Its gradients are what the forward is given: small integers, so that every way to their mean is exact."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(20, 33), nn.Linear(33, 20)

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        return torch.stack([(p * gradients[name]).sum() for name, p in self.named_parameters()]).sum()


def drawn(step: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {n: torch.randint(-4, 5, p.shape, generator=generator).float() for n, p in Exact().named_parameters()}


def straight_to_owners(device: str) -> dict[str, float]:
    """DDP's replicas send gradients to owners; one process is given their mean."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    index = [0] if device == "cuda" else None
    net = DistributedDataParallel(Exact().to(device), device_ids=index)
    settings: dict[str, Any] = {"lr": 0.02, "overrides": {"(module.)?(first|second).weight": "muon"}, **EXACT}
    optimizer = mm.from_model(net, process_group="world", gradients="to_owners", **settings)
    single = Exact().to(device)
    alone = mm.from_model(single, process_group="local", **settings)
    for step in range(STEPS):
        net(on(device, drawn(step, rank))).backward()
        optimizer.step()
        optimizer.zero_grad()
        many = [drawn(step, other) for other in range(ranks)]
        for name, parameter in single.named_parameters():
            parameter.grad = torch.stack([gradients[name] for gradients in many]).mean(0).to(device)
        alone.step()
    weights = {name.removeprefix("module."): p.detach().cpu() for name, p in net.named_parameters()}
    return by_how_much({name: p.detach().cpu() for name, p in single.named_parameters()}, weights)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def trained(device: str, how: str) -> dict[str, Any]:
    """Train under "fsdp", "tp" or "fsdp of tp" by real passes; one process is given the gradients, whole."""
    ranks, model = dist.get_world_size(), network().to(device)
    sizes = {"fsdp": (ranks, 1), "tp": (1, ranks), "fsdp of tp": (2, ranks // 2)}[how]
    mesh = init_device_mesh(device, sizes, mesh_dim_names=("data", "tensor"))
    for block in model:
        if how != "fsdp":
            parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if how != "tp":
            fully_shard(block, mesh=mesh["data"])
    if how != "tp":
        fully_shard(model, mesh=mesh["data"])
    settings: dict[str, Any] = {"lr": 0.02, "overrides": {".*(up|down).weight": "muon"}, **EXACT}
    optimizer = mm.from_model(model, **settings)
    single = network().to(device)
    alone = mm.from_model(single, process_group="local", **settings)
    before = {name: p.detach().cpu().clone() for name, p in single.named_parameters()}
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(ranks, 8, 32, generator=generator)[dist.get_rank() if how == "fsdp" else 0].to(device)
        model(x).square().mean().backward()
        gradients = gathered.whole({name: p.grad for name, p in model.named_parameters()})  # type: ignore[misc]
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in single.named_parameters():
            parameter.grad = gradients[name].to(device)
        alone.step()
    after = {name: p.detach().cpu() for name, p in single.named_parameters()}
    wrong: dict[str, Any] = {f"{name} has not moved": 0.0 for name in after if torch.equal(before[name], after[name])}
    return wrong | by_how_much(after, gathered.whole(dict(model.named_parameters())))


def deepspeed_engine(device: str, stage: int) -> list[str]:
    """DeepSpeed's engine in fp32 weights; its own reductions of exact gradients."""
    from tests.hosts import deepspeed_engine as ds

    assert ds.get_accelerator().device_name() == device
    return ds.exactness({"zero_optimization": {"stage": stage}})


# ---------------------------------------------------------------- ranks that are late, raise, or have little time


def one_rank_late(device: str, seconds: float = 3.0) -> dict[str, Any]:
    """One rank comes late to each step, the host of the others may run ahead; all end with the same bits."""
    holding, optimizer = with_optimizer(device, "fsdp")
    for step in range(STEPS):
        if step and dist.get_rank() == step % dist.get_world_size():
            time.sleep(seconds / 2)
        advance(device, holding, optimizer, [step])
    return by_how_much(stepped(device, "local"), holding.whole(optimizer))


def raises(device: str, mistake: str) -> None:
    """The last rank is given a wrong setting, or a gradient that no step takes; every rank is to raise."""
    last = dist.get_rank() == dist.get_world_size() - 1
    holding, optimizer = with_optimizer(device, "ddp", **({"lr": 0.03} if mistake == "setting" and last else {}))
    holding.give(on(device, problem.gradients(0)))
    if mistake == "gradient" and last:
        parameter = holding.tensors["even"]
        parameter.grad = None
        parameter.grad = torch.zeros_like(parameter).to_sparse()
    for _ in range(2):  # the CPU does not wait for a GPU's flags: what is wrong is raised when the next step begins
        optimizer.step()


def small_timeout(device: str) -> dict[str, Any]:
    """A group whose collectives have five seconds, on which one rank is two seconds late."""
    group = dist.new_group(timeout=timedelta(seconds=5), backend="nccl" if device == "cuda" else "gloo")
    model = problem.Bag(on(device, problem.initial()))
    optimizer = mm.Muon(problem.groups(model), process_group=group, **{**problem.SETTINGS, **EXACT})
    for step in range(STEPS):
        if step == 1 and dist.get_rank() == 1:
            time.sleep(2.0)
        for name, gradient in on(device, problem.gradients(step)).items():
            model.get_parameter(name).grad = gradient
        optimizer.step()
    return by_how_much(stepped(device, "local"), problem.result(model, optimizer))
