"""A model with what `muonmesh.audit` can tell apart, and torch's own optimizers for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
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
