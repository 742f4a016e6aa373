"""A small framework that stores weights in its own way, for docs/new-framework.md, which connects it to muonmesh."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn


class Attention(nn.Module):
    """A module of the framework, with q, k and v in one weight."""

    def __init__(self, width):
        super().__init__()
        self.width = width
        self.fused = nn.Parameter(torch.randn(3 * width, width) / width**0.5)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = nn.functional.linear(x, self.fused).chunk(3, -1)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v))


class RowShards:
    """The framework: each rank stores some rows of each weight, and the sum of its gradients over the ranks."""

    def __init__(self, model):
        self.model = model
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.shards = {name: nn.Parameter(self.cut(whole).clone()) for name, whole in model.named_parameters()}
        self.gradients = {}

    def cut(self, whole):
        return whole.detach().tensor_split(self.size)[self.rank]

    def backward(self, loss):
        loss.backward()
        for name, whole in self.model.named_parameters():
            total = whole.grad.float()
            dist.all_reduce(total)
            self.gradients[self.shards[name]] = self.cut(total)
            whole.grad = None

    def gather(self):
        for name, whole in self.model.named_parameters():
            pieces = [torch.empty_like(rows) for rows in whole.detach().tensor_split(self.size)]
            dist.all_gather(pieces, self.shards[name].detach())
            whole.data.copy_(torch.cat(pieces))
