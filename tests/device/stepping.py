"""Steps with given gradients, on a CPU or on a simulated device, for tests and for what takes waits out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

import muonmesh as mm
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
    """What is stepped: settings of the optimizer, clipping, dtype of the weights, and whether a GradScaler is used."""

    settings: Mapping[str, Any] = {}
    policy: str | None = None
    dtype: torch.dtype = torch.float32
    scaled: bool = False
    missing: bool = False
    device: str = "cuda:0"
    rule: str = "muon"


class Found(NamedTuple):
    """Weights and state after the steps; races, and how often the host waited within the steps after the first."""

    tensors: dict[str, Tensor]
    races: list[Race]
    waits: dict[str, int]


CASES = {
    **{rule: Case(rule=rule) for rule in get_args(Algorithm) if rule != "adamw"},
    "bf16": Case(dtype=torch.bfloat16),
    "masters": Case({"master_dtype": torch.float32}, dtype=torch.bfloat16),
    "int8": Case({"state_dtype": "int8"}),
    "state on the host": Case({"state_device": "cpu"}),
    "masters on the host": Case({"state_device": "cpu", "master_dtype": torch.float32}, dtype=torch.bfloat16),
    "all": Case(policy="all"),
    "separate": Case(policy="separate"),
    "adamw only": Case(policy="adamw_only"),
    "per matrix": Case(policy="per_matrix"),
    "scaler": Case(scaled=True),
    "scaler, state on the host": Case({"state_device": "cpu"}, policy="all", scaled=True),
    "missing gradients": Case(missing=True),
    "another device than the current": Case(device="cuda:1"),
    "another device, state on the host": Case({"state_device": "cpu"}, policy="per_matrix", device="cuda:1"),
}


def values(seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a tensor for each parameter."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, (shape, _) in PARAMETERS.items()}


def steps(case: Case, device: str, found: SimulatedDevice | None = None) -> dict[str, Tensor]:
    """Step, and return weights and state on the host. All gradients are on the device before the first step."""
    parameters = {name: nn.Parameter(value.to(device)) for name, value in values(0, case.dtype).items()}
    given = [{n: v.to(device) for n, v in values(1 + step, case.dtype).items()} for step in range(STEPS)]
    if case.scaled:
        given = [{n: g * SCALES[step] for n, g in some.items()} for step, some in enumerate(given)]
        given[1]["wide"][3, 5] = torch.inf
        scales = [torch.tensor(SCALES[step]).to(device) for step in range(STEPS)]
        infinite = [torch.tensor(float(step == 1)).to(device) for step in range(STEPS)]
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
        "bucket_cap_mb": 0.001,
        **case.settings,
    }
    optimizer = mm.Muon(groups, lr=0.02, weight_decay=0.1, process_group="local", **settings)
    if device == "cpu":  # the operations of a device; but the host waits, and so asks before it writes
        optimizer._runtime.together = True
    for step, some in enumerate(given):
        for name, parameter in parameters.items():
            parameter.grad = None if case.missing and step and name in ("wide", "bias") else some[name]
        if found is not None and step == 1:
            found.waits.clear()
        if case.scaled:  # what GradScaler.step sets on an optimizer that scales by itself
            optimizer.grad_scale, optimizer.found_inf = scales[step], infinite[step]  # type: ignore[attr-defined]
        if case.policy is not None:
            optimizer.clip_grad_norm_(0.5, policy=case.policy)
        optimizer.step()
    waited = dict(found.waits) if found is not None else {}
    optimizer.finish()
    tensors = {
        f"{name}/{key}": value.detach().cpu().clone()
        for name, parameter in parameters.items()
        for key, value in optimizer.state[parameter].items()  # before the weights, whose reading waits for all
        if isinstance(value, Tensor)
    }
    tensors.update({name: parameter.detach().cpu().clone() for name, parameter in parameters.items()})
    if found is not None:
        found.waits.clear()
        found.waits.update(waited)
    return tensors


def simulated(case: Case, seed: int) -> Found:
    """Step on a simulated device."""
    with SimulatedDevice(seed, devices=2, raises=False) as device:
        tensors = steps(case, case.device, device)
    return Found(tensors, list(device.races), dict(device.waits))
