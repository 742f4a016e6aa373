"""A small language model in torch alone, and text that lies on its device: nothing in a step waits for the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

EMBEDDINGS = {"embed_tokens.weight": 0.2, "embed_positions.weight": 0.05}
"""Standard deviations at the start. With GPT-2's 0.02 for everything AdamW stays at the frequencies of tokens for most
of a short training: of four ways to begin this was the best for AdamW, at 48 wide and 120 steps."""


@dataclass(frozen=True)
class Size:
    """A decoder and what a step of its training reads."""

    width: int
    depth: int
    heads: int
    context: int
    batch: int
    held_out: int = 64
    """Windows that the validation loss is of."""


class Attention(nn.Module):
    """Causal self-attention, with q, k and v in one weight."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.qkv, self.o_proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.muonmesh_matrices = {"qkv.weight": ("rows", width, width, width)}

    def forward(self, x: Tensor) -> Tensor:
        """Return what each token attends to, (batch, length, width)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Attention and an MLP of squared ReLUs, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.up_proj, self.down_proj = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream after this block, (batch, length, width)."""
        x = x + self.attention(norm(x))
        out: Tensor = x + self.down_proj(self.up_proj(norm(x)).relu().square())
        return out


class Decoder(nn.Module):
    """GPT-2's shape with RMS norms that have no weights, and a head of its own."""

    def __init__(self, size: Size, vocab: int) -> None:
        super().__init__()
        self.embed_tokens, self.embed_positions = (nn.Embedding(n, size.width) for n in (vocab, size.context))
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.depth))
        self.lm_head = nn.Linear(size.width, vocab, bias=False)
        for name, weight in self.named_parameters():
            std = 0.55 / size.width**0.5  # GPT-2's 0.02 at its width
            std = EMBEDDINGS.get(name, std)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std /= (2 * size.depth) ** 0.5
            nn.init.normal_(weight, std=std)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, (batch, length, vocab)."""
        x = self.embed_tokens(tokens) + self.embed_positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.lm_head(norm(x))
        return logits


class Text:
    """Tokens on a device: windows in a random order that the seed decides, and windows that are held out."""

    def __init__(self, corpus: Any, device: torch.device) -> None:
        self.vocab, self.device = corpus.vocab, device
        self.tokens, self.held_out_tokens = (
            torch.from_numpy(np.array(tokens, dtype=np.int64)).to(device)
            for tokens in (corpus.train(), corpus.validation())
        )

    def order(self, size: Size, steps: int, seed: int) -> Tensor:
        """Return where the windows of each step begin, (steps, batch), each window once before any comes again."""
        count, needed = (len(self.tokens) - 1) // size.context, steps * size.batch
        generator = np.random.default_rng(seed)
        passes = [generator.permutation(count) for _ in range(-(-needed // count))]
        starts = torch.from_numpy(np.concatenate(passes)[:needed] * size.context)
        return starts.view(steps, size.batch).to(self.device)

    def window(self, starts: Tensor, context: int) -> Tensor:
        """Return windows of `context` tokens and one more, (len(starts), context + 1)."""
        return self.tokens[starts[:, None] + torch.arange(context + 1, device=self.device)]

    def held_out(self, size: Size) -> Tensor:
        """Return the windows that are held out, at equal distances, (size.held_out, context + 1)."""
        count = (len(self.held_out_tokens) - 1) // size.context
        starts = torch.arange(size.held_out, device=self.device) * count // size.held_out * size.context
        return self.held_out_tokens[starts[:, None] + torch.arange(size.context + 1, device=self.device)]


def norm(x: Tensor) -> Tensor:
    return nn.functional.rms_norm(x, x.shape[-1:])


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Cross-entropy in nats a token; on CUDA the products are in bf16."""
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=batch.is_cuda):
        logits = model(batch[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
