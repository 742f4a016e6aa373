"""Gradients straight to owners: the bits of one process that is given their mean, for the fewest bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import muonmesh as mm
from muonmesh.comm.to_owners import ToOwners
from tests.parallel.test_bytes import Sent

FP32: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "compute_dtype": torch.float32}


class Net(nn.Module):
    """Six matrices, of which the last may be left out; an embedding and norms are AdamW's."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(24, width)
        self.up = nn.ModuleList(nn.Linear(width, 2 * width, bias=False) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(2 * width, width, bias=False) for _ in range(3))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor, blocks: int = 3) -> Tensor:
        x = self.embedding(tokens)
        for up, down in list(zip(self.up, self.down, strict=True))[:blocks]:
            x = x + down(torch.relu(up(x)))
        return self.norm(x)


def tokens(step: int, rank: int) -> Tensor:
    return torch.randint(0, 24, (4, 5), generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(out: Tensor) -> Tensor:
    return out.float().pow(2).mul(torch.arange(out.shape[-1])).mean() + out.float().sin().mean()


def local_gradient(model: Net, step: int, rank: int, blocks: int = 3) -> dict[str, Tensor]:
    """Return one replica's gradients at the weights of a model that is left as it is."""
    twin = Net(model.norm.normalized_shape[0]).to(model.norm.weight.dtype)
    twin.load_state_dict(model.state_dict())
    loss_of(twin(tokens(step, rank), blocks)).backward()
    return {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}


def averaged(many: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Add up in the order of the ranks, in fp32; zero where a rank has none."""
    found = {}
    for name in dict.fromkeys(name for some in many for name in some):
        here = next(some[name] for some in many if name in some)
        total = torch.zeros(here.shape, dtype=torch.float32)
        for some in many:
            total = total + some.get(name, torch.zeros_like(here)).float()
        found[name] = total / len(many)
    return found


def alone(steps: int, settings: dict[str, Any], dtype: torch.dtype, blocks: Any = lambda rank: 3) -> Net:
    """Train in one process that is given the mean of all ranks' gradients."""
    model = Net().to(dtype)
    optimizer = mm.from_model(model, process_group="local", gradients=Given(), **settings)
    for step in range(steps):
        means = averaged([local_gradient(model, step, rank, blocks(rank)) for rank in range(dist.get_world_size())])
        adamw = {n for g in optimizer.param_groups if g["algorithm"] == "adamw" for n in g["param_names"]}
        for name, parameter in model.named_parameters():
            mean = means.get(name)
            parameter.grad = None
            optimizer.gradients.given[parameter] = (  # type: ignore[attr-defined]
                mean if mean is None or name not in adamw else mean.to(dtype)
            )
        optimizer.step()
    return model


class Given(mm.GradientSource):
    """Gradients in a dtype of their own."""

    def __init__(self) -> None:
        self.given: dict[Tensor, Tensor | None] = {}

    def gradient(self, parameter: Tensor) -> Tensor | None:
        return self.given.get(parameter)

    def write(self, parameter: Tensor, gradient: Tensor | None) -> None:
        self.given[parameter] = gradient


def source_of(optimizer: mm.Muon) -> ToOwners:
    assert isinstance(optimizer.gradients, ToOwners)
    return optimizer.gradients


def differing(model: nn.Module, other: nn.Module) -> list[str]:
    theirs = dict(other.named_parameters())
    return [n for n, p in model.named_parameters() if not torch.equal(p, theirs[n])]


def replicas(wrapped: bool, dtype: torch.dtype, settings: dict[str, Any]) -> tuple[list[str], bool, int, int]:
    model = Net().to(dtype)
    net: nn.Module = DistributedDataParallel(model) if wrapped else model
    optimizer = mm.from_model(net, process_group="world", gradients="to_owners", bucket_cap_mb=0.004, **settings)
    for step in range(4):
        loss_of(net(tokens(step, dist.get_rank()))).backward()
        optimizer.step()
        empty = all(p.grad is None for n, p in model.named_parameters() if "up" in n or "down" in n)
        (optimizer if step % 2 else net).zero_grad()
    kept = sum(s["momentum_buffer"].numel() for s in optimizer.state.values() if "momentum_buffer" in s)
    str(optimizer.explain())
    return differing(model, alone(4, settings, dtype)), empty, kept, sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "ddp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_replicas_have_the_bits_of_one_process(workers, ranks: int, wrapped: bool, dtype: torch.dtype) -> None:
    outcomes = workers(ranks).run(replicas, wrapped, dtype, FP32)
    assert all(wrong == [] and empty for wrong, empty, *_ in outcomes)
    assert sum(kept for *_, kept, _ in outcomes) == 6 * 16 * 32, "each matrix has its momentum once"
    assert max(kept for *_, kept, _ in outcomes) <= 6 * 16 * 32 / ranks * 1.5
