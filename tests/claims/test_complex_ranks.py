"""Complex weights under FSDP2, as torch's AdamW steps them in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import muonmesh as mm
from tests.support import gathered
from tests.support.in_copies import work_in_copies


class Spectral(nn.Module):
    """Weights as of a Fourier neural operator; rows that two ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(7, 5, dtype=torch.complex64))
        self.bias = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self) -> Tensor:
        loss = (self.weights * self.weights.conj() * (1 + 2j)).imag.sum() + self.weights.real.square().sum()
        return loss + (self.bias**3).real.sum()


class Net(nn.Module):
    """These weights, beside a matrix that Muon steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.spectral, self.mix = Spectral(), nn.Linear(4, 4)

    def forward(self) -> Tensor:
        loss: Tensor = self.spectral() + self.mix(torch.ones(2, 4)).square().sum()
        return loss


def trained(settings: dict[str, Any]) -> dict[str, Tensor]:
    """Weights and moments after three steps under FSDP2, whole; the state in CPU memory goes through the copies."""
    net = Net()
    fully_shard(net.spectral)  # one dtype for each call, as FSDP2 asks
    fully_shard(net)
    optimizer = mm.from_model(net, lr=1e-2, **settings)
    if "state_device" in settings:
        work_in_copies(optimizer)
    for _ in range(3):
        net().backward()
        optimizer.step()
        optimizer.zero_grad()
    names = {parameter: name for name, parameter in net.named_parameters()}
    moments = {
        f"{names[p]} {key}": optimizer.state[p][key]
        for p in names
        for key in ("exp_avg", "exp_avg_sq")
        if "spectral" in names[p]
    }
    return gathered.whole({**dict(net.named_parameters()), **moments})


@pytest.mark.parametrize(
    "settings",
    [{}, {"master_dtype": torch.float32}, {"state_dtype": "int8"}, {"state_device": "cpu"}],
    ids=["plain", "masters", "int8", "offload"],
)
def test_complex_weights_under_fsdp2_are_stepped_as_torch_steps_them(workers: Any, settings: dict[str, Any]) -> None:
    net = Net()
    weights = dict(net.spectral.named_parameters())
    decays = [{"params": [weights["weights"]], "weight_decay": 0.1}, {"params": [weights["bias"]], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(decays, lr=1e-2, betas=(0.9, 0.95))
    for _ in range(3):
        net().backward()
        reference.step()
        net.zero_grad()
    for tensors in workers(2).run(trained, settings):
        for name, weight in weights.items():
            for key, value in {"": weight, **reference.state[weight]}.items():
                if key != "step":
                    assert torch.equal(tensors[f"spectral.{name} {key}".strip()], value), (name, key)
