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
from tests import problem


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
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            assert mine.grad is not None
            theirs.grad = mine.grad.clone()
        optimizer.clip_grad_norm_(0.1)
        other.clip_grad_norm_(0.1)
        optimizer.step()
        other.step()
    names = [name for name, _ in alone.named_parameters()]
    found = [dict(zip(names, map(problem.whole, some.parameters()), strict=True)) for some in (model, alone)]
    return problem.differing(*found)


@pytest.mark.parametrize("how", ["gradient_as_bucket_view", "static_graph"])
def test_ddp_with_checkpointed_activations_has_the_bits_of_one_process(workers, how: str) -> None:
    """With views into its buckets as gradients, which begin anywhere in memory, and with a graph that stays.

    The momentum is shared by the replicas: then each took its part of such a view from the start of the bucket.
    """
    assert workers(2).run(train_under_ddp, **{how: True}) == [[], []]


class Derived(mm.Muon):
    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)


def partitioned(kind: type[mm.Muon]) -> None:
    ZeroRedundancyOptimizer(list(nn.Linear(6, 10, bias=False).parameters()), kind, lr=0.1)


@pytest.mark.parametrize("kind", [mm.Muon, Derived])
def test_zero_redundancy_optimizer_is_refused_with_what_shares_the_work(workers, kind: type[mm.Muon]) -> None:
    for outcome in workers(2).run_expecting_errors(partitioned, kind):
        assert outcome.error is TypeError, outcome
        assert "ZeroRedundancyOptimizer: found muonmesh.Muon as its optimizer_class" in outcome.message
        assert 'process_group="world", shard_state=True' in outcome.message
