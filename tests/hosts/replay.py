"""The plain loop that hosts are compared with: one process, and the gradients and rates of a host's optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import muonmesh as mm


class Given(NamedTuple):
    """What one step of a host's optimizer was given: whole gradients by name, and the rate of each group."""

    gradients: dict[str, Tensor]
    rates: dict[str, float]

    @staticmethod
    def to(optimizer: torch.optim.Optimizer) -> Given:
        """Read it off before the step; all ranks do, since shards are put together."""
        gradients, rates = {}, {}
        for group in optimizer.param_groups:
            rates[group["name"]] = float(group["lr"])
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                if parameter.grad is not None:
                    gradients[name] = whole(parameter.grad).clone()
        return Given(gradients, rates)


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor on each rank, as a plain one."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters that are trained, whole, under the names that the optimizer gives them."""
    groups = mm.split_params(model)
    pairs = [(n, p) for g in groups for n, p in zip(g["param_names"], g["params"], strict=True)]
    return {name: whole(parameter).clone() for name, parameter in pairs}


def replayed(model: nn.Module, steps: Sequence[Given], **settings: Any) -> dict[str, Tensor]:
    """Return the weights of a fresh model after the same steps in one process."""
    optimizer = mm.from_model(model, **{"process_group": "local", **settings})
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = step.rates[group["name"]]
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                parameter.grad = step.gradients.get(name)
        optimizer.step()
    return weights(model)


def different(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> list[str]:
    """Return the names under which two sets of weights are not the same bits."""
    return [name for name in {**first, **second} if name not in first or not torch.equal(first[name], second[name])]


def strengths(before: Mapping[str, Tensor], after: Mapping[str, Tensor], rate: float) -> dict[str, float]:
    """Return for each parameter the RMS of its change in units of the learning rate."""
    return {name: float((after[name] - before[name]).square().mean().sqrt()) / rate for name in before}
