"""Steps with given gradients, on a CPU or on a simulated device, for tests and for what takes waits out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import muonmesh as mm
from muonmesh.comm.storage import local_of
from muonmesh.numerics.rules.registry import Algorithm
from tests.device.simulated import Race, SimulatedDevice

# name: (shape, matrices); None instead of matrices puts the parameter into the AdamW group.
PARAMETERS: dict[str, tuple[tuple[int, ...], Any]] = {
    "tall": ((14, 8), "whole"),
    "wide": ((8, 14), "whole"),
    "qkv": ((16, 12), ("rows", 8, 4, 4)),
    "experts": ((2, 6, 10), "stack"),
    "embedding": ((9, 8), None),
    "bias": ((5,), None),
}
STEPS = 3
SCALES = {0: 2.0**10, 1: 2.0**10, 2: 2.0**9}  # of a GradScaler, after an overflow in the second step


class Case(NamedTuple):
    """What is stepped: settings of the optimizer, clipping, dtype of the weights, and whether a GradScaler is used.

    ``layout`` says what each rank holds: all ("local" and "replicas"), or its rows ("sharded"). ``written`` says
    whether other code writes weights after the first step. With ``skip_above``, the second step is skipped.
    """

    settings: Mapping[str, Any] = {}
    policy: Any = None
    skip_above: float | str = torch.inf
    dtype: torch.dtype = torch.float32
    scaled: bool = False
    missing: bool = False
    device: str = "cuda:0"
    rule: str = "muon"
    metrics: bool = False
    layout: str = "local"
    written: bool = False


class Found(NamedTuple):
    """Weights and state after the steps; races; and where the host waited, in the first step and in those after it."""

    tensors: dict[str, Tensor]
    races: list[Race]
    waited_at_first: set[str]
    waits: dict[str, int]


CASES = {
    **{rule: Case(rule=rule) for rule in get_args(Algorithm) if rule != "adamw"},
    "bf16": Case(dtype=torch.bfloat16),
    "bf16 products": Case({"compute_dtype": torch.bfloat16, "ns_steps": None}, dtype=torch.bfloat16),
    "one at a time": Case({"memory_budget_mb": 0}),
    "all at once": Case({"memory_budget_mb": 1e6}),
    "masters": Case({"master_dtype": torch.float32}, dtype=torch.bfloat16),
    "masters, written": Case({"master_dtype": torch.float32}, dtype=torch.bfloat16, written=True),
    "stochastic rounding": Case({"stochastic_rounding": 5}, dtype=torch.bfloat16, rule="adamuon"),
    "stochastic rounding, scaler": Case({"stochastic_rounding": 5}, dtype=torch.bfloat16, scaled=True),
    "int8": Case({"state_dtype": "int8"}),
    "state on the host": Case({"state_device": "cpu"}),
    "masters on the host": Case({"state_device": "cpu", "master_dtype": torch.float32}, dtype=torch.bfloat16),
    "masters on the host, written": Case(
        {"state_device": "cpu", "master_dtype": torch.float32}, dtype=torch.bfloat16, written=True
    ),
    "all": Case(policy="all"),
    "separate": Case(policy="separate"),
    "adamw only": Case(policy="adamw_only"),
    "skipped by the mean": Case(policy="separate", skip_above="4x"),
    "scaler": Case(scaled=True),
    "scaler, state on the host": Case({"state_device": "cpu"}, policy="all", scaled=True),
    "missing gradients": Case(missing=True),
    "metrics, state on the host": Case({"state_device": "cpu"}, metrics=True),
    "another device than the current": Case(device="cuda:1"),
    "another device, state on the host": Case({"state_device": "cpu"}, policy="all", skip_above="4x", device="cuda:1"),
}


def values(seed: int, case: Case) -> dict[str, Tensor]:
    """Return what this rank holds of a tensor for each parameter."""
    generator = torch.Generator().manual_seed(seed)
    whole = {n: torch.randn(shape, generator=generator).to(case.dtype) for n, (shape, _) in PARAMETERS.items()}
    return {name: rank_part(tensor, case) for name, tensor in whole.items()}


def rank_part(tensor: Tensor, case: Case) -> Tensor:
    """Return what this rank holds of a tensor."""
    if case.layout != "sharded":
        return tensor
    parts = tensor.chunk(dist.get_world_size())
    return (*parts, *[tensor[:0]] * dist.get_world_size())[dist.get_rank()].clone()  # the last ranks may hold nothing


def steps(case: Case, device: str, simulator: SimulatedDevice | None = None) -> tuple[dict[str, Tensor], set[str]]:
    """Step, and return weights and state on the host, and where it waited in the first step.

    All gradients are on the device before it.
    """
    at_first = set[str]()
    parameters = {name: nn.Parameter(value.to(device)) for name, value in values(0, case).items()}
    gradients = [{n: v.to(device) for n, v in values(1 + step, case).items()} for step in range(STEPS)]
    if case.skip_above != torch.inf:
        gradients[1] = {n: g * 1e3 for n, g in gradients[1].items()}
    first = case.layout == "local" or dist.get_rank() == 0
    if case.scaled:
        gradients = [
            {n: g * SCALES[step] for n, g in step_gradients.items()} for step, step_gradients in enumerate(gradients)
        ]
        gradients[1]["wide"][0, 5] = torch.inf  # on one rank or on all, but rank 0 alone is told
        scales = [torch.tensor(SCALES[step]).to(device) for step in range(STEPS)]
        infinite = [torch.tensor(float(step == 1 and first)).to(device) for step in range(STEPS)]
    matrices = {name: how for name, (_, how) in PARAMETERS.items() if how is not None}
    muon = {"name": "muon", "algorithm": case.rule, "matrices": list(matrices.values())}
    groups = [
        {**muon, "params": [(n, parameters[n]) for n in matrices]},
        {"name": "adamw", "algorithm": "adamw", "params": [(n, p) for n, p in parameters.items() if n not in matrices]},
    ]
    settings = {
        "compute_dtype": torch.float32,
        "kernels": "torch",
        "ns_steps": 2,
        "memory_budget_mb": 0.016,
        **case.settings,
    }
    if case.layout == "sharded":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        settings["layouts"] = {name: (mesh, [Shard(0)], shape) for name, (shape, _) in PARAMETERS.items()}
    elif case.layout == "replicas":
        settings["process_group"] = "world"
    optimizer = mm.Muon(groups, lr=0.02, weight_decay=0.1, **{"process_group": "local", **settings})
    for group in optimizer.param_groups if case.skip_above != torch.inf else ():
        group["norm_means"] = ((50.0, 50.0, 50.0), (10.0, 10.0, 10.0))
    for step, step_gradients in enumerate(gradients):
        for name, parameter in parameters.items():
            parameter.grad = None if case.missing and step and name in ("wide", "bias") else step_gradients[name]
        if simulator is not None and step == 1:
            at_first.update(simulator.waits)
            simulator.waits.clear()
        if case.scaled:  # what GradScaler.step sets on an optimizer that scales by itself
            optimizer.grad_scale, optimizer.found_inf = scales[step], infinite[step]  # type: ignore[attr-defined]
        if case.policy is not None:
            optimizer.clip_grad_norm_(0.5, policy=case.policy, skip_above=case.skip_above)
        optimizer.step()
        figures = optimizer.metrics() if case.metrics else {}
        if case.written and step == 0:
            for parameter in parameters.values():
                parameter.data.mul_(0.25)
    waited = dict(simulator.waits) if simulator is not None else {}
    optimizer.finish()
    tensors = {
        f"{name}/{key}": local_of(value).detach().cpu().clone()
        for name, parameter in parameters.items()
        for key, value in optimizer.state[parameter].items()  # before the weights, whose reading waits for all
        if isinstance(value, Tensor)
    }
    tensors.update({name: torch.as_tensor(value).cpu() for name, value in figures.items()})
    tensors["norm means"] = torch.tensor(optimizer.param_groups[0]["norm_means"], dtype=torch.float64)
    tensors.update({name: parameter.detach().cpu().clone() for name, parameter in parameters.items()})
    if simulator is not None:
        simulator.waits.clear()
        simulator.waits.update(waited)
    return tensors, at_first


def expected(case: Case) -> dict[str, Tensor]:
    """Step on the CPU."""
    return steps(case, "cpu")[0]


def simulated(case: Case, seed: int) -> Found:
    """Step on a simulated device."""
    with SimulatedDevice(seed, devices=2, raises=False) as device:
        tensors, at_first = steps(case, case.device, device)
    return Found(tensors, list(device.races), at_first, dict(device.waits))


def differing(case: Case, outcome: Found) -> list[str]:
    """Return which tensors differ by more than the last bits, in which torch's own operations differ."""
    # A rank may hold one number, and torch's fused AdamW of a device rounds each step of bf16 by an ulp more or less.
    rounding = 0.04 if case.dtype == torch.bfloat16 else 1e-5
    numbers = expected(case)
    if numbers.keys() != outcome.tensors.keys():
        return sorted(numbers.keys() ^ outcome.tensors.keys())
    errors = {key: (outcome.tensors[key].double() - value.double()).norm() for key, value in numbers.items()}
    return [key for key, error in errors.items() if not float(error) <= rounding * float(numbers[key].double().norm())]
