"""What torch itself puts around a model or an optimizer while several ranks run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import muonmesh as mm
from tests.support import problem


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6))])
        self.head = nn.Linear(6, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks[0](self.embedding(tokens)))
        return logits


def train_under_ddp(**how: Any) -> list[str]:
    """Three steps, and those of one process with the gradients that DDP has left; return what differs."""
    model, alone = Net(), Net()
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    wrapped = DistributedDataParallel(model, **how)
    settings = {"lr": 0.02, "compute_dtype": torch.float32}
    optimizer = mm.from_model(wrapped, process_group="world", shard_state=True, **settings)
    other = mm.from_model(alone, process_group="local", **settings)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        wrapped(torch.randint(0, 11, (5,), generator=generator)).square().mean().backward()
        for weight, twin in zip(model.parameters(), alone.parameters(), strict=True):
            assert weight.grad is not None
            twin.grad = weight.grad.clone()
        optimizer.clip_grad_norm_(0.1)
        other.clip_grad_norm_(0.1)
        optimizer.step()
        other.step()
    names = [name for name, _ in alone.named_parameters()]
    results = [dict(zip(names, map(problem.whole, module.parameters()), strict=True)) for module in (model, alone)]
    return problem.differing(*results)


@pytest.mark.parametrize("how", ["gradient_as_bucket_view", "static_graph"])
def test_ddp_with_checkpointed_activations_has_the_bits_of_one_process(workers, how: str) -> None:
    """With views into its buckets as gradients, which begin anywhere in memory, and with a graph that stays.

    The momentum is shared by the replicas: then each took its part of such a view from the start of the bucket.
    """
    assert workers(2).run(train_under_ddp, **{how: True}) == [[], []]


class World(mm.Muon):
    """ZeroRedundancyOptimizer has a ``process_group=`` of its own, so only a class can pass one on."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, process_group="world", **settings)


class Auto(mm.Muon):
    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, process_group="auto", **settings)


def partitioned(kind: type[mm.Muon], split: bool) -> list[str]:
    """Step once with a part of the parameters on each rank; return the error, and what of the weights has changed."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(6, 6, bias=False) for _ in range(4)]))
    before, message = [p.detach().clone() for p in model.parameters()], "nothing"
    model(torch.randn(4, 6, generator=torch.Generator().manual_seed(dist.get_rank()))).square().sum().backward()
    try:
        groups = mm.split_params(model) if split else list(model.parameters())
        ZeroRedundancyOptimizer(groups, kind, lr=0.1).step()
    except ValueError as error:
        message = f"{type(error).__name__}: {error}"
    return [message, str(all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)))]


@pytest.mark.parametrize(
    ("kind", "split", "expected"),
    [
        (mm.Muon, False, "nothing says which ranks hold the same parameter"),
        (mm.Muon, True, "found 4 param_names for 2 parameters"),
        (World, False, "their gradients differ"),
        (Auto, False, "their gradients differ"),
    ],
)
def test_zero_redundancy_optimizer_is_refused(workers, kind: Any, split: bool, expected: str) -> None:
    """Each rank's optimizer has other parameters, so the ranks would step each other's matrices."""
    for message, same in workers(2).run(partitioned, kind, split):
        assert expected in message
        assert same == "True"
        assert "ZeroRedundancyOptimizer" in message or kind is not mm.Muon
