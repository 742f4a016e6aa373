"""A model with what `muonmesh.audit` can tell apart, and torch's own optimizers for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import muonmesh as mm

MATRICES = ("attn.in_proj_weight", "attn.out_proj.weight", "up.weight", "down.weight")


class Net(nn.Module):
    """A fused matrix, two others, an embedding, vectors and a head."""

    def __init__(self, *, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(24, width)
        self.attn = nn.MultiheadAttention(width, 2, batch_first=True)
        self.up = nn.Linear(width, 40)
        self.down = nn.Linear(40, width)
        self.lm_head = nn.Linear(width, 24)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        return self.lm_head(self.down(self.up(hidden + self.attn(hidden, hidden, hidden)[0])))  # type: ignore[no-any-return]


def backward(model: nn.Module, scale: float = 1.0) -> None:
    tokens = torch.arange(12).reshape(2, 6)
    (scale * nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())).backward()


def halves(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    named = dict(model.named_parameters())
    return [named[name] for name in MATRICES], [parameter for name, parameter in named.items() if name not in MATRICES]


def torchs(model: nn.Module) -> list[Optimizer]:
    matrices, others = halves(model)
    return [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(others, lr=1e-3)]


def verdicts(report: mm.Audit) -> dict[str, str]:
    return {row.weight: row.verdict for row in report.rows}


class BySvd(Optimizer):
    """Orthogonalizes what this rank has of a matrix by an SVD; what is no matrix goes down its gradient.

    Args:
        params: The weights.
        blocks: In how many blocks of rows.
        fill: Whether the arbitrary vectors of the SVD fill the null space of a gradient of low rank.
        rows: Whether rows are normalized before.
        times: How many times too far it steps.
        apart: By what share of a step the ranks differ.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        *,
        blocks: int = 1,
        fill: bool = False,
        rows: bool = False,
        times: float = 1.0,
        apart: float = 0.0,
    ) -> None:
        self.blocks, self.fill, self.rows = blocks, fill, rows
        self.factor = times * (1 + apart * (dist.get_rank() if dist.is_initialized() else 0))
        super().__init__(params, {"lr": 0.1})

    def update_of(self, gradient: Tensor) -> Tensor:
        """Return the update of one block."""
        gradient = nn.functional.normalize(gradient) if self.rows else gradient
        u, s, v = torch.linalg.svd(gradient.float(), full_matrices=False)
        return u @ v if self.fill else (u * (s > 1e-6 * s[0])) @ v

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                local, update = (t.to_local() if isinstance(t, DTensor) else t for t in (parameter, parameter.grad))
                if parameter.ndim == 2 and update.numel():
                    update = torch.cat([self.update_of(block) for block in update.chunk(self.blocks)])
                local.sub_(group["lr"] * self.factor * update)
